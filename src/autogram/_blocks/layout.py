"""Layouts: the places of the B samples in a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Subset:
    """Some of the samples, in the order of the rows of a block."""

    samples: tuple[int, ...]
    batch: int
    """B."""


@dataclass(frozen=True)
class Folded:
    """Samples in regular places: a dimension read as ``(before, batch, after)``.

    ``before == after == 1`` is the plain case: the whole dimension counts the samples. Windows or
    tokens folded after the sample (``view(-1, d)``) give ``after > 1``; sequence-major folding
    (the output projection of attention) gives ``before > 1``.
    """

    dim: int
    before: int
    batch: int
    after: int

    depth = 1

    @cached_property
    def has_before(self) -> bool:
        """Whether something is folded before the samples."""
        return self.before > 1

    @cached_property
    def has_after(self) -> bool:
        """Whether something is folded after the samples."""
        return self.after > 1

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """``tensor`` with dimension ``dim`` unfolded, as a view; dimensions of one are left out."""
        sizes = [self.before] * self.has_before + [self.batch] + [self.after] * self.has_after
        return tensor.unflatten(dim, sizes) if len(sizes) > 1 else tensor

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> Folded | None:
        """The layout of the same elements in another shape, ``None`` if it is not regular."""
        if not prod(new):
            return None
        ahead = prod(old[: self.dim]) * self.before  # how often all samples are passed through
        behind = prod(old[self.dim + 1 :]) * self.after  # how many elements of one are together
        passed = 1
        for dim, size in enumerate(new):
            rest = prod(new[dim + 1 :])
            if ahead % passed == 0 and behind % rest == 0:
                before, after = ahead // passed, behind // rest
                if before * self.batch * after == size:
                    return Folded(dim, before, self.batch, after)
            passed *= size
        return None

    def owners(self, like: Tensor) -> Tensor:
        """The sample of each place, in a shape that broadcasts to that of ``like``."""
        size = self.before * self.batch * self.after
        along = torch.arange(size, device=like.device) // self.after % self.batch
        return along.view(-1, *(1,) * (like.dim() - self.dim - 1))

    def __str__(self) -> str:
        sizes = [("", self.before), ("samples ", self.batch), ("", self.after)]
        folded = " x ".join(f"{word}{size}" for word, size in sizes if size > 1 or word)
        return f"dimension {self.dim} ({folded})"


@dataclass(frozen=True, eq=False)
class Routed:
    """Samples in irregular places along a dimension: tokens of an expert, packed sequences.

    Or along several dimensions together: sequences packed into several rows.
    """

    dim: int
    """The dimension, the first one of several."""
    batch: int
    samples: Tensor
    """The sample of each place, -1 for none, with as many dimensions. On the CPU."""
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    """The places of each sample, on devices that asked for them."""

    has_before = False
    has_after = True

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """Places by sample, padded with zeros; a view if they are in order."""
        if self.depth > 1:
            tensor = tensor.flatten(dim, dim + self.depth - 1)
        if self._is_in_order:
            in_order: Tensor = tensor.unflatten(dim, self._places.shape)
            return in_order
        places = self._places_on(tensor.device)
        gathered = tensor.index_select(dim, places.flatten().clamp(min=0))
        is_place = (places >= 0).view(
            *places.shape, *(1,) * (tensor.dim() - dim % tensor.dim() - 1)
        )
        return torch.where(is_place, gathered.unflatten(dim, places.shape), 0)

    def owners(self, like: Tensor) -> Tensor:
        behind = like.dim() - self.dim - self.depth
        return self.samples.to(like.device).view((*self.samples.shape, *(1,) * behind))

    @property
    def depth(self) -> int:
        """The number of dimensions of the places."""
        return self.samples.dim()

    @property
    def most(self) -> int:
        """The largest number of places of one sample."""
        return self._places.shape[1]

    @cached_property
    def _is_in_order(self) -> bool:
        """Whether the places are ordered by sample, with equally many for each."""
        return self._places.flatten().tolist() == list(range(self.samples.numel()))

    def _places_on(self, device: torch.device) -> Tensor:
        """The places of each sample on a device, copied once."""
        if device not in self._copies:
            # The host need not wait: nothing changes the copied places.
            self._copies[device] = self._places.to(device, non_blocking=True)
        return self._copies[device]

    @cached_property
    def _places(self) -> Tensor:
        """The places of each sample, ``(batch, most of one sample)``, padded with -1."""
        samples = self.samples.flatten()
        order = samples.argsort(stable=True)
        owners = samples[order]
        order, owners = order[owners >= 0], owners[owners >= 0]
        counts = torch.bincount(owners, minlength=self.batch)
        ranks = torch.arange(len(order), device="cpu") - (counts.cumsum(0) - counts)[owners]
        places = torch.full((self.batch, int(counts.max())), -1, device="cpu")
        places[owners, ranks] = order
        return places

    def __str__(self) -> str:
        dims = ", ".join(map(str, range(self.dim, self.dim + self.depth)))
        of = "dimension" if self.depth == 1 else "dimensions"
        return f"{of} {dims} ({self.samples.numel()} places of {self.batch} samples, routed)"


@dataclass(frozen=True, eq=False)
class Partial:
    """Places of few samples, such as when a layer is called for each sample or group of samples."""

    subset: Subset
    layout: Layout | None
    """Where these samples are, by their number in the subset; ``None`` if there is one sample."""

    def __str__(self) -> str:
        count, batch = len(self.subset.samples), self.subset.batch
        return f"one of {batch} samples" if count == 1 else f"{count} of {batch} samples"


@dataclass(frozen=True, eq=False)
class Scattered:
    """Samples with separate elements, but without separate places along a dimension.

    Sums of views can lead to this: one element of a sample's row belongs to another sample.
    So do sequences packed into several rows, if a call reads something that several positions
    share.
    """

    batch: int
    samples: Tensor
    """The sample of each element, -1 for none, of a shape that broadcasts. On the CPU."""
    dims: tuple[int, ...] = ()
    """The dimensions in which samples may be."""

    @cached_property
    def parts(self) -> list[Partial]:
        """Parts, each with samples along a dimension: as few as some dimension allows.

        Two for tokens that were exchanged between neighbours; as many as there are samples in
        one row, for rows in which samples follow one another.
        """
        if not self.dims:
            return [self._part([x]) for x in self.samples[self.samples >= 0].unique().tolist()]
        return min([self._parts_along(dim) for dim in self.dims], key=len)

    def _parts_along(self, dim: int) -> list[Partial]:
        """Parts in which samples are along a dimension: each sample in the first that has room."""
        by_place = self.samples.movedim(dim, 0).flatten(1)
        has = torch.zeros(len(by_place), self.batch + 1, dtype=torch.bool, device="cpu")
        has = has.scatter_(1, by_place.long() + 1, 1)[:, 1:]
        meet = (has.float().mT @ has.float() > 0).tolist()
        parts: list[list[int]] = []
        for sample in has.any(0).nonzero().flatten().tolist():
            for part in parts:
                if not any(meet[sample][other] for other in part):
                    part.append(sample)
                    break
            else:
                parts.append([sample])
        return [self._part(part, dim, has[:, part]) for part in parts]

    def _part(self, samples: list[int], dim: int = 0, has: Tensor | None = None) -> Partial:
        """Some samples, and which of them has each place along a dimension if they are several."""
        subset = Subset(tuple(samples), self.batch)
        if has is None or len(samples) == 1:
            return Partial(subset, None)
        owners = torch.where(has.any(1), has.int().argmax(1), -1)
        return Partial(subset, Routed(dim, len(samples), owners))

    def __str__(self) -> str:
        return f"single elements ({self.batch} samples, scattered)"


Layout = Folded | Routed
"""Which sample each place along a dimension of a use's output, or several, belongs to."""

