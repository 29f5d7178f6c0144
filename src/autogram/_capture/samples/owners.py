"""Owners: which sample each place of a use's output belongs to, seen in backward passes.

The backward pass is linear in the cotangent of the losses. Where samples do not meet, each place
depends on the objectives of one sample alone, its owner. Two codes show the owner:

- By zeros: the cotangent of the losses is zero for all but some samples, and the cotangent of a use
  must be zero in all places of the other samples. Every differentiable operation keeps zeros, so
  that no tolerance is needed. Any two samples differ in a binary digit of their numbers, so that
  one pass for each digit and one for its complement tell all samples apart, and show each mixture.
- By scales: sample s is multiplied by a power of two of its own, which changes only exponents, so
  that every place of the sample is the same power of two times what it was, bit for bit. Two passes
  tell 32 samples apart. A sum over several samples is not a power of two times what it was, except
  by an accident of its values.

A place is a position along a dimension, for all positions along the other dimensions. Where samples
meet in such places, each place is a position along the first two dimensions together, as in rows
of packed sequences, and then of more dimensions, up to single elements.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from autogram._blocks import as_real
from autogram._capture.autograd.cotangents import visit
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.proofs.spots import Spot, kept_finite, shown
from autogram._capture.samples.proofs.trials import EXPONENTS
from autogram._capture.samples.replays import copied_to_cpu
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use, not_finite

NONE = -1
HIDDEN = -2

# Exponents from -16 to 15 keep numbers of ordinary size far from overflow and underflow.
_SCALES = len(EXPONENTS)
_EXPONENTS = EXPONENTS - _SCALES // 2
_DIGITS = _EXPONENTS.argsort()
_BEYOND = 2**40
_APART = (5**0.5 - 1) / 2  # of whose multiples the fractional parts are far from one another


# For each dimension along which samples can lie and do not meet, the sample of each place, on the
# CPU: `NONE` where the cotangent is zero, `HIDDEN` where the cotangent is not finite and belongs to
# one of the samples whose objectives are not finite. Under -n, the samples of all positions along
# the first n dimensions together, in row-major order. Empty if samples meet in some place.
Owners = dict[int, Tensor]


def are_none(owners: Owners) -> bool:
    """Whether the whole cotangent is zero."""
    return any(bool((places == NONE).all()) for places in owners.values())


def owners_by_zeros(
    objectives: Objectives,
    survey: Survey,
    spots: Sequence[Spot] = (),
    *,
    are_apart: bool = False,
) -> tuple[dict[Use, Owners], dict[Spot, Owners]]:
    """The owners of all uses and spots that are reached, by passes for some of the samples alone.

    The places of a sample whose objectives are not finite are hidden: zero times infinity is not
    zero, so that they have a cotangent in every pass. The other samples show the layout, in passes
    from which infinities are kept away. A pass with these shows which places are hidden.

    Together, what the objectives of a sample contribute to a place may cancel. If they
    ``are_apart``, other passes are made as well, in which each objective is alone.
    """
    zeros, channel = _Zeros(objectives), survey.channel
    are_finite = bool(objectives.is_finite.all())
    if not are_finite:
        equal = torch.ones(objectives.samples, device="cpu")
        show_uses(channel, objectives, equal, zeros.hide, are_apart=are_apart)
    with shown(survey, spots, zeros.hear), nullcontext() if are_finite else kept_finite(survey):
        for is_apart in [False, True] if are_apart else [False]:
            for weights in zeros.choices(are_equal=is_apart):
                show_uses(channel, objectives, weights, zeros.see, are_apart=is_apart)
    uses = zeros.owners(zeros.counts)
    met = [use for use, owners in uses.items() if not owners]
    # Samples that meet along every dimension of a use may still have elements of their own.
    finer = {use: _finer(use) for use in met}
    most = {use: zeros.passes // 2 * prod(use.shape) if finer[use] else 0 for use in met}
    mixed = [use for use in met if zeros.counts[use] > most[use]]
    if met and not mixed:
        channel.together.update({_name(use): count for use, count in finer.items()})
        uses, of_spots = owners_by_zeros(objectives, survey, spots, are_apart=are_apart)
        for use in [use for use in uses if not uses[use]]:
            channel.together.pop(_name(use), None)
        return uses, of_spots
    for use in mixed:
        if zeros.is_hidden(use):
            raise not_finite(use)
    of_spots = zeros.owners([spot for spot in spots if spot in zeros.places])
    return {**{x: uses[x] for x in mixed}, **uses}, of_spots  # uses that are surely mixed first


_Seen = TypeVar("_Seen", Use, Spot)


class _Zeros:
    """Which places have a cotangent in passes for the samples with some bit of their number."""

    def __init__(self, objectives: Objectives) -> None:
        self._samples = objectives.samples
        self._digits = (objectives.samples - 1).bit_length()
        self._digit = self._bit = 0  # by which the samples of the current pass are chosen
        self.passes = 0  # so far
        # For each use and spot, by dimension, which of all places are its own.
        self.places: dict[Use | Spot, dict[int, slice]] = defaultdict(dict)
        # For each place, the digits for which it had a cotangent in the pass of bit 0, those for
        # which it had one in the pass of bit 1, and whether its cotangent was not finite.
        self._marks = torch.zeros(3, 0, dtype=torch.int32, device="cpu")
        self._marking: list[tuple[slice, tuple[int, int], Tensor]] = []  # in the current pass
        self._count = 0  # of places
        self.counts = Counter[Use]()  # of elements with a cotangent, over all passes
        self._is_finite = objectives.is_finite

    def choices(self, *, are_equal: bool = False) -> Iterator[Tensor]:
        """A weight of each sample in a pass, ``(b,)``, for one pass after the other.

        Zero for samples that take no part. The others are from 1/2 to 1. With equal ones,
        samples that meet would have no cotangent together where labels of 1 and -1 multiply a
        common score. If they ``are_equal``, the numbers of each sample are those of the Gramian.
        """
        samples = torch.arange(self._samples, device="cpu")
        weights = 1 - samples * (0 if are_equal else _APART) % 1 / 2
        for digit, bit in product(range(self._digits), (0, 1)):
            self._digit, self._bit, self.passes = digit, bit, self.passes + 1
            yield weights.where(samples >> digit & 1 == bit, 0)
            self._take_in()

    def owners(self, seen: Iterable[_Seen]) -> dict[_Seen, Owners]:
        """The owners of uses and spots that were seen, behind all passes."""
        lacked, had, hidden = self._marks
        is_hidden, is_seen = hidden != 0, (had ^ lacked) == (1 << self._digits) - 1
        # Seen for neither bit of some digit is what rounding leaves of zero in some passes.
        is_mixed = (had & lacked != 0) | (is_hidden & ~is_seen & (had | lacked != 0))
        is_mixed |= is_seen & (had >= self._samples)  # several, each seen in some passes alone
        is_wrong = is_seen & is_hidden & self._is_finite[had.clamp(max=self._samples - 1)]
        before = torch.zeros(self._count + 1, dtype=torch.long, device="cpu")
        torch.cumsum(is_mixed | is_wrong, 0, out=before[1:])
        owners = torch.where(is_seen, had, torch.where(is_hidden, HIDDEN, NONE))
        found: dict[_Seen, Owners] = {}
        for each in seen:
            own = self.places[each].items()
            apart = [(dim, of) for dim, of in own if before[of.start] == before[of.stop]]
            found[each] = {dim: owners[of].long() for dim, of in apart}
        return found

    def is_hidden(self, seen: Use | Spot) -> bool:
        """Whether a cotangent was not finite in some place."""
        return any(bool(self._marks[2, own].any()) for own in self.places[seen].values())

    def see(self, use: Use, cotangent: Tensor) -> None:
        """Takes in the cotangent of a use."""
        if not cotangent.abs().amax().isfinite():
            if self._is_finite.all():
                raise not_finite(use)
            cotangent = torch.where(cotangent.isfinite(), cotangent, 0)
        self.counts[use] += int(cotangent.count_nonzero())
        # On a CPU, the largest of absolute values is found in a fraction of the time of `any`.
        self._mark(use, cotangent.abs(), self._bit, 1 << self._digit)

    def hide(self, use: Use, cotangent: Tensor) -> None:
        """Takes in where the cotangent of a use is not finite, in a pass for all samples."""
        is_hidden = ~cotangent.isfinite()
        if not self._is_finite.any() and is_hidden.any():
            raise not_finite(use)
        self._mark(use, is_hidden, 2, 1)

    def hear(self, spot: Spot, cotangents: Tensor) -> None:
        """Takes in the cotangents of a spot."""
        values = cotangents.abs()
        values = values[0] if len(values) == 1 else values.amax(0)
        self._mark(spot, values, self._bit, 1 << self._digit)

    def _mark(self, seen: Use | Spot, values: Tensor, row: int, mark: int) -> None:
        """Adds a mark to places where values, which are not negative, are not zero."""
        places = self.places[seen]
        for dim, largest in _by_place(seen, self._dims(seen), values, torch.amax):
            if dim not in places:
                self._count, start = self._count + len(largest), self._count
                places[dim] = slice(start, self._count)
            self._marking.append((places[dim], (row, mark), largest))

    def _take_in(self) -> None:
        """Takes in the marks of a pass. Of thousands, a device is waited for once."""
        self._marks = pad(self._marks, (0, self._count - self._marks.shape[1]))
        copies = copied_to_cpu([largest for *_, largest in self._marking])
        for how in {how for _, how, _ in self._marking}:
            own = [(places, copies[x]) for places, other, x in self._marking if other == how]
            numbers = [torch.arange(of.start, of.stop, device="cpu") for of, _ in own]
            is_there = torch.cat([largest for _, largest in own]) != 0
            row, mark = how
            self._marks[row, torch.cat(numbers)[is_there]] |= mark
        self._marking.clear()

    def _dims(self, seen: Use | Spot) -> tuple[int, ...]:
        """The dimensions to look at: of a spot, those with regular layouts, or one in any case."""
        if not isinstance(seen, Spot):
            return seen.dims
        return tuple([d for d in seen.dims if seen.shape[d] % self._samples == 0]) or seen.dims[:1]


class Scales:
    """Passes in which samples have powers of two for weights, to be compared with equal ones."""

    def __init__(self, channel: Channel, objectives: Objectives) -> None:
        self.uses: dict[Use, None] = {}  # those that have a cotangent
        self._samples = objectives.samples
        self._sums: dict[int, dict[Use, Tensor]] = defaultdict(dict)
        samples = torch.arange(self._samples, device="cpu")
        unit = 1
        while unit < self._samples:
            exponents = _EXPONENTS[samples // unit % _SCALES]
            show_uses(channel, objectives, exponents.float().exp2(), partial(self._see, unit))
            unit *= _SCALES

    def owners(self, use: Use, cotangent: Tensor) -> Owners:
        """The owners of a use's places, from its cotangent where all samples have the weight one.

        Dimensions along which samples meet are left out. So are dimensions where rounding differs
        from pass to pass: at numbers of extreme size, or where an operation adds up in a different
        order each time.
        """
        sizes, plain = _checksums(use, cotangent)
        found = torch.where(plain != 0, 0, NONE)
        for unit, sums in self._sums.items():
            scaled = sums[use] if use in sums else torch.zeros_like(plain)
            found += unit * _digits(plain, scaled)
        by_dim = zip(sizes, found.split(list(sizes.values())), strict=True)
        return {dim: places for dim, places in by_dim if int(places.max()) < self._samples}

    def _see(self, unit: int, use: Use, cotangent: Tensor) -> None:
        """Takes in the cotangent of a use in one of the passes."""
        _, sums = _checksums(use, cotangent)
        # These tell most often, without another look at all elements.
        if not sums.isfinite().all() and not cotangent.isfinite().all():
            raise not_finite(use)
        if sums.any() or cotangent.any():
            self.uses[use] = None
            self._sums[unit][use] = sums


def show_uses(
    channel: Channel,
    objectives: Objectives,
    weights: Tensor,
    see: Callable[[Use, Tensor], None],
    *,
    are_apart: bool = False,
) -> None:
    """Shows the cotangent ``(*output,)`` of each use in a pass with a weight for each sample.

    If the objectives of a sample ``are_apart``, shows the largest absolute values of theirs.
    """

    def receive(use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        del saved
        if cotangent.numel():
            see(use, cotangent.abs().amax(0) if are_apart else cotangent[0])

    cotangents = objectives.weighted(weights, are_apart=are_apart)
    visit(channel, objectives.losses, cotangents, lambda: receive)


def _by_place(
    seen: Use | Spot,
    dims: tuple[int, ...],
    values: Tensor,
    reduce: Callable[[Tensor, int], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Values reduced to one for each place, by dimension in which samples can lie, in order.

    The values may have more dimensions behind those of what they belong to. ``reduce`` reduces a
    matrix along one of its dimensions. Dimensions behind all places are reduced first, and those in
    front of places one by one, so that most values are read once or twice.
    """
    if together := _together(seen):
        yield -together, reduce(values.reshape(prod(seen.shape[:together]), -1), 1)
        return
    front = values.shape[: dims[-1] + 1]
    if values.dim() > len(front):
        values = reduce(values.reshape(prod(front), -1), 1).view(front)
    for dim in range(dims[-1] + 1):
        rows = values.reshape(len(values), -1)
        if dim in dims:
            yield dim, reduce(rows, 1)
        if dim < dims[-1]:
            values = reduce(rows, 0).view(values.shape[1:])


