"""Sketches: rows of J in a few random dimensions, for thousands of samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from autogram._arguments import is_integer
from autogram._blocks import Columns, Projection, projected
from autogram._capture.autograd.exact import exact
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram.errors import InvalidOperandError, InvalidOptionError


@dataclass(frozen=True, eq=False)
class Sketch:
    """Random projections S of the rows of J to d dimensions, with E[S Sᵀ] = J Jᵀ over the seeds.

    :meth:`autogram.Engine.sketch` makes a sketch. Sketches with equal seed and d use the same
    projection, on every process and for every micro-batch, so you may concatenate their rows:
    ``Sketch(torch.cat([first.rows, second.rows]), seed=first.seed)``.

    Attributes:
        rows: S, ``(m, d)``, in the row-major order of the losses, detached, at least float32.
        seed: The seed of the random projection.
    """

    rows: Tensor
    seed: int

    @property
    def dimensions(self) -> int:
        """The number d of dimensions."""
        return self.rows.shape[1]

    def gramian(self) -> Tensor:
        """S Sᵀ, an unbiased estimate of the Gramian, ``(m, m)``, symmetric, of rank at most d.

        Costs m² d multiplications, whatever the size of the model.
        """
        return self._products(self)

    def cross_gramian(self, other: Sketch) -> Tensor:
        """Estimates of the inner products with the rows of another sketch, ``(m, m')``.

        Args:
            other: A sketch for the same parameters, of any losses.

        Raises:
            InvalidOperandError: It has another seed or other dimensions, or is not a sketch.
        """
        given: object = other
        if not isinstance(given, Sketch):
            raise InvalidOperandError(
                f"A {type(given).__name__} was given where a sketch is needed. Pass a result of "
                "`engine.sketch`."
            )
        if (self.seed, self.dimensions) != (other.seed, other.dimensions):
            raise InvalidOperandError(
                f"A sketch of {self.dimensions} dimensions with seed {self.seed} cannot be "
                f"multiplied with one of {other.dimensions} with seed {other.seed}: they are "
                "different projections. Pass equal `dimensions` and `seed` for both."
            )
        return self._products(other)

    def standard_error(self) -> Tensor:
        """An upper estimate of the standard error of each entry of the Gramian, ``(m, m)``.

        sqrt(3 (G_ii G_jj + G_ij²) / d), with G from the sketch itself, as derived in
        `docs/sketches.md`. If rows are sums of many outer products, the error is smaller, by a
        factor of up to the root of 3.
        """
        gramian = self.gramian()
        norms = gramian.diagonal()
        variance = torch.outer(norms, norms) + gramian.square()
        return (variance * (3 / self.dimensions)).sqrt()

    def _products(self, other: Sketch) -> Tensor:
        """Inner products of rows, outside autocast, which would round their sums."""
        with exact(self.rows.device):
            return self.rows @ other.rows.T


@dataclass(eq=False)
class Sketching:
    """Adds up the projections of the parameters' columns, which a pass gives one by one."""

    channel: Channel
    dimensions: int
    seed: int
    _objectives: Objectives | None = None
    _total: Tensor | None = None

    def __post_init__(self) -> None:
        if not (is_integer(self.dimensions) and is_integer(self.seed)) or self.dimensions < 1:
            raise InvalidOptionError(
                f"A sketch of {self.dimensions!r} dimensions with seed {self.seed!r} was "
                "requested. Pass integers, and at least one dimension."
            )
        self.dimensions, self.seed = int(self.dimensions), int(self.seed)

    def restart(self, objectives: Objectives) -> None:
        """Begins a pass."""
        self._objectives = objectives
        self._names = self.channel.parameters()
        self._taken: dict[str, int] = {}
        self._total = None

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Adds the projection of the columns of one parameter."""
        assert self._objectives is not None
        if parameter not in self._names:  # newer than all live graphs
            self._names = self.channel.parameters([parameter])
        name = self._names.get(parameter, "")
        # Tensors by which `functional_call` replaced the parameter have the same name.
        number = self._taken.get(name, 0)
        seed = _seed_of(f"{self.seed}/{name}#{number}")
        projection = Projection(columns.parameter, self.dimensions, seed, parameter.device)
        objectives = self._objectives
        part = projected(columns, projection, objectives.per_sample, objectives.samples)
        self._taken[name] = number + 1
        if part is not None:
            total = self._total
            self._total = part if total is None else total + part.to(total.device)

    def rows(self, objectives: Objectives) -> Tensor:
        """The projections of all rows, ``(m, d)``."""
        losses, total = objectives.losses, self._total
        if total is None:
            dtype = torch.promote_types(losses.dtype, torch.float32)
            return losses.new_zeros(losses.numel(), self.dimensions, dtype=dtype)
        return objectives.in_order(total.to(losses.device).flatten(0, 1), 0).detach()


def _seed_of(text: str) -> int:
    """A seed that is equal in every process, and different for any other text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
