"""Scenarios: small models with an operator inside of them, or among their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.hunt.pairs import Pair, Passing, differentiable, tensors_of, with_tensors
from tests.unit.checks import features, irregular

WIDTH = 3  # of the inputs

# Which dimension of each result of an operator the losses run along, and which linear map follows.
Placement = tuple[int | None, ...]


@dataclass(frozen=True)
class Step:
    """What is given to a step: for each forward pass, the number of an argument; and the data."""

    arguments: tuple[int, ...]
    data: int


class Program(nn.Module):
    """Linear, operator, linear; or two linear layers, where the operator is among the losses.

    Args:
        pair: The operator and its arguments.
        passing: How tensors in arguments come into the forward pass.
        widths: The numbers of features of the operator's results, or ``None`` for those of which
            each element goes through the linear map on its own. No widths, no second linear map.
    """

    def __init__(self, pair: Pair, passing: Passing, widths: Sequence[int | None] = ()) -> None:
        super().__init__()
        self.pair = pair
        self.passing = passing
        self.held: Any = None
        last = pair.shape[-1] if len(pair.shape) > 1 else 1
        self.first = nn.Linear(WIDTH, last)
        self.widths = tuple(widths)
        self.ends = nn.ModuleList([nn.Linear(width or 1, 2) for width in widths])
        self.second = nn.Identity() if widths else nn.Linear(last, last)

    def call(self, x: Tensor, argument: Any) -> Any:
        """The module, called with an argument."""
        self.held = argument
        if self.passing == "given":
            return self(x, *tensors_of(argument))
        return self(x)

    def hidden(self, x: Tensor) -> Tensor:
        """The activations before the operator."""
        h = self.second(self.first(x).tanh()).reshape(self.pair.shape)
        return h if self.pair.base is None else self.pair.base + 0.05 * h

    def forward(self, x: Tensor, *tensors: Tensor) -> Any:
        h = self.hidden(x)
        if not self.widths:
            return h
        results = apply(self.pair, h, self.argument(tensors))
        ends = zip(results, self.widths, self.ends, strict=False)
        return [end(y.unsqueeze(-1) if width is None else y).tanh() for y, width, end in ends]

    def argument(self, tensors: tuple[Tensor, ...] = ()) -> Any:
        """The argument of this forward pass."""
        if self.passing == "given" and tensors:
            return with_tensors(self.held, tensors)
        if self.passing == "made":
            return with_tensors(self.held, [x.clone() for x in tensors_of(self.held)])
        return self.held


def apply(pair: Pair, h: Tensor, argument: Any) -> list[Tensor]:
    """The results of the operator that depend on the activations."""
    results = differentiable(pair.apply(h, argument))
    if not results:
        raise ValueError("no gradient")
    return [y.reshape(1) if y.dim() == 0 else y for y in results]


def inputs(pair: Pair, data: int) -> Tensor:
    """What a program is called with; two data sets have other numbers in one shape."""
    leading = pair.shape[:-1] if len(pair.shape) > 1 else pair.shape
    return (irregular(*leading, WIDTH) * (1.7 if data else 1) + 0.3 * data).sin()


def parted(y: Tensor, dim: int | None, per_sample: int) -> Tensor:
    """Losses along a dimension, or of all elements mixed: ``(m,)`` or ``(m, K)``."""
    rows = irregular(4, y.numel()) @ y.flatten() if dim is None else y.movedim(dim, 0)
    losses = features(rows.unsqueeze(1) if rows.dim() == 1 else rows, per_sample)
    return losses if per_sample > 1 else losses.squeeze(1)


def owners(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """Which positions of the inputs the entries of a result along a dimension read."""
    weights = irregular(y.numel()).view(y.shape) + 2
    read = []
    for part in (y * weights).unbind(dim):
        (gradient,) = torch.autograd.grad(part.sum(), x, retain_graph=True)
        read.append((gradient != 0).any(-1).flatten())
    return torch.stack(read)


def dimension(y: Tensor, x: Tensor, preferred: int) -> int | None:
    """The dimension of a result along which each entry reads positions of its own, if any."""
    order = sorted(range(y.dim()), key=lambda dim: dim != preferred)
    sizes = [dim for dim in order if 1 < y.shape[dim] <= 12]
    for dim in sizes:
        if owners(y, x, dim).sum(0).max() <= 1:
            return dim
    return sizes[0] if sizes else None


class Scenario:
    """Modules, and the losses of a step.

    Args:
        pair: The operator and its arguments.
        place: Where the operator is: in the ``"model"``, in the ``"tail"`` behind it, behind one of
            two ``"towers"``, or in a model that is called ``"twice"``, with arguments of its own.
        samples: The dimension of the results along which the losses run where several can be.
        passing: How tensors in arguments come into the forward pass.
        per_sample: The number of losses for each sample.

    Raises:
        Exception: The pair cannot be carried out, or gives no gradient.
    """

    def __init__(
        self, pair: Pair, place: str, samples: int, passing: Passing, per_sample: int
    ) -> None:
        self.pair, self.place, self.per_sample = pair, place, per_sample
        torch.default_generator.manual_seed(0)
        self._shapes: list[list[tuple[int, ...]]] = []
        self._placements = [self._placement(argument, samples) for argument in pair.arguments]
        widths = self._widths() if place in ("model", "twice") else ()
        self.program = Program(pair, passing, widths)
        self.modules: list[nn.Module] = [self.program]
        if place == "towers":
            self.other = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 4))
            self.modules.append(self.other)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all modules."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    def series(self) -> list[Step]:
        """Back and forth between the arguments, and between two data sets."""
        count = len(self.pair.arguments)
        order = [0, 0, 1, 0, 1, 1, 0] if count == 2 else [0, 0, *range(1, count), 0, 1]
        data = [0, 1, 0, 0, 1, 0, 1]
        if self.place == "twice":
            other = [0, 0, 0, 1, 1, 0, 1]
            return [Step((i, other[k % 7] * (count - 1)), data[k % 7]) for k, i in enumerate(order)]
        return [Step((i,), data[k % 7]) for k, i in enumerate(order)]

    def losses(self, step: Step, scale: float = 1.0) -> Tensor:
        """The losses of a step, of inputs that are scaled."""
        torch.default_generator.manual_seed(step.data)
        x = inputs(self.pair, step.data) * scale
        if self.place == "twice":
            first, second = (
                self._losses(x if k == 0 else x.cos(), i) for k, i in enumerate(step.arguments)
            )
            return first * second
        losses = self._losses(x, step.arguments[0])
        if self.place == "towers":
            y = self.other(irregular(len(losses), WIDTH) + step.data)
            return losses * features(y, self.per_sample).view_as(losses)
        return losses

    def _losses(self, x: Tensor, number: int) -> Tensor:
        argument = self.pair.arguments[number]
        if self.program.widths:
            results = self.program.call(x, argument)
        else:
            h = self.program.call(x, argument)
            results = apply(self.pair, h, self.program.argument())
        kept = zip(results, self._placements[number], strict=True)
        losses = [parted(y, dim, self.per_sample) for y, dim in kept]
        return torch.stack([each for each in losses if each.shape == losses[0].shape]).sum(0)

    def _placement(self, argument: Any, samples: int) -> Placement:
        """Along which dimensions of the results losses run."""
        x = inputs(self.pair, 0).requires_grad_()
        results = apply(self.pair, Program(self.pair, "made").hidden(x), argument)
        self._shapes.append([tuple(y.shape) for y in results])
        return tuple(dimension(y, x, samples) for y in results)

    def _widths(self) -> list[int | None]:
        """Features of the results, where losses run along other dimensions for every argument."""
        widths: list[int | None] = []
        for place, shape in enumerate(max(self._shapes, key=len)):
            shapes = {found[place][-1:] for found in self._shapes if place < len(found)}
            dims = {found[place] for found in self._placements if place < len(found)}
            last = len(shape) - 1
            is_safe = last > 0 and len(shapes) == 1 and dims.isdisjoint({last, None})
            widths.append(shape[-1] if is_safe else None)
        return widths


def ways(pair: Pair, places: Sequence[str]) -> list[tuple[str, int, Passing]]:
    """The places, dimensions of the samples and ways of passing tensors that a pair has."""
    passings: list[Passing] = ["made", "given", "held"] if pair.has_tensors else ["made"]
    return [
        (place, samples, passing)
        for place in places
        for samples in ((0, 1) if len(pair.shape) > 2 else (0,))
        for passing in passings
        if passing != "given" or place in ("model", "twice")
    ]
