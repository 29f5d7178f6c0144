"""Owners: which sample each place of a use's output belongs to, seen in backward passes.

The backward pass is linear in the cotangent of the losses, and where samples keep to themselves,
each place depends on the objectives of one sample alone. Two codes show which:

- By zeros: the cotangent of the losses is zero for all but some samples, and that of a use must be
  zero in all other places. Zeros survive every differentiable operation, so this needs no
  tolerance. Any two samples differ in a binary digit of their numbers, so that one pass for each
  digit and one for its complement tell all of them apart, and no mixture can hide.
- By scales: sample s is multiplied by 2^s, which no rounding can blur, so that every place of it is
  2^s times what it was, bit for bit. Two passes tell 32 samples apart. A sum over several samples
  is not a power of two times what it was, but by an accident of its values.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from math import prod

import torch
from torch import Tensor

from autogram._capture.autograd.cotangents import visit
from autogram._capture.autograd.graph import in_dense
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.proof import Spot, Spots
from autogram._capture.uses import Use, describe
from autogram._errors import NonFiniteError

# For each use or spot that has a cotangent, for each dimension in which samples can lie and do not
# meet: the sample of every place, -1 where the cotangent is zero, or HIDDEN where it is not finite
# and belongs to one of the samples whose objectives are not finite. On the CPU. Where samples can
# lie in no dimension, all of the use is one place, under WHOLE. Where they meet along every
# dimension and in no element, there is the sample of every element, under ELEMENTS, of the use's
# shape.
Owners = dict[Use | Spot, dict[int, Tensor]]

HIDDEN = -2
WHOLE = -1
ELEMENTS = -2

ByPlace = dict[Use | Spot, dict[int, Tensor]]  # something for each place along each dimension

# Exponents from -16 to 15 keep what is of ordinary size far from overflow and underflow. They are
# in no order, because sums such as y[b] + 2 y[b - 2] have powers of two of their own.
_SCALES = 32
_EXPONENTS = torch.tensor(random.Random(0).sample(range(-16, 16), _SCALES), device="cpu")
_DIGITS = _EXPONENTS.argsort()


def owners_by_zeros(channel: Channel, objectives: Objectives, spots: Spots | None = None) -> Owners:
    """The owners by passes for some of the samples alone.

    A sample whose objectives are not finite hides its own places: zero times infinity is no zero,
    so that they are seen in every pass. The others show the layout, if there are any.

    Args:
        channel: The channel of the taps.
        objectives: The losses with their samples.
        spots: Other places in the graph to look at.

    Raises:
        NonFiniteError: A cotangent is infinite or not a number, and every objective is finite or
            none is.
    """
    samples = torch.arange(objectives.samples, device="cpu")
    is_finite = objectives.is_finite
    hidden: ByPlace | None = {} if is_finite.any() and not is_finite.all() else None
    with_digit: ByPlace = {}
    without: ByPlace = {}
    counts = Counter[Use]()
    every = 0
    for digit in range((objectives.samples - 1).bit_length()):
        every |= 1 << digit
        has_digit = (samples >> digit) % 2 == 1
        for chosen, seen in ((has_digit, with_digit), (~has_digit, without)):
            looked = _look(channel, objectives, chosen, _any_nonzero, hidden, counts, spots)
            for use, found in looked.items():
                before = seen.get(use, {})
                seen[use] = {d: x.long() << digit | before.get(d, 0) for d, x in found.items()}
    owners: Owners = {}
    for use in {**with_digit, **without, **(hidden or {})}:
        owners[use] = {}
        seen_here = [x.get(use, {}) for x in (with_digit, without, hidden or {})]
        for dim, places in next((x for x in seen_here if x), {}).items():
            none = torch.zeros_like(places)
            ones, zeros, marks = (x.get(dim, none) for x in seen_here)
            is_seen = (ones | zeros) != 0
            is_hidden = marks > 0
            if bool(((ones ^ zeros)[is_seen] == every).all()) and not bool(
                is_finite[ones[is_seen & is_hidden]].any()
            ):
                unseen = torch.where(is_hidden, HIDDEN, -1)
                owners[use][dim] = torch.where(is_seen, ones, unseen)
        if not isinstance(use, Spot):
            owners[use] = _coarsened(use, owners[use])
    met = [use for use, found in owners.items() if not found and not isinstance(use, Spot)]
    mixed = [use for use in met if not _may_be_apart(use, counts[use] / every.bit_length())]
    if met and not mixed:
        by_element = channel.by_element
        by_element.update([_name(use) for use in met])
        owners = owners_by_zeros(channel, objectives, spots)
        still = [x for x, found in owners.items() if not found and not isinstance(x, Spot)]
        by_element.difference_update([_name(use) for use in still])
        return owners
    for use in mixed:
        if hidden and use in hidden:
            raise not_finite(use)
    return {**{use: {} for use in mixed}, **owners}  # those first that are mixed for certain


def _may_be_apart(use: Use, count: float) -> bool:
    """Whether the samples of a use that meet along every dimension may do so in no element.

    Args:
        use: The use.
        count: How many elements have a cotangent, from some samples and from the others.
    """
    return _name(use) not in use.recording.channel.by_element and count <= prod(use.shape)


def _name(use: Use) -> tuple[int, str]:
    """What a use is known again by."""
    return use.index, use.function


class Scales:
    """Passes in which the samples differ by powers of two, to be compared with one of equal ones.

    Raises:
        NonFiniteError: A cotangent is infinite or not a number.
    """

    def __init__(self, channel: Channel, objectives: Objectives) -> None:
        self._samples = objectives.samples
        self._scaled: dict[int, ByPlace] = {}
        samples = torch.arange(self._samples, device="cpu")
        unit = 1
        while unit < self._samples:
            exponents = _EXPONENTS[samples // unit % _SCALES]
            weights = torch.exp2(exponents.float())
            self._scaled[unit] = _look(channel, objectives, weights, _checksums)
            unit *= _SCALES

    @property
    def uses(self) -> set[Use]:
        """The uses that have a cotangent."""
        seen = set().union(*self._scaled.values())
        return {use for use in seen if not isinstance(use, Spot)}

    def owners(self, use: Use, cotangent: Tensor) -> dict[int, Tensor]:
        """The owners of a use's places, by dimension, or of the whole, or of its elements.

        A dimension is left out, too, where what was multiplied is not bit for bit what it was: at
        numbers of extreme size, or where an operation adds up in a different order each time.

        Args:
            use: The use.
            cotangent: Its cotangent where all samples have the weight one, ``(*output,)``.
        """
        owners = {}
        for dim, plain in _reduced(use, cotangent, _checksums).items():
            places: Tensor | None = (plain != 0).long() - 1
            for unit, found in self._scaled.items():
                digits = _digits(plain, found.get(use, {}).get(dim, torch.zeros_like(plain)))
                if places is None or digits is None:
                    places = None
                else:
                    places += torch.where(places >= 0, unit * digits, 0)
            if places is not None and int(places.max()) < self._samples:
                owners[dim] = places
        return _coarsened(use, owners)


def owners_by_scales(channel: Channel, objectives: Objectives) -> Owners | None:
    """The owners by passes in which the samples differ by powers of two.

    Returns:
        The owners, or ``None`` where a cotangent is not finite, as in half precision if scaled.
    """
    try:
        scales = Scales(channel, objectives)
    except NonFiniteError:
        return None
    owners: Owners = {use: {} for use in scales.uses}  # also where all samples add up to zero

    def observe(use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        del saved
        if use in owners:
            owners[use] = scales.owners(use, cotangent[0])

    equal = torch.ones(objectives.samples, device="cpu")
    visit(channel, objectives.losses, objectives.weighted(equal), lambda: observe)
    return owners


def _look(
    channel: Channel,
    objectives: Objectives,
    weights: Tensor,
    reduce: Callable[[Tensor], Tensor],
    hidden: ByPlace | None = None,
    counts: Counter[Use] | None = None,
    spots: Spots | None = None,
) -> ByPlace:
    """What every place is reduced to, in a pass with a weight for each sample.

    Uses without a cotangent are left out. What is not finite is refused, or where ``hidden`` is
    given, marked there and taken for zero. The elements that have a cotangent are added to
    ``counts``.
    """
    found: ByPlace = {}

    def observe(use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        del saved
        is_finite = torch.isfinite(cotangent)
        if not is_finite.all():
            if hidden is None:
                raise not_finite(use)
            marks = hidden.setdefault(use, {})
            for d, found_here in _reduced(use, ~is_finite[0], _any_nonzero).items():
                marks[d] = marks.get(d, 0) | found_here.long()
            cotangent = torch.where(is_finite, cotangent, 0)
        count = int((cotangent != 0).sum())
        if count:
            found[use] = _reduced(use, cotangent[0], reduce)
            if counts is not None:
                counts[use] += count

    def observe_spot(spot: Spot, cotangent: Tensor) -> None:
        cotangent = in_dense(cotangent)
        if bool((cotangent != 0).any()):
            found[spot] = _reduced(spot, cotangent, reduce)

    with nullcontext() if spots is None else spots.shown_to(observe_spot):
        visit(channel, objectives.losses, objectives.weighted(weights), lambda: observe)
    return found


def _reduced(
    use: Use | Spot, cotangent: Tensor, reduce: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Every place of a cotangent ``(*output,)`` reduced to one number, along each dimension."""
    if not isinstance(use, Spot) and _name(use) in use.recording.channel.by_element:
        return {ELEMENTS: reduce(cotangent.reshape(-1, 1)).cpu()}
    if not isinstance(use, Spot) and not use.dims:
        return {WHOLE: reduce(cotangent.reshape(1, -1)).cpu()}
    by_place = (cotangent.movedim(d, 0).reshape(use.shape[d], -1) for d in use.dims)
    return {d: reduce(x).cpu() for d, x in zip(use.dims, by_place, strict=True)}


