"""Parts of a Jacobian: the rows from one backward pass, alone and together with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from autogram._blocks import (
    Columns,
    Rows,
    Subset,
    bundled,
    gram_of_bundle,
    in_numbers_of,
    in_places,
    side_by_side,
    weighted_sums,
)
from autogram._capture.backward.run import Run
from autogram._capture.backward.witness import Witness
from autogram._capture.samples.objectives import Objectives
from autogram._jacobian.crossings import Crossings, for_crossing
from autogram._weights import weights_of
from autogram.errors import InvalidOperandError


@dataclass(frozen=True)
class JacobianPart:
    """The rows of J for the losses of one backward pass."""

    objectives: Objectives  # without the graph of the losses
    columns: Mapping[Tensor, Columns]  # of each parameter that the losses reach
    witness: Witness | None = None  # if the pass was verified
    place: torch.device | None = None  # of all factors, or each is where its parameter is
    crossings: Crossings = field(default_factory=Crossings)  # what is kept for further products

    @classmethod
    def of(cls, run: Run, names: Iterable[Tensor]) -> JacobianPart:
        """The rows for some parameters, in their order, without the graph of the losses."""
        losses, batch_dim = run.objectives.losses.detach(), run.objectives.batch_dim
        columns = run.columns
        if not isinstance(columns, Rows):
            columns = {p: of for p in names if (of := columns.get(p)) is not None}
        crossings = Crossings(can_keep=run.form != "factors")
        return cls(Objectives(losses, batch_dim), columns, run.witness, crossings=crossings)

    @property
    def m(self) -> int:
        """The number of objectives."""
        return self.objectives.losses.numel()

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the rows."""
        if isinstance(self.columns, Rows):
            return [self.columns.dtype]
        return [x for columns in self.columns.values() if (x := columns.dtype) is not None]

    def per_objective(
        self, function: Callable[[Tensor, Columns], Tensor | None], dtype: torch.dtype
    ) -> Tensor:
        """The sum over parameters of a number for each objective, ``(m,)``.

        The function returns ``(k, b)`` for a parameter and its columns, or ``None`` for zeros.
        """
        losses = self.objectives.losses
        shape = self.objectives.per_sample, self.objectives.samples
        total = torch.zeros(shape, dtype=dtype, device=losses.device)
        for parameter, columns in self.columns.items():
            _add(total, function(parameter, columns))
        return self.objectives.in_order(total.flatten(), 0)

    def rows(self, parameter: Tensor, index: Tensor) -> Tensor | None:
        """The rows of some objectives, ``(index, *parameter)``, or ``None`` where all are zero."""
        columns = self.columns.get(parameter)
        if columns is None or not len(index):
            return None
        numbers = self.objectives.in_order(torch.arange(self.m, device="cpu"), 0)
        among = numbers[index]  # (k, b), flattened
        samples, b = torch.unique(among % self.objectives.samples, return_inverse=True)
        rows = columns.rows(samples.to(self.place or parameter.device))
        if rows is None:
            return None
        return in_numbers_of(parameter, rows[among // self.objectives.samples, b])


class MergedParts:
    """Parts with equally many objectives per sample, whose samples are merged.

    The blocks of a group equal those from one backward pass of all samples: rows
    are formed once, and a product of all samples is one product. Each part is ``numbered`` by its
    first objective among those of all parts.
    """

    def __init__(self, numbered: Sequence[tuple[int, JacobianPart]]) -> None:
        self._numbered = numbered
        self._parts = parts = [part for _, part in numbered]
        self.per_sample = parts[0].objectives.per_sample
        self.samples = sum(part.objectives.samples for part in parts)

    def columns(self, parameter: Tensor, other: MergedParts | None = None) -> Columns | None:
        """The columns of a parameter, of all samples, or ``None`` where all are zero.

        The columns of several parts are a copy: drop it after the product. For a
        product with another group, they may be rows from an earlier product.
        """
        columns_of_parts = [part.columns.get(parameter) for part in self._parts]
        if other is not None and (like := other.columns_of_one(parameter)) is not None:
            pairs = zip(self._parts, columns_of_parts, strict=True)
            there = [(part.crossings, columns) for part, columns in pairs if columns is not None]
            crossing = iter(for_crossing(parameter, there, like))
            columns_of_parts = [
                None if columns is None else next(crossing) for columns in columns_of_parts
            ]
        if len(columns_of_parts) == 1:
            return columns_of_parts[0]
        placed, end = [], 0
        for part, columns in zip(self._parts, columns_of_parts, strict=True):
            start, end = end, end + part.objectives.samples
            if columns is not None:
                placed.append((columns, Subset(tuple(range(start, end)), self.samples)))
        return side_by_side(placed) if placed else None

    def columns_of_one(self, parameter: Tensor) -> Columns | None:
        """The columns of a parameter in one of the parts that have any."""
        columns_of_parts = (part.columns.get(parameter) for part in self._parts)
        return next((columns for columns in columns_of_parts if columns is not None), None)

    def numbers(self) -> Tensor:
        """The number of each objective among those of all parts, by ``(k, b)``, flattened."""
        numbers = [part.objectives.numbers(start) for start, part in self._numbered]
        return torch.cat(numbers, 1).flatten()

    def add_products(self, total: Tensor, other: MergedParts, parameters: Iterable[Tensor]) -> None:
        """Adds inner products with the rows of a group, or with its own, to ``(K B, K' B')``."""
        if other is self:
            columns_of_parameters = (self.columns(parameter) for parameter in parameters)
            for bundle in bundled(
                columns for columns in columns_of_parameters if columns is not None
            ):
                _add(total, gram_of_bundle(bundle))
            return
        for parameter in parameters:
            first, second = self.columns(parameter, other), other.columns(parameter, self)
            if first is not None and second is not None:
                _add(total, first.cross_gram(in_places(second, first.parameter)))


class Parts:
    """At least one part of a Jacobian: objectives are in the order of the parts."""

    def __init__(self, parts: Sequence[JacobianPart]) -> None:
        self.each = tuple(parts)
        self.sizes = [part.m for part in parts]
        starts = accumulate(self.sizes[:-1], initial=0)
        self._numbered = list(zip(starts, self.each, strict=True))

    @property
    def place(self) -> torch.device | None:
        """The device of all factors, or ``None`` if each is on that of its parameter."""
        return self.each[0].place

    def check_place(self, other: Parts) -> None:
        """Refuses parts whose factors were moved elsewhere."""
        if self.place != other.place:
            raise InvalidOperandError(
                "The factors of two Jacobians are on different devices. Pass a moved "
                "Jacobian: `first.cross_gramian(second.to(first.device))`."
            )

    @cached_property
    def witness(self) -> Witness | None:
        """The witness for products, if some parts were verified."""
        return Witness.together([(part.witness, part.m) for part in self.each])

    def per_objective(
        self, function: Callable[[Tensor, Columns], Tensor | None], dtype: torch.dtype
    ) -> Tensor:
        """The sum over parameters of a number for each objective, ``(m,)``."""
        values = [part.per_objective(function, dtype) for part in self.each]
        device = self.each[0].objectives.losses.device
        return torch.cat([x.to(device) for x in values]) if len(values) > 1 else values[0]

    def square_norms(self, parameters: Mapping[Tensor, str], dtype: torch.dtype) -> Tensor:
        """The squared norms of the rows, in the columns of some parameters, ``(m,)``."""

        def norms(parameter: Tensor, columns: Columns) -> Tensor | None:
            return columns.square_norms() if parameter in parameters else None

        return self.per_objective(norms, dtype)

    def directional(self, direction: Mapping[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """J v, ``(m,)``, for a direction in real numbers, which is zero where it has no tensor."""

        def along(parameter: Tensor, columns: Columns) -> Tensor | None:
            v = direction.get(parameter)
            return None if v is None else columns.directional(v.to(self.place or parameter.device))

        return self.per_objective(along, dtype)

    def check_gramian(self, gramian: Tensor | Literal[0]) -> None:
        """Compares J Jᵀ with the witness if there is one."""
        if (witness := self.witness) is not None and isinstance(gramian, Tensor):
            witness.check_gramian(gramian)

    def check_sums(
        self,
        product: str,
        sums: Mapping[Tensor, Tensor | None],
        w: Tensor,
        dtype: torch.dtype,
        *,
        are_rows: bool = False,
    ) -> None:
        """Compares Jᵀ w with the witness if there is one, or rows of J whose numbers are given."""
        if (witness := self.witness) is not None:
            image = partial(self.directional, witness.gradients, dtype)
            weights = w if are_rows else w.detach().reshape(-1, sum(self.sizes))
            witness.check_sums(product, sums, weights, image)

    def check_sums_by_group(
        self,
        product: str,
        sums: Mapping[Tensor, Tensor | None],
        groups: Sequence[tuple[Mapping[Tensor, str], Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """Compares Jᵀ w with the witness if there is one, where groups have weights each."""
        if (witness := self.witness) is not None:
            image = partial(self.directional, dtype=dtype)
            flat = [(parameters, w.detach().reshape(-1)) for parameters, w in groups]
            witness.check_sums_by_group(product, sums, flat, image)

    @cached_property
    def groups(self) -> list[MergedParts]:
        """Parts by the number of objectives per sample."""
        kinds: dict[int, list[tuple[int, JacobianPart]]] = {}
        for start, part in self._numbered:
            kinds.setdefault(part.objectives.per_sample, []).append((start, part))
        return [MergedParts(kind) for kind in kinds.values()]

    def products(self, other: Parts, parameters: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """Inner products of the rows with those of other parts, or of the same, ``(m, m')``."""
        parameters, device = list(parameters), self.each[0].objectives.losses.device
        rows: list[list[Tensor]] = []
        for i, first in enumerate(self.groups):
            row = [found[i].T for found in rows] if other is self else []
            for second in other.groups[len(row) :]:
                shape = first.per_sample * first.samples, second.per_sample * second.samples
                row.append(torch.zeros(shape, dtype=dtype, device=device))
                first.add_products(row[-1], second, parameters)
            rows.append(row)
        if other is not self:
            for part in (*self.each, *other.each):
                part.crossings.is_due = True
        is_one = len(rows) == len(rows[0]) == 1
        whole = rows[0][0] if is_one else torch.cat([torch.cat(row, 1) for row in rows])
        return other.in_order(self.in_order(whole, 0), 1)

    def weights_of(self, w: Tensor, *, can_be_stack: bool = False) -> list[Tensor]:
        """Weights of all objectives as ``(k, b)`` or ``(s, k, b)``, part by part."""
        if len(self.each) == 1:
            return [weights_of(w, self.each[0].objectives, can_be_stack=can_be_stack)]
        flat = Objectives(torch.empty(sum(self.sizes), device="meta"), None)
        weights = weights_of(w, flat, can_be_stack=can_be_stack).squeeze(-1)
        pairs = zip(self.each, weights.split(self.sizes, -1), strict=True)
        return [
            part.objectives.by_sample(x.reshape(x.shape[:-1] + part.objectives.losses.shape))
            for part, x in pairs
        ]

    def weighted_sums(
        self, weights: Sequence[Tensor], among: Mapping[Tensor, str] | None = None
    ) -> dict[Tensor, Tensor | None]:
        """Jᵀ w of each parameter on which an objective depends, or ``None`` if it is zero.

        Only parameters ``among`` the given ones count, if there are any.
        """
        totals: dict[Tensor, Tensor | None] = {}
        for part, w in zip(self.each, weights, strict=True):
            columns = part.columns
            if among is not None:
                columns = {p: x for p, x in columns.items() if p in among}
            for parameter, gradient in weighted_sums(columns, w, self.place).items():
                if gradient is not None:
                    gradient = in_numbers_of(parameter, gradient)
                total = totals.get(parameter)
                if total is None:
                    totals[parameter] = gradient
                elif gradient is not None:
                    total += gradient
        return totals

    def put_rows(self, rows: Tensor, parameter: Tensor, index: Tensor) -> None:
        """Writes the rows of some objectives; zero rows are not written."""
        for start, part in self._numbered:
            (among,) = torch.nonzero((index >= start) & (index < start + part.m), as_tuple=True)
            rows_of_part = part.rows(parameter, index[among] - start)
            if rows_of_part is not None:
                rows[among] = rows_of_part.to(rows)

    def in_order(self, values: Tensor, *dims: int) -> Tensor:
        """Values along some dimensions in the order of the losses, which come group by group."""
        if len(self.each) == 1:
            return self.each[0].objectives.in_order(values, *dims)
        order = torch.cat([group.numbers() for group in self.groups]).argsort().to(values.device)
        for dim in dims:
            values = values.index_select(dim, order)
        return values


def _add(total: Tensor, part: Tensor | None) -> None:
    """Adds a parameter's contribution, on the device of the losses."""
    if part is not None:
        total += part.to(total.device).reshape(total.shape)


def zeros_for(
    parameter: Tensor,
    first: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Zeros for gradients of a parameter, real or complex like it, on a device or its own."""
    shape = (*first, *parameter.shape)
    return parameter.new_zeros(shape, dtype=dtype_for(parameter, dtype), device=device)


def dtype_for(parameter: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of results for a parameter: complex if the parameter is."""
    return dtype.to_complex() if parameter.is_complex() else dtype
