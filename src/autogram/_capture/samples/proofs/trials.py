"""Trials: nodes that are carried out once more in each pass, to see whether they move samples.

Nobody knows what an autograd Function in Python does, nor what a change in place does. Where a
search has shown regular places of the samples in front of such a node and behind it, a pass
over the whole model need not show that again: in each call, the node is given its own cotangent
with every sample multiplied by a power of two of its own. If all samples stay where they were, each
element of what the node returns is multiplied by the same power of two, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from autogram._blocks import Folded
from autogram._capture.autograd.graph import arriving, kind_of_node
from autogram._capture.autograd.passes import Pass, hooked
from autogram._capture.limit import is_out_of_memory
from autogram._capture.samples.proofs.carrying import is_packed
from autogram._capture.samples.survey import Survey

# Powers of two, by which samples are told apart. They are shuffled, because sums such as
# y[b] + 2 y[b - 2] have powers of two of their own.
EXPONENTS = torch.tensor(random.Random(0).sample(range(32), 32), device="cpu")


class Trial(NamedTuple):
    """A node that must take samples from the places in its result to those in its inputs."""

    node: int  # its number in the survey; it has one result
    place: Folded  # in its result; in another call, the number of samples may be another
    inputs: tuple[tuple[int, Folded], ...]  # the numbers of some inputs, with the places in these

    @property
    def is_for_sizes(self) -> bool:
        """Whether samples may lie otherwise at other sizes."""
        places = self.place, *[place for _, place in self.inputs]
        return not all(place.before == place.after == 1 for place in places)

    def is_about(self, survey: Survey, samples: int) -> bool:
        """Whether the places are there in a call: on routes, sizes may be other ones."""
        node = survey.nodes[self.node]
        shapes = [(self.place, node._input_metadata[0].shape)]
        for position, place in self.inputs:
            following, result = node.next_functions[position]
            shapes.append((place, following._input_metadata[result].shape))
        sizes = [(place.before * samples * place.after, place.dim, of) for place, of in shapes]
        return all([*of[dim : dim + 1]] == [size] for size, dim, of in sizes)


def can_try(node: Any) -> bool:
    """Whether a node can be carried out once more."""
    fields = "_raw_saved_tensors", *[f"_raw{x}" for x in kind_of_node(node.__class__).tensors]
    is_free = not any(is_packed(getattr(node, field, ())) for field in fields)
    return len(node._input_metadata) == 1 and is_free


def keeps_places(survey: Survey, trial: Trial, samples: int) -> bool:
    """Whether a node of PyTorch's keeps samples in their places, whatever its cotangent is.

    Every place of its result has a cotangent, for some of the samples in turn: any two samples
    differ in a binary digit of their numbers.
    """
    node = survey.nodes[trial.node]
    is_clear = can_try(node) and trial.is_about(survey, samples)
    if isinstance(node, BackwardCFunction) or not is_clear:
        return False
    (result,) = node._input_metadata
    dense = torch.arange(1, prod(result.shape) + 1, dtype=torch.double, device=result.device)
    dense = (dense.sin() + 2).to(result.dtype).view(result.shape)
    numbers = torch.arange(samples, device="cpu")
    for digit in range((samples - 1).bit_length()):
        for bit in (0, 1):
            chosen = numbers >> digit & 1 == bit
            found = _carry_out(node, dense * _factors(chosen, trial.place, dense), ())
            if found is None:
                return False
            for position, place in trial.inputs:
                x = found[position]
                if x is not None and bool((x * _factors(~chosen, place, x) != 0).any()):
                    return False
    return True


def tried(
    survey: Survey, trials: Iterable[Trial], samples: int, tell: Callable[[Tensor, Tensor], None]
) -> AbstractContextManager[None]:
    """Tries some nodes in the passes of an engine inside of a block.

    Tells of each node whether it moves samples, and whether it has shown that it does not.
    """

    def show(
        trial: Trial, current: Pass, given: tuple[Tensor | None, ...], cotangents: Any
    ) -> None:
        if cotangents[0] is not None:
            others = [x for x in given if x is not None]
            current.tell(partial(_try, survey, trial, samples, given, tell), cotangents[0], others)

    return hooked((survey.nodes[trial.node], partial(show, trial)) for trial in trials)


def _try(
    survey: Survey,
    trial: Trial,
    samples: int,
    given: tuple[Tensor | None, ...],
    tell: Callable[[Tensor, Tensor], None],
    cotangent: Tensor,
) -> None:
    """Carries out one node once more, or more often for more samples than exponents."""
    node = survey.nodes[trial.node]
    yes, no = torch.tensor([True, False], device="cpu")
    if not can_try(node) or not trial.is_about(survey, samples):
        tell(no, no)
        return
    if cotangent.layout != torch.strided:
        tell(yes, no)
        return
    numbers, unit = torch.arange(samples, device="cpu"), 1
    is_wide = torch.finfo(cotangent.dtype).max > 2.0**64
    exponents = EXPONENTS if is_wide else EXPONENTS[EXPONENTS < 8]  # float16 ends at 2**16
    while unit < samples:
        powers = exponents[numbers // unit % len(exponents)].double().exp2()
        found = _carry_out(node, cotangent * _factors(powers, trial.place, cotangent), given)
        if found is None:
            tell(yes, no)
            return
        for position, place in trial.inputs:
            plain, other = given[position], found[position]
            if plain is None and other is None:
                continue
            both = [x for x in (plain, other) if x is not None and x.layout == torch.strided]
            if plain is None or other is None or len(both) < 2 or plain.shape != other.shape:
                tell(yes, no)
                continue
            expected = plain * _factors(powers, place, plain)
            stays = ((other == expected) & expected.isfinite()).all()  # all infinities are equal
            tell(~stays & plain.sum().isfinite(), stays)
        unit *= len(exponents)


def _factors(of_samples: Tensor, place: Folded, like: Tensor) -> Tensor:
    """A factor for each place of a tensor, from those of the samples."""
    layout = replace(place, batch=len(of_samples))
    return of_samples.to(like.device, like.real.dtype)[layout.owners(like)]


def _carry_out(
    node: Any, cotangent: Tensor, given: Sequence[Tensor | None]
) -> Sequence[Tensor | None] | None:
    """What a node gives each of its inputs for a cotangent; nothing where that is not clear.

    The node alone, as a pass to its inputs would also take ways from one input to another.

    Returns:
        ``None`` if the node fails: under checkpointing, what was saved is read once, and the node
        may not take a cotangent that no pass has.
    """
    is_function = isinstance(node, BackwardCFunction)
    try:
        found = node.apply(cotangent) if is_function else node(cotangent)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    found = found if isinstance(found, tuple) else (found,)
    if is_function:
        # For each argument, tensor or not, where a pass has a gradient for each tensor.
        left = iter([x for x in found if x is not None])
        found = tuple([None if x is None else next(left, None) for x in given])
        if next(left, None) is not None:
            return [None] * len(given)
    pairs = zip(found, node.next_functions, strict=True)
    return [None if x is None or edge[0] is None else arriving(x, *edge) for x, edge in pairs]
