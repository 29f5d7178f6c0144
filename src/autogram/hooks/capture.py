"""Capture: arguments, outputs and gradients of each call of some modules."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autogram._containers import map_leaves
from autogram.errors import ChangedTensorError, HookError
from autogram.hooks.backward import Gates, Gradients, Observer
from autogram.hooks.registry import HookManager
from autogram.hooks.selection import Where, select

KeepFunction = Callable[["Call"], Any]


class Call:
    """One captured call of a module. Values not requested, or not yet known, are ``None``.

    Attributes:
        module: The module.
        name: The qualified name of the module.
        index: The number of captured calls of the module before this one.
    """

    def __init__(self, module: nn.Module, name: str, index: int) -> None:
        self.module = module
        self.name = name
        self.index = index
        self._values: dict[str, _Value] = {}

    @property
    def args(self) -> Any:
        """The positional arguments."""
        return self._get("args")

    @property
    def kwargs(self) -> Any:
        """The keyword arguments."""
        return self._get("kwargs")

    @property
    def output(self) -> Any:
        """The output."""
        return self._get("output")

    @property
    def grad_args(self) -> Any:
        """The gradients of the positional arguments, nested in the same way.

        An entry is ``None`` if the argument is not a tensor, or if no gradient reaches it. If
        several backward passes reach the call, the gradients are those of the last.
        """
        return self._get("grad_args")

    @property
    def grad_kwargs(self) -> Any:
        """The gradients of the keyword arguments, nested in the same way."""
        return self._get("grad_kwargs")

    @property
    def grad_output(self) -> Any:
        """The gradients of the output from its uses after the call, nested like the output.

        An entry is ``None`` if the loss does not depend on it after the call.
        """
        return self._get("grad_output")

    @property
    def grad_returned(self) -> Any:
        """The gradients of the returned tensors from all their uses, nested like the output.

        The module may itself use a tensor that it returns, such as an attention map. This is the
        gradient that ``retain_grad`` keeps without hooks. An entry is ``None`` if the tensor is
        a leaf, such as a parameter, or if no gradient reaches it. For ``capture(returned=True)``.
        """
        return self._get("grad_returned")

    def __repr__(self) -> str:
        return f"Call({self.name!r}, index={self.index}, {', '.join(self._values) or 'empty'})"

    def _get(self, field: str) -> Any:
        """A captured value, after waiting for copies to the CPU."""
        value = self._values.get(field)
        if value is None:
            return None
        for event in value.events:
            event.synchronize()
        if value.versions != _versions(value.content):
            raise ChangedTensorError(
                f"A tensor in `{field}` of call {self.index} of `{self.name}` was changed in place "
                "after it was captured. Pass `copy=True` to `capture`, which keeps copies."
            )
        return value.content


class _Value(NamedTuple):
    """A captured value: nested tensors, their versions, and events of complete copies."""

    content: Any
    versions: list[int]
    events: list[torch.cuda.Event]


def _versions(value: Any) -> list[int]:
    """The versions of the tensors in a nested value."""
    versions: list[int] = []
    map_leaves(value, lambda x: versions.append(x._version) if isinstance(x, Tensor) else None)
    return versions


@contextmanager
def capture(
    model: nn.Module,
    *,
    where: Where | None = None,
    inputs: bool = True,
    outputs: bool = True,
    gradients: bool = True,
    returned: bool = False,
    detach: bool = True,
    copy: bool = False,
    device: torch.device | str | None = None,
    limit: int | None = None,
    keep: KeepFunction | None = None,
) -> Iterator[Mapping[str, list[Any]]]:
    """Records each call of some modules inside a block.

    Each call has its own arguments, output and gradients, in any order of calls and backward
    passes, in the block or after it. Gradients keep no activation alive. It does not record the
    second run of a checkpoint (`use_reentrant=False`), or backward passes of an engine. Captured
    tensors live as long as the mapping, or the calls in it.

    Args:
        model: The module whose inner modules are chosen.
        where: The chosen inner modules, as for :meth:`HookManager.register`; all, if ``None``.
        inputs: Whether to keep arguments and, with ``gradients``, their gradients.
        outputs: Whether to keep the output and, with ``gradients``, its gradients.
        gradients: Whether to keep gradients.
        returned: Whether to keep the gradients of the returned tensors, too, from their uses inside
            the module and after it: :attr:`Call.grad_returned`.
        detach: Whether to keep tensors without their graph.
        copy: Whether to keep copies. Otherwise a tensor shares its memory with the network; if the
            network changes the tensor in place, reading it raises an error.
        device: The device of kept tensors. From a GPU to the CPU, they are copied into pinned
            memory, and nothing waits until a copy is read.
        limit: The number of last calls to keep for each module. All, if ``None``.
        keep: A function of a call, whose result is kept instead of the call. It runs when the
            call is complete: at the end of the forward, or, with ``gradients``, when the gradients
            are known. If no backward pass reaches the call, it runs at the end of the block.

    Yields:
        For the name of each chosen module, the list of its calls, in the order of the forwards.

    Raises:
        InvalidModulesError: No module is chosen, or a scripted one is chosen.
        HookError: ``limit`` is not positive.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram.hooks import capture
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> with capture(model, where=nn.Tanh) as calls:
        ...     model(torch.randn(5, 3)).sum().backward()
        >>> calls["1"][0].grad_output.shape
        torch.Size([5, 4])
    """
    if limit is not None and limit < 1:
        raise HookError(f"`limit` is {limit}. Pass how many calls to keep, at least 1, or `None`.")
    modules = select(model, (lambda _name, _module: True) if where is None else where)
    to = None if device is None else torch.device(device)
    take = partial(_taken, detach=detach, copy=copy, device=to)
    names = {id(module): name for name, module in modules.items()}
    has_returned = gradients and returned
    captured = _Captured(names, take, inputs, outputs, gradients, has_returned, limit, keep)
    with HookManager() as manager:
        gates = Gates(captured.begin, has_gradients=gradients)
        manager.register(gates, modules, kind="backward", name="capture")
        try:
            yield captured.by_name
        finally:
            captured.close()


def _taken(value: Any, *, detach: bool, copy: bool, device: torch.device | None) -> _Value:
    """The kept form of a value of the network."""
    events: list[torch.cuda.Event] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = leaf.detach() if detach else leaf
        if device is None or tensor.device.type == device.type:
            return tensor.clone() if copy else tensor
        if not tensor.is_cuda or device.type != "cpu":
            return tensor.to(device)
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        pinned = pinned.copy_(tensor, non_blocking=True)
        events.append(torch.cuda.current_stream(tensor.device).record_event())
        return pinned

    content = map_leaves(value, take)
    return _Value(content, _versions(content), events)


@dataclass(eq=False)
class _Captured:
    """The captured calls, by the name of their module."""

    names: dict[int, str]  # by the `id` of the module
    take: Callable[[Any], _Value]
    inputs: bool
    outputs: bool
    gradients: bool
    returned: bool
    limit: int | None
    keep: KeepFunction | None

    def __post_init__(self) -> None:
        self.by_name: dict[str, list[Any]] = {name: [] for name in self.names.values()}
        self._counts = dict.fromkeys(self.by_name, 0)
        self._lock = threading.Lock()

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Observer | None:
        """Begins a call, unless a checkpoint runs it again inside a backward pass."""
        name = self.names.get(id(module))
        if name is None or torch._C._current_graph_task_id() >= 0:
            return None
        with self._lock:
            call = Call(module, name, self._counts[name])
            self._counts[name] += 1
            calls = self.by_name.setdefault(name, [])
            calls.append(call)
            if self.limit is not None and len(calls) > self.limit:
                del calls[0]
        watch = _Watch(self, call, args, kwargs)
        return Observer(watch.see, watch.keep, watch.end, has_returned=self.returned)

    def complete(self, call: Call) -> None:
        """Replaces a call by the result of the user's function ``keep``."""
        calls: list[Any] = self.by_name.get(call.name, [])
        if self.keep is None or not any(other is call for other in calls):
            return
        kept = self.keep(call)
        calls[:] = [kept if other is call else other for other in calls]

    def close(self) -> None:
        """Ends the block: completes all calls, and drops them."""
        for call in [x for calls in self.by_name.values() for x in calls if isinstance(x, Call)]:
            self.complete(call)
        self.by_name = {}


