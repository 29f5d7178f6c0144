"""Calls of a compiled part: an engine's view of one, which lives as long as its graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._blocks import Folded
from autogram._capture.autograd.graph import calls_of, entry, entry_of, nodes_behind
from autogram._capture.forward.recorder import Recorder
from autogram._capture.forward.session import recorders_of
from autogram._capture.recording import Recording
from autogram._capture.tap import tap
from autogram._capture.tracked import (
    Tracked,
    as_of_now,
    base_of,
    real_shape,
    track_parameter,
)
from autogram._capture.uses import FallbackUse, KeptRecipe, RuleUse, Use
from autogram._compiled.placement import find_carried
from autogram._compiled.tracing.part import Part, Source
from autogram._compiled.tracing.sizes import OpenSizes
from autogram.errors import ChangedTensorError, listed


class PartCall:
    """One engine's view of a call of a part.

    Attributes:
        roots: The engine's parameters among the arguments, and tensors derived from them.
        rows_of: The positions of the inputs that get explicit rows through the call.
        sizes: The values of the part's symbolic sizes.
    """

    def __init__(
        self, part: Part, recording: Recording, args: Sequence[Any], derived: dict[int, Tracked]
    ) -> None:
        self.part, self.recording = part, recording
        # Some versions of PyTorch still call a part when its parameters have been frozen.
        known = [i for i in part.parameters if args[i].requires_grad]
        own = {i: args[i] for i in known if args[i] in recording.names}
        self.roots = {**{i: track_parameter(x) for i, x in own.items()}, **derived}
        self.rows_of = tuple(i for i in self.roots if i in part.rows or i not in part.roots)
        self.sizes: OpenSizes = part.sizes.of(args)
        # All others are saved with the node, which notices changes in place.
        self._given = {i: args[i] for i in part.derived_from if not _is_saved(args[i])}
        self._first = recording.count
        self._uses: tuple[RuleUse | None, ...] | None = None
        recording.count += len(part.uses)
        # PyTorch refuses compiled backward passes in `torch.vmap`, which hides a dimension from
        # kernels: https://github.com/pytorch/pytorch/issues/138422.
        recording.is_batchable = False

    def uses_at(self, node: Any) -> list[RuleUse]:
        """The uses of the engine's parameters, in a call with this node."""
        return [use for use in self.all_uses(node) if use is not None]

    def all_uses(self, node: Any) -> tuple[RuleUse | None, ...]:
        """Each use of the part, or ``None`` if it reads none of the engine's parameters.

        They are created when the engine first asks for them.
        """
        if self._uses is None:
            tracked = {source: self._tracked(source, node) for source in self.part.sources}
            self._uses = tuple(self._use(i, tracked) for i in range(len(self.part.uses)))
        return self._uses

    def carried(
        self, node: Any, results: Sequence[Folded | None]
    ) -> tuple[dict[Use, Folded], dict[int, Folded | None]] | None:
        """Where the backward pass takes the samples of the results, whatever the values are.

        Args:
            node: The node of the call.
            results: Where the samples are in the results, or ``None`` without a cotangent.

        Returns:
            The places in the cotangents of uses that have one; and the places in the gradients of
            the node's inputs by position, ``None`` for zeros, without those that depend on values.
            ``None`` if the places in a use depend on values.
        """
        part, metadata = self.part, node._input_metadata
        if part.backward is None or len(node.next_functions) != len(part.tensors) + 1:
            return None
        given = [x for x, of in zip(results, metadata, strict=True) if of.dtype.is_floating_point]
        found = find_carried(part.backward, given, lambda x: part.sizes.resolve(x, self.sizes))
        if found is None:
            return None
        places, inputs = found
        uses = self.all_uses(node)
        own: dict[Use, Folded] = {use: x for i, x in places.items() if (use := uses[i])}
        return own, {at: inputs[i] for at, i in enumerate(part.tensors) if i in inputs}

    def use_of_rows(self, edges: Mapping[int, GradientEdge], output: Tensor) -> FallbackUse:
        """The use of all calls in the part without a rule, for a tensor that it has computed."""
        rows = self.rows_of
        functions = list(dict.fromkeys(chain(*[self.part.rows.get(i, ()) for i in rows])))
        name = "a compiled part" + (f" ({listed(functions)})" if functions else "")
        roots, inputs = tuple(self.roots[i] for i in rows), tuple(edges[i] for i in rows)
        return FallbackUse.of(self.recording, name, output, roots, inputs)

    def _use(self, number: int, tracked: Mapping[Source, Tracked | None]) -> RuleUse | None:
        """A use of this call."""
        use, resolve = self.part.uses[number], self.part.sizes.resolve
        reads = tuple(t for x in use.reads if (t := tracked[x]) is not None)
        if not reads:
            return None
        recipes = []
        for operands, formula, saved in use.recipes:
            own = tuple(None if x is None else tracked[x] for x in operands)
            if any(own):
                recipes.append(KeptRecipe(own, resolve(formula, self.sizes), saved))
        shape = resolve(use.shape, self.sizes)
        known = self._first + number, use.function, shape, reads, recipes, use.rule
        return RuleUse(self.recording, *known)

    def _tracked(self, source: Source, node: Any) -> Tracked | None:
        """A tracked tensor of the part, if it is of the engine's parameters and gets no rows."""
        roots = [self.roots[i] for i in source.inputs if i in self.roots]
        if not roots or self.part.has_rows(source):
            return None
        if source.region is not None:
            (root,) = roots
            assert root.region is not None
            region = self.part.sizes.resolve(source.region, self.sizes)
            region = region.shifted(root.region.offset)
            shape, device = region.shape, root.device
            return Tracked(root.sources, region, shape, source.dtype, device, root.version)
        if source.derivation is None:
            return roots[0]
        found = entry_of(node)
        assert found is not None
        saved = [i for i in self.part.derived_from if i not in self._given]
        try:
            given = {**self._given, **dict(zip(saved, found.saved_tensors, strict=True))}
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise ChangedTensorError(
                "A tensor from which a compiled part computes a parameter's value, such as a "
                "weight times a buffer, was changed in place after the part had read it, so "
                "the rows of the parameter cannot be computed. Make a new tensor: `x = x * 2`, not "
                "`x.mul_(2)`. Or change the tensor after the engine's pass."
            ) from error
        (derived,) = source.derivation.run([given[i] for i in source.derivation.inputs])
        sources = tuple({id(p): p for root in roots for p in root.sources}.values())
        shape, edge = real_shape(derived), get_gradient_edge(derived)
        version, device = derived._version, derived.device
        return Tracked(sources, None, shape, source.dtype, device, version, edge)


