"""Steps through a node, and the transfers that most families of nodes share.

For each place of an input, a transfer names the sample of *all* places of the result on which the
input's cotangent there can depend, for any values of cotangents and of saved tensors. Places that
a node does not reach may be given to any sample, because their cotangent is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from autogram._capture.places.places import Places, Shape, plain, unanimous


class Unreadable(Exception):
    """Deciding values cannot be read."""


class Road(IntEnum):
    """How much is read, in ascending order."""

    STRUCTURE = 0
    """Empty places count for any sample; most indices then need not be read."""
    EXACT = 1
    """Empty places are told apart."""
    CONSTANTS = 2
    """Zeros of constant factors and of masks may keep samples apart, and nodes are probed."""
    DERIVATIVES = 3
    """Zero derivatives of element-wise functions, such as those of a margin, may do so, too."""


class Read(Protocol):
    """Gives the tensors in a field of a node, on the CPU, or raises `Unreadable`."""

    def __call__(self, node: Any, name: str, is_constant: bool = False, /) -> Any:
        """The tensors; if it ``is_constant``, ``None`` for a tensor that requires a gradient."""


class CarryOut(Protocol):
    """Gives a node's gradients for some cotangents, by input, if the node can be called."""

    def __call__(
        self, node: Any, cotangents: Sequence[Tensor | None], /
    ) -> Mapping[Any, Tensor | None] | None:
        """The gradients."""


@dataclass(slots=True)
class NodeStep:
    """The way through a node from one of its results to one of its inputs."""

    node: Any
    position: int
    """The number of the input."""
    given: Shape
    """The shape of the input."""
    number: int
    """The number of the result."""
    result: Shape
    """The shape of the result."""
    road: Road
    read: Read
    carry_out: CarryOut
    has_read: bool = field(default=False, init=False)
    """Whether values of saved tensors have decided."""
    is_hidden: bool = field(default=False, init=False)
    """Whether something that no field of the node tells has decided."""

    def saved(self, name: str) -> Any:
        """One or several saved tensors of the node, on the CPU: their values decide."""
        self.has_read = True
        return self.read(self.node, name)

    def constant(self, name: str) -> Tensor | None:
        """A saved tensor of the node, on the CPU, if it exists and requires no gradient."""
        if not hasattr(type(self.node), f"_raw_saved_{name}"):
            return None  # nothing, or a number
        tensor: Tensor | None = self.read(self.node, name, True)
        self.has_read |= tensor is not None
        return tensor

    @property
    def is_exact(self) -> bool:
        """Whether to tell which places are empty, from values if needed."""
        return self.road >= Road.EXACT

    @property
    def is_voting(self) -> bool:
        """Whether zeros among factors may keep samples apart."""
        return self.road >= Road.CONSTANTS

    def has(self, name: str) -> bool:
        """Whether nodes of this kind save something under a name."""
        return hasattr(type(self.node), f"_saved_{name}")

    def argument(self, name: str) -> Any:
        """A saved value of the node that is not a tensor."""
        if not self.has(name):
            raise Unreadable(f"{self.node.name()} of this version of PyTorch has no `{name}`")
        return getattr(self.node, f"_saved_{name}")

    def dim(self, name: str = "dim") -> int:
        """A dimension, which may be saved as a negative number."""
        return signed(self.argument(name)) % self.rank

    def dims(self) -> list[int]:
        """The dimensions given to the call."""
        for name in ("dim", "dims", "dimension"):
            if self.has(name) and (dims := self.argument(name)) is not None:
                numbers = dims if isinstance(dims, tuple) else (dims,)
                return sorted({signed(number) % self.rank for number in numbers})
        return []

    @property
    def rank(self) -> int:
        """The number of dimensions in which the call counts its dimensions."""
        return max(len(self.result), len(self.given), 1)


Transfer = Callable[[NodeStep, Places], Places]


def signed(number: int) -> int:
    """A number that may be negative, even if it was saved as an unsigned one."""
    return number - (1 << 64) if number >= 1 << 63 else number


def table(*rows: tuple[Transfer, str]) -> Mapping[str, Transfer]:
    """Transfers by the names of operations, from a transfer and names in each row."""
    return {name: transfer for transfer, names in rows for name in names.split()}


def all_together(step: NodeStep, places: Places) -> Places:
    """Each place of the input depends on the whole result."""
    samples, rank = places.samples, len(step.given)
    if samples.numel() != 1:
        samples = unanimous(samples, range(samples.dim()))
    return Places(plain(step.given), samples.reshape((1,) * rank), places.may_be_empty)


def by_element(step: NodeStep, places: Places) -> Places:
    """Each place depends on its own place; broadcast inputs depend on all that read them.

    If the result is a sum of all elements, such as a loss, all depend on the sum.
    """
    is_tap = isinstance(step.node, BackwardCFunction)
    if step.road == Road.DERIVATIVES and not is_tap:
        of = step.node._input_metadata[step.number]
        ones = torch.ones(step.result, dtype=of.dtype, device=of.device)
        gradients = step.carry_out(step.node, [None] * step.number + [ones])
        derivative = None if gradients is None else gradients.get(step.position)
        if derivative is not None and tuple(derivative.shape) == step.result:
            step.is_hidden = True
            places = places.emptied((derivative == 0).cpu())
    return places if step.result == step.given else places.summed(step.given)


def unchanged(_: NodeStep, places: Places) -> Places:
    """Each place depends on its own place."""
    return places


def across(step: NodeStep, places: Places) -> Places:
    """All positions along the call's dimensions depend on one another, as in a softmax."""
    if len(step.result) != len(step.given):
        return all_together(step, places)
    return places.merged(step.dims()).fitted(step.given)


def reduced(step: NodeStep, places: Places) -> Places:
    """All positions along the call's dimensions go into one position of the result."""
    result, given = step.result, step.given
    if len(result) == len(given):
        return places.fitted(given)
    dims = step.dims() if result else range(len(given))
    if len(given) - len(result) != len(dims):
        return all_together(step, places)
    for dim in dims:
        places = places.inserted(dim, given[dim])
    return places.fitted(given)


def leading(but: int) -> Transfer:
    """Keeps the first dimensions: all of the input's except some last ones."""

    def transfer(step: NodeStep, places: Places) -> Places:
        rank = len(step.given)
        if len(step.result) != rank:
            return all_together(step, places)
        return places.merged(range(max(rank - but, 0), rank)).fitted(step.given)

    return transfer


def only(dim: int, to: int) -> Transfer:
    """One dimension of the result equals one of the input, if their sizes are equal."""

    def transfer(step: NodeStep, places: Places) -> Places:
        rank, given = len(step.result), step.given
        if not rank or not given or step.result[dim % rank] != given[to % len(given)]:
            return all_together(step, places)
        for other in reversed(range(rank)):
            if other != dim % rank:
                places = places.without(other)
        for other, size in enumerate(given):
            if other != to % len(given):
                places = places.inserted(other, size)
        return places

    return transfer


def inserted(*dims: int) -> Transfer:
    """The input has some dimensions that the result does not have."""

    def transfer(step: NodeStep, places: Places) -> Places:
        if len(step.result) + len(dims) != len(step.given):
            return all_together(step, places)
        for dim in dims:
            places = places.inserted(dim, step.given[dim])
        return places.fitted(step.given)

    return transfer


def by_input(*transfers: Transfer, others: Transfer = all_together) -> Transfer:
    """A transfer for each of the first inputs, and one for all others."""

    def transfer(step: NodeStep, places: Places) -> Places:
        is_first = step.position < len(transfers)
        return (transfers[step.position] if is_first else others)(step, places)

    return transfer
