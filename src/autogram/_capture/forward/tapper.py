"""The tapper: carries out the calls that read parameters, and puts taps on their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._capture.autograd.cotangents import Inputs
from autogram._capture.autograd.graph import is_any_tap, nodes_behind
from autogram._capture.forward.answers import Answer, Operands
from autogram._capture.forward.calls import Call
from autogram._capture.forward.containers import exchange, map_tensors, tensors_in_call
from autogram._capture.recording import Recording
from autogram._capture.tap import tap
from autogram._capture.tracked import Tracked
from autogram._capture.uses import FallbackUse, KeptRecipe, RuleUse, Use
from autogram._errors import RuleError
from autogram.rules import Recipe, Rule, product

U = TypeVar("U", bound=Use)


class Tapper:
    """Makes the uses of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def run_with_rule(self, call: Call, operands: Operands, answer: Answer, rule: Rule) -> Any:
        """Carries out a call whose blocks a rule knows, and taps each tensor that it returns."""
        in_place = call.kind.is_in_place
        changed = call.args[0] if in_place else None  # what it changes is saved as it was
        saved = {
            place: [
                x.detach().clone() if x is changed else x.detach()
                for recipe in recipes
                for x in recipe.saved
            ]
            for place, recipes in answer.items()
        }
        versions = [x._version for some in saved.values() for x in some]
        output = call.run()
        if versions != [x._version for some in saved.values() for x in some]:
            raise _changed_by(call)
        tapped: dict[int, Tensor] = {}
        by_id = {id(tensor): tracked for tensor, tracked in operands}
        for place, tensor in enumerate(call.results(output)):
            if tensor.requires_grad:
                if not answer.get(place):
                    raise _without_recipe(call, place)
                found = _kept(answer[place], by_id)
                use = self._rule_use(call.kind.name, tensor, found, rule)
                tapped[id(tensor)] = tap(use, tensor, saved[place], in_place=in_place)
        return output if in_place else exchange(output, tapped)

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
        use.is_seen = False
        tap(use, tensor, (), in_place=True)  # the user's code goes on with this very tensor

    def tap_result(self, tensor: Tensor, tracked: Tracked) -> Tensor:
        """A module's output that is computed from parameters alone, with a tap."""
        letters = "TSRUVWXYZ"[: tensor.dim()]
        recipe = product(tensor, f"{letters}->{letters}")
        found = _kept([recipe], {id(tensor): tracked})
        use = self._rule_use("the output of the module", tensor, found, None)
        return tap(use, tensor, (), in_place=False)

    def _rule_use(
        self, name: str, output: Tensor, recipes: Sequence[KeptRecipe], rule: Rule | None
    ) -> RuleUse:
        """The record of a call with a rule, for one tensor of its results."""
        recording, shape = self._recording, tuple(output.shape)
        reads = tuple([x for recipe in recipes for x in recipe.operands if x is not None])
        use = RuleUse(recording, recording.count, name, shape, reads, tuple(recipes), rule)
        return self._enter(use, output)

    def _fallback_use(
        self, name: str, output: Tensor, reads: tuple[Tracked, ...], inputs: Inputs
    ) -> FallbackUse:
        """The record of a call without a rule."""
        recording, shape = self._recording, tuple(output.shape)
        edge = get_gradient_edge(output)
        use = FallbackUse(
            recording, recording.count, name, shape, output.dtype, reads, edge, inputs
        )
        return self._enter(use, output)

    def _enter(self, use: U, output: Tensor) -> U:
        """Counts a use, and notes its precision where autocast may hide it."""
        self._recording.count += 1
        if torch._C._is_any_autocast_enabled():
            device = output.device.type
            if device != "meta" and torch.is_autocast_enabled(device):
                self._recording.dtypes.add(torch.get_autocast_dtype(device))
        return use


def _reaches(tensor: Tensor, edges: list[GradientEdge]) -> bool:
    """Whether a tensor depends on one of the aliases that its call was made on."""
    aliases = {edge.node for edge in edges}
    return not aliases.isdisjoint(nodes_behind(tensor, is_any_tap))


def _kept(recipes: Iterable[Recipe], by_id: Mapping[int, Tracked]) -> list[KeptRecipe]:
    """What a use keeps of the recipes for one result.

    Args:
        recipes: They are in the order of what they save.
        by_id: What is tracked, by the ``id`` of the tensor.
    """
    found: list[KeptRecipe] = []
    start = 0
    for recipe in recipes:
        own = slice(start, start + len(recipe.saved))
        start = own.stop
        operands = tuple([by_id.get(id(tensor)) for tensor in recipe.operands])
        found.append(KeptRecipe(operands, recipe.formula, own))
    return found


def _without_recipe(call: Call, place: int) -> RuleError:
    """The error for a rule that leaves out a result."""
    return RuleError(
        f"The rule of `{call.kind.name}` has no recipe for tensor {place} of its results, which "
        "requires a gradient. Return recipes with each `output`."
    )


def _changed_by(call: Call) -> RuleError:
    """The error for a call that spoils what its rule has saved."""
    return RuleError(
        f"`{call.kind.name}` changed a tensor in place that its rule saves for the backward "
        "pass. Let the rule save a clone of it."
    )