class CompiledPart:
    """The function that Dynamo calls: a compiled part, with a record for each engine concerned.

    ``function`` takes the arguments of the part, and a tensor that leads from it to engines.
    ``compile_again`` makes a function for the part in which no use is a guess.
    """

    def __init__(
        self, part: Part, function: Any, compile_again: Callable[[], Callable[..., Any]]
    ) -> None:
        self._part, self._function = part, function
        self._without_guesses = cache(compile_again)

    def __call__(self, *given: Any) -> Any:
        """Calls the part."""
        part, args = self._part, list(given)
        recorders = recorders_of([args[i] for i in part.parameters])
        guessed = [args[i] for i in part.guesses]
        if have_failed(recorders, guessed):
            return self._without_guesses()(*given)
        like = nowhere(args[part.roots[0]].device)
        with torch._C.DisableTorchFunction():
            if not recorders:
                return self._function(*args, like)
            derived = [_derived_inputs(recorder, part, args) for recorder in recorders]
            for recorder in recorders:
                recorder.recording.guesses |= _names(recorder, guessed)
            calls = [
                PartCall(part, recorder.recording, args, roots)
                for recorder, roots in zip(recorders, derived, strict=True)
            ]
            anchors = [recorder.recording.channel.anchor for recorder in recorders]
            saved = [args[i] for i in part.derived_from if _is_saved(args[i])]
            entered = entry(calls, like, anchors, saved)
            read = set(chain(*[call.rows_of for call in calls]))
            apart = _apart(args, read)
            edges = {i: get_gradient_edge(apart[i]) for i in read}
            before = [(x, x._version) for x in apart if isinstance(x, Tensor) and not x.is_leaf]
            outputs = list(self._function(*apart, entered))
            for positions, way in part.outputs.items():
                found = way.run([args[i] for i in way.inputs])
                for position, x in zip(positions, found, strict=True):
                    outputs[position] = x
            if read:
                changed = [x for x, version in before if x._version != version]
                outputs = _with_rows(calls, edges, outputs, changed)
        unbatched = set(chain(*part.outputs))
        batched = [x for i, x in enumerate(outputs) if i not in unbatched]
        for recorder in recorders:
            recorder.mark([x for x in batched if isinstance(x, Tensor)])
            for i in unbatched:
                if isinstance(outputs[i], Tensor):
                    recorder.recording.note_at(outputs[i])
        return outputs