def _together(seen: Use | Spot) -> int:
    """Of how many dimensions together the places are, or zero for those along each dimension."""
    if not seen.dims:
        return max(len(seen.shape), 1)
    return 0 if isinstance(seen, Spot) else seen.recording.channel.together.get(_name(seen), 0)


def _finer(use: Use) -> int:
    """The same for the next smaller places, or zero where they are elements."""
    together, rank = _together(use), len(use.shape)
    return 0 if together >= rank else min(max(together + 1, 2), rank)


def _name(use: Use) -> tuple[int, str]:
    """Identifies a use from call to call."""
    return use.index, use.function


def _checksums(use: Use, cotangent: Tensor) -> tuple[dict[int, int], Tensor]:
    """A sum over each place, with weights so that parts do not cancel; on the CPU.

    Returns:
        The number of places along each dimension, and the sums of all, dimension by dimension.
    """
    parts = as_real(cotangent).double()
    found = dict(_by_place(use, use.dims, parts, _weighted_sum))
    return {dim: len(x) for dim, x in found.items()}, torch.cat([*found.values()]).cpu()


def _weighted_sum(matrix: Tensor, dim: int) -> Tensor:
    """The sum of a matrix along a dimension, with different weights."""
    weights = torch.arange(1, matrix.shape[dim] + 1, device=matrix.device).double().sin()
    return matrix @ weights if dim else weights @ matrix


def _digits(plain: Tensor, scaled: Tensor) -> Tensor:
    """The digit whose power of two each place was multiplied by; 0 for zeros, else `_BEYOND`."""
    is_zero = plain == 0
    exponents = torch.where(is_zero, _EXPONENTS[0], (scaled / plain).abs().log2().round())
    codes = (exponents.long() + _SCALES // 2).clamp(0, _SCALES - 1)
    is_exact = (codes - _SCALES // 2 == exponents) & (plain * torch.exp2(exponents) == scaled)
    return torch.where(is_exact, _DIGITS[codes], _BEYOND)
