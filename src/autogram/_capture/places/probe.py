"""Probes: one node alone is carried out with dense cotangents of some of the samples.

For each binary digit of the samples' numbers, the node is carried out for the samples with a 1
there, and for the others. What that shows holds for the values that the node has saved in this
call, and no longer: in another call, it is probed again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from autogram._capture.autograd.graph import in_dense, kind_of_node
from autogram._capture.limit import is_out_of_memory
from autogram._capture.places.places import EMPTY, SEVERAL, Places, Shape

# By which samples are told apart. They are shuffled, because sums such as y[b] + 2 y[b - 2] have
# powers of two of their own.
EXPONENTS = torch.tensor(random.Random(0).sample(range(32), 32), device="cpu")


def probed(
    node: Any, results: Sequence[Places | None], inputs: Sequence[Shape | None]
) -> list[Places | None] | None:
    """The places of a node's inputs, or ``None`` if the node cannot be carried out.

    Args:
        node: The node.
        results: The places of its results, ``None`` for those without a cotangent.
        inputs: The shapes of its inputs, ``None`` for those without a gradient.
    """
    grids = [None if places is None else places.grid() for places in results]
    there = torch.cat([grid.flatten() for grid in grids if grid is not None])
    there = there[(there != EMPTY) & (there != SEVERAL)]
    digits = max(int(there.max()).bit_length() if there.numel() else 0, 1)
    dense = [_dense(metadata) for metadata in node._input_metadata]
    ones: list[list[Tensor]] = []  # for each digit, where an input has a gradient
    others: list[list[Tensor]] = []
    for digit in range(digits):
        for bit, marks in enumerate((others, ones)):
            cotangents = [
                None if grid is None else _chosen(grid, digit, bit, full)
                for grid, full in zip(grids, dense, strict=True)
            ]
            gradients = _gradients(node, cotangents, len(inputs))
            if gradients is None:
                return None
            pairs = zip(gradients, inputs, strict=True)
            marks.append([_has(x, shape) for x, shape in pairs if shape is not None])
    found = iter(map(_owners, zip(*ones, strict=True), zip(*others, strict=True)))
    return [None if shape is None else Places.of(shape, next(found)) for shape in inputs]


def still_holds(
    node: Any,
    results: Sequence[Places | None],
    found: Sequence[Places | None],
) -> bool:
    """Whether what a probe has found in another call holds in this one, by fewer calls of the node.

    The cotangent of each sample is multiplied by a power of two of its own. If all samples stay
    where they were, each number that the node gives is multiplied by the same power, bit for bit.
    """
    dense = [_dense(metadata) for metadata in node._input_metadata]
    pairs = list(zip(dense, results, strict=True))
    samples = torch.cat([of.samples.flatten() for of in results if of is not None])
    largest = int(samples.masked_fill(samples == SEVERAL, 0).max()) if samples.numel() else 0
    plain = _gradients(node, [x if of else None for x, of in pairs], len(found))
    if plain is None:
        return False
    widest = min(torch.finfo(x.dtype).max for x in dense)
    exponents = EXPONENTS if widest > 2.0**64 else EXPONENTS[EXPONENTS < 8]  # float16: to 2**16
    unit = 1
    while unit <= max(largest, 1):
        scaled = [None if of is None else x * _powers(of, unit, exponents, x) for x, of in pairs]
        others = _gradients(node, scaled, len(found))
        if others is None:
            return False
        for one, other, of in zip(plain, others, found, strict=True):
            if of is None or (one is None and other is None):
                continue
            if one is None or other is None or one.layout != torch.strided:
                return False
            if one.shape != of.shape:
                return False
            stays = (one * _powers(of, unit, exponents, one) == other) & other.isfinite()
            grid = of.grid().to(one.device)
            stays = torch.where(grid == EMPTY, other == 0, stays | (grid == SEVERAL))
            if not bool(stays.all()):
                return False
        unit *= len(exponents)
    return True


def _powers(places: Places, unit: int, exponents: Tensor, like: Tensor) -> Tensor:
    """A power of two for each place, by the digit of its sample's number that has a unit."""
    grid = places.grid()
    powers = exponents[grid.clamp(min=0) // unit % len(exponents)].double().exp2()
    is_of_one = (grid != EMPTY) & (grid != SEVERAL)
    return torch.where(is_of_one, powers, 1).to(like.device, like.real.dtype)


def _gradients(
    node: Any, cotangents: Sequence[Tensor | None], inputs: int
) -> list[Tensor | None] | None:
    """What a node gives each of its inputs, or ``None`` if that is not clear."""
    try:
        gradients = carried_out_alone(node, cotangents)
    except Exception as error:  # a Function in Python may refuse cotangents that no pass has
        if is_out_of_memory(error):
            raise
        return None
    return None if gradients is None or len(gradients) != inputs else gradients


def can_probe(node: Any) -> bool:
    """Whether a node may be carried out outside of a backward pass.

    What a checkpoint has packed would be computed again.
    """
    fields = "_raw_saved_tensors", *[f"_raw{field}" for field in kind_of_node(type(node)).tensors]
    return not any(map(has_unpack_hook, [getattr(node, field, None) for field in fields]))


def has_unpack_hook(saved: Any) -> bool:
    """Whether reading a raw field runs a hook, which may compute a part of the model again."""
    entries = saved if isinstance(saved, (tuple, list)) else (saved,)
    return any(getattr(entry, "unpack_hook", None) is not None for entry in entries)


def carried_out_alone(node: Any, cotangents: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The gradients that a node gives its inputs; ``None`` if it is not clear whose they are."""
    metadata = node._input_metadata
    if not isinstance(node, BackwardCFunction):
        found = node(*cotangents)
        return list(found) if isinstance(found, tuple) else [found]
    full = [
        torch.zeros(tuple(of.shape), dtype=of.dtype, device=of.device) if x is None else x
        for x, of in zip(cotangents, metadata, strict=True)
    ]
    found = node.apply(*full)
    found = found if isinstance(found, tuple) else (found,)
    # One for each argument of the Function, where the node has an input for each tensor.
    needed = iter(
        [x for x, is_needed in zip(found, node.needs_input_grad, strict=False) if is_needed]
    )
    in_order = [None if child is None else next(needed, None) for child, _ in node.next_functions]
    return in_order if next(needed, None) is None else None


def _dense(metadata: Any) -> Tensor:
    """A cotangent without zeros, whose numbers do not cancel."""
    shape = tuple(metadata.shape)
    numbers = torch.arange(1, prod(shape) + 1, dtype=torch.double, device="cpu")
    numbers = (numbers * 1.618).sin() + 2
    return numbers.view(shape).to(dtype=metadata.dtype, device=metadata.device)


def _chosen(grid: Tensor, digit: int, bit: int, full: Tensor) -> Tensor:
    """The cotangent of samples with a bit in some digit of their numbers, zero elsewhere."""
    is_chosen = (grid != EMPTY) & (grid >> digit & 1 == bit) | (grid == SEVERAL)
    return torch.where(is_chosen.to(full.device), full, 0)


def _has(gradient: Tensor | None, shape: Shape) -> Tensor:
    """Where a gradient is not zero, for an input to whose shape it is summed."""
    if gradient is None:
        return torch.zeros(shape, dtype=torch.bool, device="cpu")
    has = in_dense(gradient.detach()).ne(0).cpu()
    while has.dim() > len(shape):
        has = has.any(0)
    for dim, size in enumerate(shape):
        if has.shape[dim] != size:
            has = has.any(dim, keepdim=True)
    return has.expand(shape)


def _owners(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The sample of each place, from where it has a gradient for each digit of its number."""
    one, other = torch.stack(tuple(ones)), torch.stack(tuple(others))
    powers = 1 << torch.arange(len(one), device="cpu").view(-1, *(1,) * (one.dim() - 1))
    samples = (one * powers).sum(0)
    samples = samples.masked_fill(~(one | other).any(0), EMPTY)
    return samples.masked_fill((one & other).any(0), SEVERAL)