class _Watch:
    """Records the values of one call. It holds no tensor, and the call weakly."""

    def __init__(
        self, captured: _Captured, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._captured = captured
        self._call = weakref.ref(call)
        self._arguments = _skeleton((args, kwargs))
        self._output: Any = None
        if captured.inputs:
            call._values["args"] = captured.take(args)
            call._values["kwargs"] = captured.take(kwargs)

    def end(self, output: Any) -> None:
        """Records the output."""
        call, captured = self._call(), self._captured
        self._output = _skeleton(output)
        if call is None:
            return
        if captured.outputs:
            call._values["output"] = captured.take(output)
        if not captured.gradients:
            captured.complete(call)

    def keep(self, gradients: Gradients) -> None:
        """Records the gradients of the output, if the forward has ended."""
        call = self._call()
        if call is not None and self._captured.outputs and gradients:
            call._values["grad_output"] = self._captured.take(_filled(self._output, gradients))

    def see(self, gradients: Gradients, kept: None, returned: Gradients) -> None:
        """Records the gradients of the arguments and of the returned tensors, which come last."""
        del kept
        call = self._call()
        if call is None:
            return
        if self._captured.returned:
            values = self._captured.take(_filled(self._output, returned))
            call._values["grad_returned"] = values
        if self._captured.inputs:
            args, kwargs = _filled(self._arguments, gradients)
            call._values["grad_args"] = self._captured.take(args)
            call._values["grad_kwargs"] = self._captured.take(kwargs)
        self._captured.complete(call)


def _skeleton(value: Any) -> Any:
    """A nested value without its leaves."""
    return map_leaves(value, lambda _: None)


def _filled(skeleton: Any, leaves: Gradients) -> Any:
    """A nested value with other leaves."""
    rest = iter(leaves)
    return map_leaves(skeleton, lambda _: next(rest))
