"""Gradients of the inputs and outputs of each call of a module.

All tensors that enter a call go through one *gate*, and all tensors that leave it through another.
A gate is one node of autograd's graph, the identity. In a backward pass, the gates see the
gradients of this call alone, whatever else uses the tensors, however many nodes the call has, and
whatever containers it uses.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from autogram._containers import map_leaves
from autogram.errors import HookError, UnsupportedError

Gradients = tuple[Tensor | None, ...]

BackwardHook = Callable[[nn.Module, Gradients, Gradients], Any]

_Form = tuple[int, tuple[int, ...]]
"""The number of leaves in a value, and the positions of those that go through a gate."""

SILENT_PASSES: dict[int, Any] = {}
"""Backward passes that call no hook, by PyTorch's number of the pass.

A pass keeps an error passed to ``fail(error)``, and raises it at its end.
"""


class Observer(NamedTuple):
    """Functions that observe one call of a module, and its gradients in each backward pass.

    Gradients have an entry for each leaf of the arguments, or of the output. An entry is ``None``
    if the leaf is not a tensor, or if no gradient reaches it.
    """

    see: Callable[[Gradients, Any, Gradients], Any]
    """Receives the gradients of the arguments, and may return others to replace them.

    Called last in each pass that reaches the call, with the result of ``keep`` and, if
    ``has_returned``, the gradients of the returned tensors; at the end of the pass, if it does
    not reach the arguments.
    """
    keep: Callable[[Gradients], Any] = lambda gradients: gradients
    """Receives the gradients of the output, and returns the part that ``see`` needs."""
    end: Callable[[Any], None] = lambda _: None
    """Receives the output, which is ``None`` if the forward raised."""
    has_returned: bool = False
    """Whether to observe the gradients of the returned tensors, from uses in the module, too.

    The gate of the output comes after the module's tensors, and sees only later uses.
    """


class Gates:
    """Puts gates around the calls of modules, with a pair of PyTorch's hooks.

    Args:
        observe: Makes the observer of a call from its module and arguments, or returns ``None``.
        has_gradients: Whether to put gates. Without gates, observers see only the forward.
    """

    def __init__(
        self,
        observe: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Observer | None],
        *,
        has_gradients: bool = True,
    ) -> None:
        self._observe = observe
        self._has_gradients = has_gradients
        self.has_replaced = False  # whether an observer has ever replaced gradients
        self._open = _Open()

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments after a gate: a forward pre-hook with keyword arguments."""
        observer = self._observe(module, args, kwargs)
        call = None if observer is None else _Call(observer, self, type(module).__name__)
        self._open.calls[id(module)].append(call)
        is_seen = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        if call is None or not (is_seen and self._has_gradients):
            return None
        gated: tuple[tuple[Any, ...], dict[str, Any]] = call.enter((args, kwargs))
        return gated

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """The output after a gate: a forward hook that is also called if the forward raised."""
        del args, kwargs
        calls = self._open.calls[id(module)]
        call = calls.pop() if calls else None  # none if the hooks were registered during the call
        if not calls:
            del self._open.calls[id(module)]
        return None if call is None else call.leave(output)


class _Open(threading.local):
    """The running calls of this thread, by the ``id`` of their module, the innermost last."""

    def __init__(self) -> None:
        self.calls: defaultdict[int, list[_Call | None]] = defaultdict(list)