def _is_saved(given: Any) -> bool:
    """Whether the node keeps an argument."""
    return isinstance(given, Tensor) and not given.is_inference()


@lru_cache(maxsize=64)
def nowhere(device: torch.device) -> Tensor:
    """The tensor that parts on a device get if no engine sees the call."""
    return torch.zeros((), device=device, requires_grad=True)


def have_failed(recorders: Sequence[Recorder], tensors: Sequence[Tensor]) -> bool:
    """Whether an engine has withdrawn a guess about the origin of some tensors."""
    with torch._C.DisableTorchFunction():
        return any(x.recording.channel.unspread & _names(x, tensors) for x in recorders)


def _derived_inputs(recorder: Recorder, part: Part, args: list[Any]) -> dict[int, Tracked]:
    """The inputs of a call that are computed from parameters alone, by position.

    It replaces arguments by the tensors that the call reads instead.
    """
    found: dict[int, Tracked] = {}
    for position, x in enumerate(args):
        if isinstance(x, Tensor) and x.grad_fn is not None and position not in part.parameters:
            args[position], status = recorder.statuses.tapped(x)
            if isinstance(status, Tracked):
                found[position] = as_of_now(x, status)
    return found


def _names(recorder: Recorder, tensors: Sequence[Tensor]) -> set[str]:
    """The names of the engine's parameters that some tensors are computed from."""
    statuses = [recorder.statuses.tapped(x)[1] for x in tensors]
    sources = [p for status in statuses if isinstance(status, Tracked) for p in status.sources]
    return {recorder.recording.names[p] for p in sources}


def _apart(args: Sequence[Any], read: Collection[int]) -> list[Any]:
    """Copies arguments, with views of those that are read at some positions.

    A view leads only into the call. Otherwise a parameter's gradient would also contain its
    contribution to a derived argument.
    """
    found = list(args)
    if len(read) > 1 and any(args[i].grad_fn is not None for i in read):
        for i in read:
            found[i] = args[i].view_as(args[i])
    return found


def _with_rows(
    calls: Sequence[PartCall],
    edges: dict[int, GradientEdge],
    outputs: Sequence[Any],
    changed: Sequence[Tensor],
) -> list[Any]:
    """The results of a call, with taps for explicit rows of calls that have no rule in the part.

    Taps are on the tensors that the call has computed or changed. A view of such a tensor is
    made again, from the tapped tensor.
    """
    # Within the call, the base of a view has no graph.
    pairs = [(base_of(x), x) for x in outputs if isinstance(x, Tensor)]
    own = {id(x): x for x in [x if base.grad_fn is None else base for base, x in pairs]}
    behind = {at: x for at, x in own.items() if calls_of(x.grad_fn) is calls}
    changed = [x for x in changed if any(calls_of(node) is calls for node in nodes_behind(x))]
    for call in calls:
        if call.rows_of:
            behind = {at: tap(call.use_of_rows(edges, x), x, ()) for at, x in behind.items()}
            for x in changed:
                tap(call.use_of_rows(edges, x), x, (), in_place=True)
    behind.update({id(base_of(x)): base_of(x) for x in changed})

    def again(x: Any) -> Any:
        if id(x) in behind:
            return behind[id(x)]
        base = behind.get(id(base_of(x))) if isinstance(x, Tensor) else None
        return x if base is None else x._view_func(base)

    return [again(x) for x in outputs]
