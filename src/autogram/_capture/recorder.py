"""The recorder: sees every torch call of a forward pass, and taps the uses of parameters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from autogram._capture.batching import WRONG_WHEN_BATCHED
from autogram._capture.composite import inlined
from autogram._capture.containers import exchange, map_tensors, tensors_in, tensors_in_call
from autogram._capture.recording import Channel, Recording
from autogram._capture.tap import is_in_place_tap, is_tap_of, tap
from autogram._capture.tracked import (
    Tracked,
    settle,
    track_derived,
    track_parameter,
    track_unseen,
)
from autogram._capture.use import FallbackUse, Operand, RuleUse, Use
from autogram._errors import UnsupportedError
from autogram.rules import Recipe, Rule, find_rule, product

_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda"}
_LOOK_AT_OTHER = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_IN_PLACE_OPERATORS = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "matmul", "truediv", "div", "pow", "mod")),
}


class _Batched:
    """The status of a tensor that depends on the inputs of the modules."""


_BATCHED = _Batched()
Status = Tracked | _Batched | None  # the last for a constant


class Recorder(TorchFunctionMode):
    """One recorded forward pass, from the opening of its outermost module to its end.

    Marks are kept by ``id`` with a weak reference, because tensors have no cheaper identity. A
    tensor without a mark is a constant, unless autograd knows where it comes from.
    """

    def __init__(self, channel: Channel, parameters: Mapping[Tensor, str]) -> None:
        super().__init__()
        for parameter, name in parameters.items():
            if parameter.requires_grad and parameter.is_complex():
                raise UnsupportedError(
                    f"The parameter `{name}` is complex, and the inner product of complex "
                    "gradients is not settled. Keep it as a real parameter with a last dimension "
                    "of size two, and use `torch.view_as_complex` of it in the forward."
                )
        self._recording = Recording(channel, dict(parameters))
        self._parameters = {id(p): track_parameter(p) for p in parameters if p.requires_grad}
        self._marks: dict[int, tuple[weakref.ref[Tensor], Status, int, bool]] = {}
        channel.recordings.add(self._recording)

    def begin(self, inputs: Any) -> None:
        """Marks what the outermost module is given."""
        tensors = [t for t in tensors_in(inputs) if id(t) not in self._parameters]
        sizes = [t.shape[0] for t in tensors if t.dim() > 0]
        for tensor in tensors:
            # Masks and position indices without a batch dimension are constants. What is taken
            # for one wrongly costs time, not exactness: it ends in a derived tensor.
            if sizes[:1] and sizes[0] in tensor.shape[:2]:
                self._mark(tensor, _BATCHED)

    def end(self, output: Any) -> Any:
        """The output of the outermost module, with taps where it is computed from parameters."""
        substitutes: dict[int, Tensor] = {}
        for tensor in tensors_in(output):
            status = self._status(tensor) if tensor.requires_grad else None
            if isinstance(status, Tracked):
                letters = "TSRUVWXYZ"[: tensor.dim()]
                recipe = product(tensor, f"{letters}->{letters}")
                operands = [(tensor, settle(tensor, status))]
                use = self._rule_use("the output of the module", tensor, [recipe], operands)
                substitutes[id(tensor)] = tap(use, tensor, (), in_place=False)
        self._marks.clear()
        return exchange(output, substitutes) if substitutes else output

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carries out one torch call, and records it."""
        del types
        kwargs = kwargs or {}
        if torch._C._are_functorch_transforms_active():
            # Inside `torch.func` transforms, tensors are wrappers that taps must not keep. What
            # comes out of the transform is adopted, like the output of any call not seen.
            return function(*args, **kwargs)
        tracked: list[tuple[Tensor, Tracked]] = []
        batched = False
        # Of `x.to(y)` and the like, `y` gives no more than a dtype or a shape.
        read = (args[:1], {}) if _name(function) in _LOOK_AT_OTHER else (args, kwargs)
        for tensor in tensors_in_call(*read):
            status = self._status(tensor)
            if isinstance(status, Tracked):
                tracked.append((tensor, status))
            elif status is not None:
                batched = True
        if not torch.is_grad_enabled():
            tracked = []
        if not tracked:
            output = function(*args, **kwargs)
            if batched:
                self._mark_batched(function, output, args, kwargs)
            return output
        if not batched:
            output = function(*args, **kwargs)
            self._mark_derived(function, output, args, [status for _, status in tracked])
            return output
        operands = [(tensor, settle(tensor, status)) for tensor, status in tracked]
        return self._use(function, args, kwargs, operands)

    def _use(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[tuple[Tensor, Tracked]],
    ) -> Any:
        """A call that reads tracked and batched tensors."""
        is_complex = any(tensor.is_complex() for tensor in tensors_in_call(args, kwargs))
        # Rules are written for real numbers; vector-Jacobian products know how to conjugate.
        rule = None if is_complex else find_rule(function)
        recipes = _recipes(rule, args, kwargs, operands) if rule is not None else None
        if recipes is not None:
            return self._use_with_rule(function, args, kwargs, operands, recipes)
        body = inlined(function) if rule is None else None
        if body is not None:
            with self:
                return body(*args, **kwargs)
        return self._use_without_rule(function, args, kwargs, operands)

    def _use_with_rule(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[tuple[Tensor, Tracked]],
        recipes: list[Recipe],
    ) -> Any:
        """A call whose blocks a rule knows."""
        in_place = _is_in_place(function)
        saved = [
            x.detach().clone() if in_place and x is args[0] else x.detach()
            for recipe in recipes
            for x in recipe.saved
        ]
        output = function(*args, **kwargs)
        changed = args[0] if in_place else output
        use = self._rule_use(_name(function), changed, recipes, operands)
        tapped = tap(use, changed, tuple(saved), in_place=in_place)
        self._mark_batched(function, tapped, args, kwargs)
        return output if in_place else tapped

    def _rule_use(
        self,
        function: str,
        output: Tensor,
        recipes: list[Recipe],
        operands: list[tuple[Tensor, Tracked]],
    ) -> RuleUse:
        """The record of a call with a rule."""
        by_id = {id(tensor): tracked for tensor, tracked in operands}
        found, start = [], 0
        for recipe in recipes:
            stop = start + len(recipe.saved)
            found.append(Operand(by_id[id(recipe.operand)], recipe.form, slice(start, stop)))
            start = stop
        recording = self._recording
        use = RuleUse(recording, recording.count, function, tuple(output.shape), tuple(found))
        self._count(use)
        return use

    def _use_without_rule(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[tuple[Tensor, Tracked]],
    ) -> Any:
        """A call that is left to the fallback: made on aliases, which only this call reads."""
        in_place = _is_in_place(function)
        by_id = {id(tensor): status for tensor, status in operands}
        edges: list[GradientEdge] = []
        reads: list[Tracked] = []

        def alias(tensor: Tensor) -> Tensor:
            status = by_id.get(id(tensor))
            if status is None:
                return tensor
            reads.append(status)
            # What an in-place call changes must be the tensor itself; its edge is that of before.
            own = tensor if in_place and tensor is args[0] else tensor.view_as(tensor)
            edges.append(get_gradient_edge(own))
            return own

        args, kwargs = map_tensors((args, kwargs), alias)
        output = function(*args, **kwargs)
        changed = args[0] if in_place else output
        substitutes = {}
        for tensor in tensors_in_call((changed,), {}):
            if not (tensor.requires_grad and _reaches(tensor, edges)):
                continue
            recording = self._recording
            use = FallbackUse(
                recording,
                recording.count,
                _name(function),
                tuple(tensor.shape),
                tensor.dtype,
                tuple(reads),
                get_gradient_edge(tensor),
                tuple(edges),
            )
            self._count(use)
            substitutes[id(tensor)] = tap(use, tensor, (), in_place=in_place)
        if not in_place:
            output = exchange(output, substitutes)
        self._mark_batched(function, changed if in_place else output, args, kwargs)
        return output

    def _count(self, use: Use) -> None:
        """Enters a use into the recording."""
        recording = self._recording
        recording.count += 1
        recording.signature = hash((recording.signature, use.shape))
        for tracked in use.reads:
            recording.add(tracked)

    def _status(self, tensor: Tensor) -> Status:
        """What is known of a tensor."""
        parameter = self._parameters.get(id(tensor))
        if parameter is not None:
            return parameter
        has_graph = tensor.grad_fn is not None
        mark = self._marks.get(id(tensor))
        if mark is not None and mark[0]() is tensor:
            _, status, version, had_graph = mark
            # A mark is stale where a view of the tensor was changed in place, or a custom autograd
            # Function has made the result of its own, unrecorded calls a part of the graph.
            if not has_graph or (had_graph and tensor._version == version):
                return status
        if not has_graph:
            return None
        status = self._adopt(tensor)
        self._mark(tensor, status)
        return status

    def _adopt(self, tensor: Tensor) -> Status:
        """The status of a tensor that comes from a call which the recorder could not see.

        That is a custom autograd Function, a scripted module, or a call before the recording. If
        parameters entered it there, the tensor is derived from them; if batched tensors did too,
        it is a use, and is tapped when it is first read.
        """
        sources, reaches_tap = self._untapped_parameters(tensor)
        if not sources:
            return _BATCHED
        if not reaches_tap:
            return track_unseen(tensor, sources)
        recording = self._recording
        use = FallbackUse(
            recording,
            recording.count,
            f"the call behind `{type(tensor.grad_fn).__name__}`",
            tuple(tensor.shape),
            tensor.dtype,
            tuple(self._parameters[id(p)] for p in sources),
            get_gradient_edge(tensor),
            sources,
        )
        self._count(use)
        tap(use, tensor, (), in_place=True)  # the user's code goes on with this very tensor
        return _BATCHED

    def _untapped_parameters(self, tensor: Tensor) -> tuple[tuple[Tensor, ...], bool]:
        """The parameters that reach a tensor past every tap, and whether a tap does."""
        found: dict[int, Tensor] = {}
        reaches_tap = False
        seen, pending = set(), [tensor.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if is_tap_of(self._recording.channel, node):
                reaches_tap = True
                if not is_in_place_tap(node):  # else it may cover no more than a slice
                    continue
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self._parameters:
                found[id(variable)] = variable
            pending.extend(following for following, _ in node.next_functions)
        return tuple(found.values()), reaches_tap

    def _mark(self, tensor: Tensor, status: Status) -> None:
        """Remembers what is known of a tensor."""
        has_graph = tensor.grad_fn is not None
        self._marks[id(tensor)] = (weakref.ref(tensor), status, tensor._version, has_graph)

    def _mark_batched(
        self,
        function: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Marks the output of a call that reads a batched tensor."""
        if isinstance(output, Tensor):
            self._mark(output, _BATCHED)
        elif isinstance(output, (list, tuple)):
            for tensor in tensors_in_call(tuple(output), {}):
                self._mark(tensor, _BATCHED)
        elif output is None and args and isinstance(args[0], Tensor):  # `x[...] = y`
            self._mark(args[0], _BATCHED)
        else:
            return
        # The numbers in a call (the training mode of batch normalisation, the shift of a roll) can
        # decide where samples lie or meet, so layouts are remembered together with them. Other
        # integers than flags are often sizes: they are left out of the structure.
        recording = self._recording
        recording.is_batchable &= _name(function) not in WRONG_WHEN_BATCHED
        numbers = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, int))
        flags = tuple(x for x in numbers if isinstance(x, bool))
        recording.structure = hash((recording.structure, function, flags))
        recording.signature = hash((recording.signature, function, numbers))

    def _mark_derived(
        self,
        function: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        origins: list[Tracked],
    ) -> None:
        """Marks the output of a call that reads tracked tensors and constants."""
        changed = args[0] if output is None and args else output
        for tensor in tensors_in_call((changed,), {}):
            if not tensor.requires_grad or tensor.is_leaf:
                continue
            base = tensor._base
            known = self._status(base) if base is not None else None
            status = track_derived(
                tensor,
                origins,
                known if isinstance(known, Tracked) else None,
                getattr(function, "__name__", "") in _CASTS,
            )
            self._mark(tensor, status)


def _recipes(
    rule: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[tuple[Tensor, Tracked]],
) -> list[Recipe] | None:
    """The recipes of the tracked operands, or ``None`` if the rule misses one of them."""
    try:
        recipes = rule(*args, **kwargs)
    except TypeError:
        if _binds(rule, args, kwargs):
            raise
        return None  # an overload of the function that the rule was not written for
    if recipes is None:
        return None
    ids = [id(tensor) for tensor, _ in operands]
    chosen = [recipe for recipe in recipes if id(recipe.operand) in ids]
    covered = [id(recipe.operand) for recipe in chosen]
    # A tensor that is passed twice must have two recipes, or a part of its block would be missing.
    return chosen if sorted(covered) == sorted(ids) else None


def _binds(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a rule accepts these arguments."""
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_in_place(function: Callable[..., Any]) -> bool:
    """Whether a torch function changes its first argument."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _reaches(tensor: Tensor, edges: list[Any]) -> bool:
    """Whether a tensor depends on one of the aliases that its call was made on."""
    wanted = {edge.node for edge in edges}
    seen, pending = set(), [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node in wanted:
            return True
        if node is not None and node not in seen and getattr(node, "use", None) is None:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
    return False


def _name(function: Callable[..., Any]) -> str:
    """The name of a torch function, for messages."""
    return getattr(function, "__name__", str(function))