class _Gate(torch.autograd.Function):
    """Identity of several tensors. An observer sees their gradients together."""

    @staticmethod
    def forward(
        ctx: Any, see: Callable[[Gradients], Any], are_views: Sequence[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.see = see
        ctx.set_materialize_grads(False)
        # An alias with the same storage that is not a view for autograd: changing it in place after
        # the gate is allowed. If that would change another tensor of the user, the alias is a
        # view, so that PyTorch refuses the change.
        pairs = zip(tensors, are_views, strict=True)
        return tuple([x.view_as(x) if is_view else x.detach() for x, is_view in pairs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        replaced = ctx.see(gradients)
        return (None, None, *(gradients if replaced is None else replaced))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        del ctx
        return tuple([None if x is None else x.view_as(x) for x in tangents[2:]])


class _Moved(torch.autograd.Function):
    """Gives a tensor the graph of its alias, through which it was changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, alias: Tensor) -> Tensor:
        del alias
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return torch.zeros_like(gradient), gradient


class _Call:
    """One call of a module, between its gates, which hold this object.

    It holds no tensor, except those kept by the observer in a backward pass between the gates.
    """

    def __init__(self, observer: Observer, gates: Gates, name: str) -> None:
        self._observer = observer
        self._gates, self._name = gates, name
        self._is_passed_by = False  # whether a silent pass has gone through the gates
        self._kept: dict[int, Any] = {}  # by passes that have reached the output, not the input
        self._returned: dict[int, dict[int, Tensor]] = {}  # by these passes, and number of the leaf
        self._of_input: _Form = (0, ())
        self._of_output: _Form = (0, ())
        self._entered: list[tuple[Tensor, Tensor, Any]] | None = None

    def enter(self, arguments: Any) -> Any:
        """The arguments with their tensors after a gate."""
        gated, self._of_input, pairs = self._gated(arguments, self._see_input, set())
        # An alias that is changed in place inside the call gets another node than the gate.
        self._entered = [(tensor, alias, alias.grad_fn) for tensor, alias in pairs]
        return gated

    def leave(self, output: Any) -> Any:
        """The output with its tensors after a gate, or ``None`` if there are none."""
        self._observer.end(output)
        entered, self._entered = self._entered, None
        if entered is None:
            return None
        changed = [(x, alias) for x, alias, gate in entered if alias.grad_fn is not gate]
        moved = {id(alias) for _, alias in changed}
        places = {_place(alias) for _, alias, _ in entered}
        gated, self._of_output, pairs = self._gated(output, self._see_output, places, moved)
        if self._observer.has_returned:
            for i, (tensor, _) in zip(self._of_output[1], pairs, strict=True):
                if not tensor.is_leaf:  # a parameter lives on, and has its gradient in `.grad`
                    tensor.register_hook(partial(self._see_returned, i))
        behind = {id(tensor): alias for tensor, alias in pairs}
        returned: dict[int, Tensor] = {}
        for tensor, alias in changed:
            if sum(x is tensor for x, _, _ in entered) > 1:
                raise HookError(
                    "A module with a backward hook was given a tensor twice, and changed it in "
                    "place: the gradients of the two arguments cannot be separated. Pass a "
                    "clone of it, or let the module compute a new tensor."
                )
            own = behind.get(id(alias))
            # Keep the version: the values are still those that the call has saved.
            with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]  # as exported
                _Moved.apply(tensor, alias if own is None else own)  # type: ignore[no-untyped-call]  # as typed in torch
            if own is not None:
                returned[id(own)] = tensor  # the call has returned its argument
        if not returned:
            return gated
        return map_leaves(gated, lambda x: returned.get(id(x), x))

    def _gated(
        self,
        value: Any,
        see: Callable[[Gradients], Any],
        places: set[int],
        moved: set[int] | frozenset[int] = frozenset(),
    ) -> tuple[Any, _Form, list[tuple[Tensor, Tensor]]]:
        """A value with its tensors after a gate, their places, and pairs of tensor and alias."""
        leaves: list[Any] = []
        map_leaves(value, leaves.append)
        positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        form = len(leaves), tuple(positions)
        if not positions:
            return value, form, []
        tensors = [leaves[i] for i in positions]
        are_views = [_place(x) in places and id(x) not in moved for x in tensors]
        aliases = _Gate.apply(see, are_views, *tensors)  # type: ignore[no-untyped-call]  # as typed in torch
        for i, alias in zip(positions, aliases, strict=True):
            leaves[i] = alias
        rest = iter(leaves)
        pairs = list(zip(tensors, aliases, strict=True))
        return map_leaves(value, lambda _: next(rest)), form, pairs

    def _see_output(self, gradients: Gradients) -> None:
        """The gate of the output: it runs first."""
        number = torch._C._current_graph_task_id()
        if number in SILENT_PASSES:
            return
        self._kept[number] = self._observer.keep(_at_leaves(gradients, *self._of_output))
        _, through_gate = self._of_input
        if through_gate or self._observer.has_returned:
            self._finish_at_end(number)
        else:
            self._finish(number)

    def _see_returned(self, leaf: int, gradient: Tensor) -> None:
        """A tensor returned by the module: its uses in the module and after it have run."""
        number = torch._C._current_graph_task_id()
        if number not in SILENT_PASSES:
            self._returned.setdefault(number, {})[leaf] = gradient
            self._finish_at_end(number)

    def _finish_at_end(self, number: int) -> None:
        """For a pass that ends before the gate of the input, such as one to parameters alone."""
        engine: Any = Variable._execution_engine
        engine.queue_callback(lambda: self._end(number))

    def _see_input(self, gradients: Gradients) -> Gradients | None:
        """The gate of the arguments: everything between the gates has run."""
        number = torch._C._current_graph_task_id()
        silent = SILENT_PASSES.get(number)
        if silent is not None:
            self._is_passed_by = True
            if self._gates.has_replaced:
                silent.fail(self._refusal())
            return None
        versions = [_version(x) for x in gradients]
        replaced = self._finish(number, gradients)
        if versions != [_version(x) for x in gradients]:
            self._note_replaced()
        size, collected = self._of_input
        if replaced is None:
            return None
        chosen = (replaced,) if isinstance(replaced, Tensor) else tuple(replaced)
        if len(chosen) != size:
            raise HookError(
                f"A backward hook returned {len(chosen)} gradients for the {size} arguments of its "
                "module. Return one for each of `grad_input`, or `None` to leave them unchanged."
            )
        new = tuple([chosen[i] for i in collected])
        if any(x is not before for x, before in zip(new, gradients, strict=True)):
            self._note_replaced()
        return new

    def _note_replaced(self) -> None:
        """Notes that gradients were replaced; raises if a silent pass has missed it."""
        self._gates.has_replaced = True
        if self._is_passed_by:
            raise self._refusal()

    def _refusal(self) -> UnsupportedError:
        """The error for a silent pass that would differ from all others."""
        return UnsupportedError(
            f"A backward hook on a `{self._name}` has replaced gradients. An engine's passes do "
            "not call it, so their Jacobian is not that of `losses.backward`. Register the "
            "function with PyTorch's `register_full_backward_hook`, which these passes call, or "
            "deactivate it before the forward pass."
        )

    def _finish(self, number: int, gradients: Gradients = ()) -> Any:
        """Shows the observer the gradients of the arguments, which come last."""
        size, collected = self._of_input
        of_input = _at_leaves(gradients or (None,) * len(collected), size, collected)
        if number not in self._kept:
            self._kept[number] = self._observer.keep((None,) * self._of_output[0])
        returned = self._returned.pop(number, {})
        of_returned = tuple([returned.get(leaf) for leaf in range(self._of_output[0])])
        return self._observer.see(of_input, self._kept.pop(number), of_returned)

    def _end(self, number: int) -> None:
        """Finishes, at the end of a pass, if the gate of the arguments was not reached."""
        if number in self._kept or number in self._returned:
            self._finish(number)


def _place(tensor: Tensor) -> int:
    """A number that is equal for tensors that share their memory."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return id(tensor)
    number: int = tensor.untyped_storage()._cdata
    return number


def _version(gradient: Tensor | None) -> int:
    """The number of changes in place of a gradient."""
    return 0 if gradient is None or gradient.is_inference() else gradient._version


def _at_leaves(gradients: Gradients, size: int, found: tuple[int, ...]) -> Gradients:
    """Gradients of some leaves, and ``None`` for the others."""
    entries: list[Tensor | None] = [None] * size
    for i, gradient in zip(found, gradients, strict=True):
        entries[i] = gradient
    return tuple(entries)


def gates_of(hook: BackwardHook) -> Gates:
    """The gates that pass both gradients of each call to a user's hook. They hold no module."""

    def observe(module: nn.Module, *_: object) -> Observer:
        reference = weakref.ref(module)

        def see(of_input: Gradients, of_output: Gradients, _: Gradients) -> Any:
            module = reference()
            return None if module is None else hook(module, of_input, of_output)

        return Observer(see)

    return Gates(observe)
