"""Pairs from PyTorch's own sample inputs: what differs between samples of equal shapes.

Besides the samples as they come, there are some whose numbers, flags, dimensions, indices and
masks are exchanged: for such as do nothing (a dimension of its own, a factor of zero, indices in
order, a full mask), and for others. What PyTorch does not carry out is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.hunt import samples
from tests.hunt.pairs import Pair, differentiable

MOST_ELEMENTS = 150
MOST_SAMPLES = 60
MOST_PAIRS = 12  # of one operator
# No gradient that is a function of the activations: their results are random or uninitialised.
RANDOM = {"empty_like", "normal", "nn.functional.rrelu"}


@dataclass(frozen=True)
class Sample:
    """The leaves of a sample input, of which one becomes the hidden activations."""

    call: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    place: int

    @property
    def hidden(self) -> Tensor:
        """What the hidden activations stand for."""
        return self.leaves[self.place]

    @property
    def key(self) -> Hashable:
        """What samples of one pair have in common: the shapes of all tensors."""
        return (
            self.place,
            str(self.structure),
            tuple(tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in self.leaves),
        )

    @property
    def identity(self) -> Hashable:
        """All that is no hidden activation, to tell samples apart."""
        return tuple(
            repr(x.tolist()) if isinstance(x, Tensor) and x.layout == torch.strided else repr(x)
            for place, x in enumerate(self.leaves)
            if place != self.place
        )

    def argument(self) -> list[Any]:
        """The leaves but for the hidden activations."""
        return [x for place, x in enumerate(self.leaves) if place != self.place]

    def replaced(self, place: int, leaf: Any) -> Sample:
        """The same sample with another leaf."""
        leaves = (*self.leaves[:place], leaf, *self.leaves[place + 1 :])
        return Sample(self.call, leaves, self.structure, self.place)

    def apply(self, h: Tensor, argument: list[Any]) -> Any:
        """The operator of hidden activations and the other leaves."""
        leaves = [*argument[: self.place], h, *argument[self.place :]]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.call(*args, **kwargs)


def pairs(only: str = "", part: int = 0, parts: int = 1) -> Iterator[Pair]:
    """All pairs of the operators whose names begin so, or of a part of these operators."""
    for operator in list(samples.operators())[part::parts]:
        name = _name(operator)
        is_wanted = name.startswith(only) or only.startswith(f"{name}:")
        if is_wanted and operator.name not in RANDOM:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = list(_pairs_of(operator))
            yield from found


def _name(operator: Any) -> str:
    return f"{operator.name} {operator.variant_test_name}".strip().replace("/", " ")


def _pairs_of(operator: Any) -> Iterator[Pair]:
    """The pairs of an operator: samples beside each other in each group of equal shapes."""
    name = _name(operator)
    groups: dict[Hashable, dict[Hashable, Sample]] = {}
    for sample in _samples(operator):
        group = groups.setdefault(sample.key, {})
        for changed in (*_harmless(sample), sample, *_others(sample)):
            if len(group) < 8 and changed.identity not in group and _works(changed):
                group[changed.identity] = changed
    count = 0
    for group in sorted(groups.values(), key=len, reverse=True):
        samples = list(group.values())
        for place, later in enumerate(samples[1:]):
            for first in {0: samples[0], place: samples[place]}.values():
                if count < MOST_PAIRS:
                    yield _pair(name, str(count), first, later)
                    count += 1
        if len(samples) > 1 and count < MOST_PAIRS:
            yield _pair(name, str(count), samples[-1], samples[0])
            count += 1
    for group in groups.values():  # data that changes, and nothing else, of those without a pair
        if count == 0:
            sample = next(iter(group.values()), None)
            if sample is not None:
                yield _pair(name, str(count), sample, sample)
                count += 1


def _pair(name: str, number: str, first: Sample, later: Sample) -> Pair:
    arguments = first.argument(), later.argument()
    base = first.hidden.detach()
    return Pair(name, number, first.apply, arguments, tuple(base.shape), base)


def _samples(operator: Any) -> Iterator[Sample]:
    """Small samples of an operator, once for each tensor that can be hidden activations."""
    torch.default_generator.manual_seed(0)
    try:
        # Its method `sample_inputs` reads the stack for each sample, which takes most of the time.
        make = operator.sample_inputs_func
        inputs = islice(make(operator, "cpu", torch.float64, False), MOST_SAMPLES)
        for found in inputs:
            leaves, structure = tree_flatten(((found.input, *found.args), dict(found.kwargs)))
            for place, leaf in enumerate(leaves[:3]):
                if _is_hidden(leaf):
                    yield Sample(operator.op, tuple(leaves), structure, place)
    except Exception:  # of samples that need what is not installed
        return


def _is_hidden(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and leaf.dtype == torch.float64
        and leaf.dim() > 0
        and 1 < leaf.numel() <= MOST_ELEMENTS
        and leaf.shape[0] > 1
    )


def _harmless(sample: Sample) -> Iterator[Sample]:
    """Samples with arguments that are more likely to leave samples in place."""
    for place, leaf in enumerate(sample.leaves):
        if place != sample.place:
            for other in _neutral(leaf):
                yield sample.replaced(place, other)


def _others(sample: Sample) -> Iterator[Sample]:
    """Samples with other arguments of the same kinds."""
    for place, leaf in enumerate(sample.leaves):
        if place != sample.place:
            for other in _different(leaf):
                yield sample.replaced(place, other)
    yield from _reordered(sample)


def _reordered(sample: Sample) -> Iterator[Sample]:
    """Samples with numbers in another order, as in tuples of dimensions."""
    places = [place for place, leaf in enumerate(sample.leaves) if type(leaf) is int]
    if len(places) > 1:
        changed = sample
        for place, other in zip(places, reversed(places), strict=True):
            changed = changed.replaced(place, sample.leaves[other])
        yield changed


def _neutral(leaf: Any) -> Iterator[Any]:
    if type(leaf) is bool:
        yield False
    elif type(leaf) is int:
        yield from (-1, 0)
    elif type(leaf) is float:
        yield from (0.0, 1.0)
    elif isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
        yield from _neutral_tensors(leaf)


def _neutral_tensors(leaf: Tensor) -> Iterator[Tensor]:
    if leaf.dtype == torch.bool:
        yield torch.ones_like(leaf)
    elif leaf.is_floating_point():
        yield torch.zeros_like(leaf)
        if leaf.dim() > 1 and leaf.shape[-1] == leaf.shape[-2]:
            yield torch.eye(leaf.shape[-1]).to(leaf).expand(leaf.shape).clone()
    elif not leaf.is_complex() and leaf.dim():
        yield leaf.sort(0)[0]
        for dim in range(leaf.dim()):
            shape = [1] * leaf.dim()
            shape[dim] = -1
            places = torch.arange(leaf.shape[dim]).to(leaf).view(shape)
            yield places.expand(leaf.shape).clone()


def _different(leaf: Any) -> Iterator[Any]:
    if type(leaf) is bool:
        yield not leaf
    elif type(leaf) is int:
        yield from (1, leaf + 1, -2)
    elif type(leaf) is float:
        yield 0.5 if leaf != 0.5 else 0.25
    elif isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.dim():
        yield leaf.flip(0)
        if leaf.dim() > 1:
            yield leaf.flip(1)
        if leaf.dtype == torch.bool:
            yield ~leaf


def _works(sample: Sample) -> bool:
    """Whether PyTorch carries it out, with finite gradients."""
    h = sample.hidden.detach().clone().requires_grad_()
    torch.default_generator.manual_seed(0)
    try:
        results = differentiable(sample.apply(h * 1, sample.argument()))
        if not results or max(y.numel() for y in results) > 4 * MOST_ELEMENTS:
            return False
        total = sum((y.sum() for y in results), start=torch.zeros(()))
        (gradient,) = torch.autograd.grad(total, h)
        return bool(gradient.to_dense().isfinite().all())
    except Exception:  # whatever PyTorch has against these arguments
        return False
