"""The tapper: carries out the calls that read parameters, and puts taps on their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._capture.call import Call
from autogram._capture.containers import exchange, map_tensors, tensors_in_call
from autogram._capture.graph import nodes_behind
from autogram._capture.recording import Recording
from autogram._capture.tap import tap
from autogram._capture.tracked import Tracked
from autogram._capture.use import FallbackUse, Operand, RuleUse, Use
from autogram._capture.vjp import Inputs
from autogram._errors import RuleError
from autogram.rules import Recipe, product

Operands = list[tuple[Tensor, Tracked]]
U = TypeVar("U", bound=Use)


class Tapper:
    """Makes the uses of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def run_with_rule(self, call: Call, operands: Operands, recipes: Sequence[Recipe]) -> Any:
        """Carries out a call whose blocks a rule knows."""
        in_place = call.kind.is_in_place
        saved = [
            # What an in-place call changes is saved as it was.
            x.detach().clone() if in_place and x is call.args[0] else x.detach()
            for recipe in recipes
            for x in recipe.saved
        ]
        versions = [x._version for x in saved]
        output = call.run()
        _check_result(call, output, unchanged=versions == [x._version for x in saved])
        use = self._rule_use(call.kind.name, call.changed(output), recipes, operands)
        return tap(use, call.changed(output), saved, in_place=in_place)

    def run_without_rule(self, call: Call, operands: Operands) -> Any:
        """Carries out a call that is left to the fallback.

        It is made on aliases of what is tracked, one for each time that it is read, so that their
        edges lead into this call alone.
        """
        by_id = {id(tensor): tracked for tensor, tracked in operands}
        edges: list[GradientEdge] = []
        reads: list[Tracked] = []

        def alias(tensor: Tensor) -> Tensor:
            tracked = by_id.get(id(tensor))
            if tracked is None:
                return tensor
            # What is changed in place must be the tensor itself; its edge is that of before.
            is_changed = call.kind.is_in_place and tensor is call.args[0]
            own = tensor if is_changed else tensor.view_as(tensor)
            reads.append(tracked)
            edges.append(get_gradient_edge(own))
            return own

        args, kwargs = map_tensors((call.args, call.kwargs), alias)
        output = call.function(*args, **kwargs)
        changed = args[0] if call.kind.is_in_place else output
        tapped: dict[int, Tensor] = {}
        for tensor in tensors_in_call((changed,), {}):
            if tensor.requires_grad and _reaches(tensor, edges):
                use = self._fallback_use(call.kind.name, tensor, tuple(reads), tuple(edges))
                tapped[id(tensor)] = tap(use, tensor, (), in_place=call.kind.is_in_place)
        return output if call.kind.is_in_place else exchange(output, tapped)

    def tap_unseen(self, tensor: Tensor, sources: Inputs, reads: tuple[Tracked, ...]) -> None:
        """Taps the result of a call that was not recorded, in which parameters met samples."""
        name = f"the call behind `{type(tensor.grad_fn).__name__}`"
        use = self._fallback_use(name, tensor, reads, sources)
        tap(use, tensor, (), in_place=True)  # the user's code goes on with this very tensor

    def tap_result(self, tensor: Tensor, tracked: Tracked) -> Tensor:
        """A module's output that is computed from parameters alone, with a tap."""
        letters = "TSRUVWXYZ"[: tensor.dim()]
        recipe = product(tensor, f"{letters}->{letters}")
        use = self._rule_use("the output of the module", tensor, [recipe], [(tensor, tracked)])
        return tap(use, tensor, (), in_place=False)

    def _rule_use(
        self, name: str, output: Tensor, recipes: Sequence[Recipe], operands: Operands
    ) -> RuleUse:
        """The record of a call with a rule."""
        by_id = {id(tensor): tracked for tensor, tracked in operands}
        found, start = [], 0
        for recipe in recipes:
            stop = start + len(recipe.saved)
            found.append(Operand(by_id[id(recipe.operand)], recipe.form, slice(start, stop)))
            start = stop
        recording = self._recording
        use = RuleUse(recording, recording.count, name, tuple(output.shape), tuple(found))
        return self._enter(use)

    def _fallback_use(
        self, name: str, output: Tensor, reads: tuple[Tracked, ...], inputs: Inputs
    ) -> FallbackUse:
        """The record of a call without a rule."""
        recording, shape = self._recording, tuple(output.shape)
        edge = get_gradient_edge(output)
        use = FallbackUse(
            recording, recording.count, name, shape, output.dtype, reads, edge, inputs
        )
        return self._enter(use)

    def _enter(self, use: U) -> U:
        """Counts a use."""
        self._recording.add(use.shape, use.reads)
        return use


def _reaches(tensor: Tensor, edges: list[GradientEdge]) -> bool:
    """Whether a tensor depends on one of the aliases that its call was made on."""
    aliases = {edge.node for edge in edges}
    nodes = nodes_behind(tensor, lambda node: getattr(node, "use", None) is not None)
    return not aliases.isdisjoint(nodes)


def _check_result(call: Call, output: Any, *, unchanged: bool) -> None:
    """Refuses what a rule does not describe."""
    if not isinstance(output, Tensor) and not call.kind.is_in_place:
        raise RuleError(
            f"`{call.kind.name}` has a rule and returned a {type(output).__name__}, but a rule is "
            "for calls that return one tensor. Let it return `None` for this call, which is then "
            "left to the fallback, or split the function into one for each output."
        )
    if not unchanged:
        raise RuleError(
            f"`{call.kind.name}` changed a tensor in place that its rule saves for the backward "
            "pass. Let the rule save a clone of it."
        )
