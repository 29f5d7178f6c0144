"""Shares: descriptions of a rank's Jacobians for the other ranks, without the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Columns, Region
from autogram._capture.samples.objectives import Objectives
from autogram._jacobian import Jacobian


@dataclass(frozen=True)
class Operand:
    """A tensor of a block, without its data."""

    slot: int  # number of the tensor on its rank; blocks may share one
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # of a view that repeats elements, such as patches
    dtype: torch.dtype
    sample: int | None  # the dimension that counts the samples


@dataclass(frozen=True)
class Piece:
    """A block of one parameter, without its data."""

    part: int  # number of the rank's Jacobian that it belongs to
    region: Region
    equation: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Share:
    """Everything about one rank that decides how results are exchanged."""

    shapes: tuple[tuple[tuple[int, ...], int | None], ...]
    """The shape of the losses of each part, and which dimension counts the samples."""
    parameters: tuple[tuple[str, Region], ...]  # all trainable ones
    dtype: torch.dtype
    pieces: Mapping[str, tuple[Piece, ...]]  # the blocks of each parameter that has any
    gradients: frozenset[str]  # the parameters that the losses reach
    limit: int  # most elements to send, or to receive, at once

    @cached_property
    def digest(self) -> tuple[int, int]:
        """Identifies the share. Neither number is negative."""
        text = repr((self.shapes, self.parameters, self.dtype, sorted(self.pieces.items())))
        text += repr((sorted(self.gradients), self.limit))
        digest = blake2b(text.encode(), digest_size=16).digest()
        first, second = (int.from_bytes(digest[i : i + 8], "big") >> 1 for i in (0, 8))
        return first, second

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """K and B of each part."""
        objectives = [_objectives(*of) for of in self.shapes]
        return tuple([(x.per_sample, x.samples) for x in objectives])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first objective of each part, and the number of all."""
        return 0, *accumulate(k * b for k, b in self.sizes)

    @property
    def m(self) -> int:
        """The number of objectives of the rank."""
        return self.starts[-1]

    @cached_property
    def numbers(self) -> tuple[Tensor, ...]:
        """For each part, the numbers of its objectives among those of the rank, ``(k, b)``."""
        pairs = zip(self.shapes, self.starts, strict=False)
        return tuple([_objectives(*of).numbers(start) for of, start in pairs])


def _objectives(shape: tuple[int, ...], batch_dim: int | None) -> Objectives:
    """Objectives of some shape, without values."""
    return Objectives(torch.empty(shape, device="cpu"), batch_dim if prod(shape) else None)


@dataclass
class Data:
    """A rank's share together with the data."""

    jacobian: Jacobian
    share: Share
    tensors: list[Tensor]  # by slot

    def device_of(self, name: str) -> torch.device:
        """The device of this rank's blocks of a parameter."""
        return self.tensors[self.share.pieces[name][0].operands[0].slot].device

    def columns(self, name: str) -> Iterator[tuple[int, Columns]]:
        """The columns of a parameter in each part that has any."""
        parameter = self.parameters[name]
        for number, part in enumerate(self.jacobian._parts.each):
            columns = part.columns.get(parameter)
            if columns is not None and columns.dtype is not None:
                yield number, columns

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return {name: parameter for parameter, name in self.jacobian._names.items()}


def data_of(jacobian: Jacobian) -> Data:
    """A rank's Jacobian, in the form of its exchange."""
    tensors: list[Tensor] = []
    slots: dict[Any, int] = {}
    pieces: dict[str, list[Piece]] = {}
    reached: set[str] = set()
    for number, part in enumerate(jacobian._parts.each):
        for parameter, columns in part.columns.items():
            name = jacobian._names[parameter]
            reached.add(name)
            for region, block in columns.found():
                pairs = zip(block.operands, block.inputs, strict=True)
                operands = tuple([_operand(x, of, slots, tensors) for x, of in pairs])
                pieces.setdefault(name, []).append(Piece(number, region, block.equation, operands))
    objectives = [part.objectives for part in jacobian._parts.each]
    names = jacobian._names.items()
    share = Share(
        tuple([(tuple(x.losses.shape), x.batch_dim) for x in objectives]),
        tuple([(name, Region.of_parameter(parameter)) for parameter, name in names]),
        torch.promote_types(jacobian.dtype, torch.float32),
        {name: tuple(found) for name, found in pieces.items()},
        frozenset(reached),
        jacobian._limit.elements,
    )
    return Data(jacobian, share, tensors)


def _operand(x: Tensor, labels: str, slots: dict[Any, int], tensors: list[Tensor]) -> Operand:
    """Describes a tensor without its data, and lists the tensor once."""
    key = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype)
    if key not in slots:
        slots[key] = len(tensors)
        tensors.append(x.detach())
    strides = x.stride() if _span(x.shape, x.stride()) < x.numel() else None
    sample = labels.find("b")
    return Operand(slots[key], tuple(x.shape), strides, x.dtype, None if sample < 0 else sample)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of places in memory from the first to the last element."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def cut(operand: Operand, samples: slice) -> tuple[tuple[int, ...], int]:
    """The shape of an operand with some of the samples, and the number of elements to send."""
    shape = list(operand.shape)
    if operand.sample is not None:
        start, stop, _ = samples.indices(shape[operand.sample])
        shape[operand.sample] = max(0, stop - start)
    count = prod(shape)
    if operand.strides is not None and count:
        count = _span(shape, operand.strides)
    return tuple(shape), count


def flat(tensor: Tensor, operand: Operand, samples: slice) -> Tensor:
    """The elements to send for an operand."""
    if operand.sample is not None:
        tensor = tensor[(slice(None),) * operand.sample + (samples,)]
    if operand.strides is not None and tensor.numel():
        return tensor.as_strided((_span(tensor.shape, tensor.stride()),), (1,))
    return tensor.reshape(-1)


def shaped(elements: Tensor, operand: Operand, samples: slice) -> Tensor:
    """Rebuilds an operand from the elements that have arrived."""
    shape, _ = cut(operand, samples)
    strides = operand.strides
    if strides is None or not elements.numel():
        return elements.view(shape)
    return elements.as_strided(shape, strides)