Placement = Folded | Routed | Partial | Scattered
"""Which sample each place of a use's output belongs to."""


def pieces(
    layout: Placement | None, cotangent: Tensor
) -> Iterator[tuple[Subset | None, Layout | None, Tensor]]:
    """The parts of a use from which a rule can make blocks. In most layouts, there is one part.

    Each part consists of its samples, ``None`` for all in order; their layout, ``None`` for one
    sample; and the cotangent ``(k, *output)``, with zeros for other samples.
    """
    if isinstance(layout, Partial):
        within = layout.layout if len(layout.subset.samples) > 1 else None
        yield layout.subset, within, cotangent
    elif isinstance(layout, Scattered):
        numbers = torch.full((layout.batch + 1,), -1, device="cpu")  # the last for no sample
        for number, part in enumerate(layout.parts):
            numbers[list(part.subset.samples)] = number
        numbers = numbers[layout.samples].to(cotangent.device)
        for number, part in enumerate(layout.parts):
            # A selection instead of a product, which would spread infinities to other samples.
            elements = torch.where(numbers == number, cotangent, 0)
            yield part.subset, part.layout, elements
    else:
        yield None, layout, cotangent


def candidates(shape: tuple[int, ...], dims: tuple[int, ...], batch: int) -> list[Folded]:
    """Every regular layout of ``batch`` samples in some dimensions, the likely ones first."""
    return [
        Folded(dim, before, batch, size // batch // before)
        for dim in dims
        for size in (shape[dim],)
        if size and size % batch == 0
        for before in range(1, size // batch + 1)
        if size // batch % before == 0
    ]
