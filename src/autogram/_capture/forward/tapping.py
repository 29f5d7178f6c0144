"""Tapping: carries out uses, and puts taps on their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._capture.autograd.exact import autocast_dtype
from autogram._capture.autograd.graph import is_tap_of, nodes_behind
from autogram._capture.forward.calls import Kind, first_of, results_of, run_and_note
from autogram._capture.forward.checkpoints import hooks_now
from autogram._capture.forward.decision import Reads, UseExpanded, UseRule
from autogram._capture.recording import Recording
from autogram._capture.tap import tap
from autogram._capture.tracked import Tracked, base_of, track_parameter
from autogram._capture.uses import FallbackUse, KeptRecipe, RuleUse
from autogram._containers import map_tensors, replaced
from autogram.errors import RuleError

_range = lru_cache(maxsize=64)(slice)  # few are different, and each use keeps some


class Tapping:
    """Carries out the uses of one recording, and taps their results."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    tap = staticmethod(tap)
    """Puts one tensor of the results of a use behind a tap, which saves what the use needs."""

    def run_with_rule(
        self, kind: Kind, args: Any, kwargs: dict[str, Any], decision: UseRule
    ) -> Any:
        """Carries out a call whose blocks a rule knows, and taps each tensor that it returns."""
        changed = first_of(args, kwargs) if kind.is_in_place else None  # saved as it was
        to_save = [x for of in decision.answers.values() for _, recipe in of for x in recipe.saved]
        rounded: dict[int, Tensor] = {}
        if kind.is_in_half and torch._C._is_any_autocast_enabled():
            rounded = _rounded((*args, *kwargs.values()), to_save)
        # The memory of parameters that were gathered is empty behind a pass, where blocks are read.
        gathered = self.recording.names if self.recording.channel.before_pass is not None else None
        # Autograd saves no tensor of inference mode, but a call may save a copy that it has made.
        # Autograd saves no classes of tensors either, and so gradients have none.
        saved: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for given in to_save:
                x = rounded.get(id(given), given)
                is_lent = x is changed or (gathered and base_of(x) in gathered)
                is_copied = is_lent or x.is_inference()
                saved[id(given)] = x.detach().clone() if is_copied else x.detach()
        if rounded:
            args = [rounded.get(id(x), x) for x in args]
            kwargs = {name: rounded.get(id(x), x) for name, x in kwargs.items()}
        versions = [x._version for x in saved.values()]
        output = kind.function(*args, **kwargs)
        if versions != [x._version for x in saved.values()]:
            raise RuleError(
                f"`{kind.name}` changed a tensor in place that its rule saves for the backward "
                "pass. Let the rule save a clone of it."
            )
        tapped: dict[int, Tensor] = {}
        for index, tensor in enumerate(results_of(kind, args, kwargs, output)):
            if not tensor.requires_grad:
                continue
            if index not in decision.answers:
                raise RuleError(
                    f"The rule of `{kind.name}` has no recipe for tensor {index} of its results, "
                    "which requires a gradient. Return recipes for each `output`."
                )
            read: list[Tracked] = []
            recipes: list[KeptRecipe] = []
            kept: list[Tensor] = []
            for operands, recipe in decision.answers[index]:
                start, of_result = len(kept), None
                if recipe.from_result is not None and hooks_now(True) is None:
                    of_result = recipe.from_result(tensor)
                if of_result is None:
                    kept += [saved[id(x)] for x in recipe.saved]
                else:
                    kept += [x.detach() for x in of_result]
                recipes.append(KeptRecipe(operands, recipe.formula, _range(start, len(kept))))
                read += [status for status in operands if status is not None]
            number, shape, reads = self.recording.count, tuple(tensor.shape), tuple(read)
            use = RuleUse(self.recording, number, kind.name, shape, reads, recipes, decision.rule)
            if decision.is_guess:
                self.note_guess(reads)
            tapped[id(tensor)] = self.tap(use, tensor, kept, in_place=kind.is_in_place)
        if isinstance(output, Tensor):  # a call less
            return tapped.get(id(output), output)
        return replaced(output, tapped)

    def note_guess(self, reads: Sequence[Tracked]) -> None:
        """Notes the parameters of a use of which a size alone has told that samples are in it."""
        names = self.recording.names
        self.recording.guesses.update([names[p] for tracked in reads for p in tracked.sources])

    def run_expanded(
        self, kind: Kind, args: Any, kwargs: dict[str, Any], decision: UseExpanded
    ) -> Any:
        """Carries out a call whose tracked tensors are expanded before, behind taps."""
        expand = kind._replace(function=_expand, is_in_place=False, is_in_half=False)
        expanded = {
            id(of.tensor): self.run_with_rule(expand, (of.tensor, of.dtype, of.shape), {}, of.use)
            for of in decision.expansions
        }
        args, kwargs = replaced((args, kwargs), expanded)
        return run_and_note(kind, args, kwargs)

    def run_without_rule(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], reads: Reads
    ) -> Any:
        """Carries out a call that is left to the fallback.

        The call is made on aliases of tracked tensors, one alias for each time that the call reads
        the tensor, so that the edges of the aliases lead into this call alone. A tensor that is
        changed in place has no alias. What else the call reads may be derived from it, so that the
        rows are those of the parameters behind all.
        """
        tracked = {id(tensor): status for tensor, status in reads}
        changed = first_of(args, kwargs) if kind.is_in_place else None
        if changed is not None and id(changed) in tracked and len(reads) > 1:
            sources = {p: track_parameter(p) for _, status in reads for p in status.sources}
            kind.function(*args, **kwargs)
            known = kind.name, changed, tuple(sources.values()), tuple(sources)
            return self.tap(FallbackUse.of(self.recording, *known), changed, (), in_place=True)
        edges: list[GradientEdge] = []  # of the aliases
        read: list[Tracked] = []

        def alias(tensor: Tensor) -> Tensor:
            status = tracked.get(id(tensor))
            if status is None:
                return tensor
            # A tensor that is changed in place must be the tensor itself. Its edge before the call
            # is kept. A sparse tensor has no views.
            own = tensor
            if tensor is not changed:
                own = tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()
            read.append(status)
            edges.append(get_gradient_edge(own))
            return own

        aliased, options = map_tensors((args, kwargs), alias)
        output = kind.function(*aliased, **options)
        tapped: dict[int, Tensor] = {}
        nodes = {edge.node for edge in edges}
        is_end = partial(is_tap_of, self.recording.channel)
        for tensor in results_of(kind, aliased, options, output):
            if tensor.requires_grad and not nodes.isdisjoint(nodes_behind(tensor, is_end)):
                use = FallbackUse.of(self.recording, kind.name, tensor, tuple(read), tuple(edges))
                tapped[id(tensor)] = self.tap(use, tensor, (), in_place=kind.is_in_place)
        return replaced(output, tapped)

    def tap_unseen(
        self, tensor: Tensor, sources: Mapping[Tensor, Tracked], *, in_place: bool = True
    ) -> Tensor:
        """Taps the result of a call that was not recorded, in which parameters met samples.

        In place, because the user's code goes on with this very tensor, or for one call alone.
        """
        name, reads = f"the call behind `{type(tensor.grad_fn).__name__}`", tuple(sources.values())
        use = FallbackUse.of(self.recording, name, tensor, reads, tuple(sources), is_seen=False)
        return self.tap(use, tensor, (), in_place=in_place)


def _expand(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor in some dtype, expanded to some shape."""
    return tensor.to(dtype).expand(shape)


def _rounded(arguments: Sequence[Any], to_save: Sequence[Tensor]) -> dict[int, Tensor]:
    """What autocast makes of the arguments that a rule saves, by their ``id``.

    The call is made with these. So what it saves and what its tap saves are the same tensors.
    Autocast rounds a leaf once for all calls, and an argument that is given twice once for each.
    The gradients would be added up in another dtype, so that these are left to autocast.
    """
    found: dict[int, Tensor] = {}
    given = [id(x) for x in arguments]
    for tensor in to_save:
        dtype = autocast_dtype(tensor.device.type)
        is_wide = tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)
        is_left = given.count(id(tensor)) != 1 or (tensor.is_leaf and tensor.requires_grad)
        if dtype is not None and is_wide and not is_left:
            found[id(tensor)] = tensor.to(dtype)
    return found