def _coarsened(use: Use, owners: dict[int, Tensor]) -> dict[int, Tensor]:
    """The owners along each dimension, where those of elements agree along one."""
    if ELEMENTS not in owners:
        return owners
    elements = owners[ELEMENTS].view(use.shape)
    if bool((elements == HIDDEN).any()):
        return {ELEMENTS: elements}
    if not use.dims and len(elements[elements >= 0].unique()) <= 1:
        return {WHOLE: elements.amax().view(1)}
    found = {}
    for d in use.dims:
        by_place = elements.movedim(d, 0).reshape(use.shape[d], -1)
        places = by_place.amax(1)
        if bool(((by_place == places.unsqueeze(1)) | (by_place < 0)).all()):
            found[d] = places
    return found or {ELEMENTS: elements}


def not_finite(use: Use) -> NonFiniteError:
    """The error for a use whose cotangent does not show where the samples lie."""
    return NonFiniteError(
        f"The cotangent of {describe(use)} is infinite or not a number, so that it cannot be seen "
        "where the samples lie. Look for a division by zero or an overflow behind this call; "
        "`torch.autograd.detect_anomaly()` finds it."
    )


def _any_nonzero(by_place: Tensor) -> Tensor:
    """Whether a place has a cotangent, from ``(places, others)``."""
    return (by_place != 0).any(1)


def _checksums(by_place: Tensor) -> Tensor:
    """One number for each place, from ``(places, others)``, that no part of it is missing from."""
    parts = torch.view_as_real(by_place).flatten(1) if by_place.is_complex() else by_place
    factors = torch.arange(1, parts.shape[1] + 1, device=parts.device).double().sin()
    return (parts.double() * factors).sum(1)


def _digits(plain: Tensor, scaled: Tensor) -> Tensor | None:
    """The digits by which places were multiplied, or ``None`` if it was not by a power of two."""
    is_there = plain != 0
    exponents = torch.where(is_there, (scaled / plain).abs().log2().round(), 0)
    if not torch.equal(torch.where(is_there, plain * torch.exp2(exponents), 0), scaled):
        return None
    codes = exponents.long() + _SCALES // 2
    is_code = (codes >= 0) & (codes < _SCALES)
    return _DIGITS[codes] if bool(is_code.all()) else None
