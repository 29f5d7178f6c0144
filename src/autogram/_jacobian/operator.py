"""The Jacobian written like a matrix: ``J @ v``, ``J.T @ w``, ``w @ J``, ``J[i]``, ``len(J)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import NoneType
from typing import Any, Self

import torch
from torch import Tensor

from autogram._arguments import Direction, check_selection
from autogram._blocks import as_real, in_numbers_of
from autogram._weights import check_numbers
from autogram.errors import InvalidOperandError


class Operator(ABC):
    """An ``(r, c)`` matrix that is defined by its products."""

    __array_ufunc__ = None  # an array on the left leaves the product to `__rmatmul__`

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...
    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...
    @property
    @abstractmethod
    def device(self) -> torch.device: ...
    @abstractmethod
    def _times(self, columns: Tensor) -> Tensor:
        """The product with a matrix of columns, ``(c, s)`` to ``(r, s)``."""

    @abstractmethod
    def _transposed_times(self, columns: Tensor) -> Tensor:
        """The product of the transposed operator with columns, ``(r, s)`` to ``(c, s)``."""

    def _product(self, operand: Any) -> Tensor:
        """The product with a vector or a matrix on the right."""
        columns = self.shape[1]
        self._check(operand, columns, 0, "right", f"({columns}, c)")
        if operand.dim() == 1:
            return self._times(operand.unsqueeze(1)).squeeze(1)
        return self._times(operand)

    def __rmatmul__(self, operand: Any) -> Tensor:
        """``w @ self``: a linear combination of the rows, or several, one in each row of ``w``."""
        rows = self.shape[0]
        self._check(operand, rows, -1, "left", f"(c, {rows})")
        if operand.dim() == 1:
            return self._transposed_times(operand.unsqueeze(1)).squeeze(1)
        return self._transposed_times(operand.mT).mT

    def _check(self, operand: Any, size: int, dim: int, side: str, stack: str) -> None:
        """Refuses anything but a vector of some size, or a matrix with this size in ``dim``."""
        if not isinstance(operand, Tensor):
            raise InvalidOperandError(
                f"An operand of `@` is a {type(operand).__name__}. Pass a flat tensor, in which "
                "the parameters follow each other in the order of `names`. For tensors by name, "
                "use the methods `jvp` and `vjp`."
            )
        check_numbers(operand, "An operand of `@`")
        if operand.dim() not in (1, 2) or operand.shape[dim] != size:
            raise InvalidOperandError(
                f"The operator is {self.shape[0]} x {self.shape[1]}, but a tensor of shape "
                f"{tuple(operand.shape)} is on its {side}. Pass `({size},)` or `{stack}`."
            )


class MatrixForm(Operator):
    """The Jacobian as an ``(m, n)`` matrix, from its methods."""

    _names: dict[Tensor, str]

    @abstractmethod
    def gramian(self) -> Tensor: ...
    @abstractmethod
    def cross_gramian(self, other: Any) -> Tensor: ...
    @abstractmethod
    def jvp(self, direction: Direction) -> Tensor: ...
    @abstractmethod
    def vjp(self, w: Tensor) -> dict[str, Tensor]: ...
    @abstractmethod
    def rows(self, objectives: slice | Tensor) -> dict[str, Tensor]: ...
    @abstractmethod
    def _at(self, device: torch.device) -> Self:
        """The Jacobian on a device, which may be this one."""

    def __len__(self) -> int:
        """The number m of rows."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        """A row ``(n,)`` for an integer; rows ``(k, n)`` for a slice, a list or a mask.

        Costs :meth:`rows`.

        Args:
            index: An integer, a slice, or a list, an array or a tensor of integers or booleans.

        Raises:
            IndexError: There is no such row.
            InvalidOperandError: The index does not choose rows only.
        """
        check_selection(index, None)
        chosen = None
        if not isinstance(index, (tuple, NoneType)):
            numbers = torch.arange(len(self), device="cpu")
            chosen = numbers[index.cpu() if isinstance(index, Tensor) else index]
        if chosen is None or chosen.dim() > 1:
            raise InvalidOperandError(
                f"The index {index!r} does not choose rows only. Pass a number, a slice, a list or "
                "a mask `(m,)`, and take columns of the result: `jacobian[i][j]`."
            )
        rows = self._flat(self.rows(chosen).values(), len(chosen) if chosen.dim() else 1)
        return rows if chosen.dim() else rows[0]

    @property
    def T(self) -> TransposedJacobian:
        """Jᵀ, ``(n, m)``, a view for ``J.T @ w``, ``J1 @ J2.T`` and ``v @ J.T``."""
        return TransposedJacobian(self)

    def __matmul__(self, operand: Any) -> Tensor:
        """J v for a flat vector, ``(n,)`` to ``(m,)``, or for columns, ``(n, c)`` to ``(m, c)``.

        Each column costs :meth:`jvp`. The parameters follow each other in the order of
        :attr:`names`, as in :meth:`dense`. ``J @ J.T`` is :meth:`gramian`, and ``J1 @ J2.T`` is
        :meth:`cross_gramian`.

        Raises:
            InvalidOperandError: The operand has another size, or is not a tensor.
        """
        if isinstance(operand, TransposedJacobian):
            return self.gramian() if operand.T is self else self.cross_gramian(operand.T)
        if isinstance(operand, MatrixForm):
            raise InvalidOperandError(
                "Both operands of `@` are Jacobians, with one row for each objective. "
                "Write `jacobian @ other.T` for inner products of the rows."
            )
        return self._product(operand)

    def dense(self) -> Tensor:
        """J itself, ``(m, n)``, with each parameter's columns in row-major order."""
        return self._flat(self.rows(slice(None)).values(), len(self))

    def to(self, device: torch.device | str) -> Self:
        """The Jacobian with copies of all factors on a device, or itself if they are there.

        Results of products are on that device, whatever the device of a vector. The copies stay
        correct when an optimizer changes the parameters. :meth:`accumulate_grad` still adds to
        ``.grad`` on the parameters' devices.

        Raises:
            InvalidOperandError: The device is ``meta``, where tensors have no values.
        """
        place = torch.empty(0, device=device).device  # with its number, as tensors have it
        if place.type == "meta":
            raise InvalidOperandError(
                "The device is `meta`, where tensors have no values. Pass a real device."
            )
        return self._at(place)

    def _flat(self, gradients: Iterable[Tensor], count: int) -> Tensor:
        """Stacks of gradients of all parameters as one matrix, ``(count, n)``."""
        pairs = zip(self._names, gradients, strict=True)
        flat = [as_real(gradient).reshape(count, as_real(p).numel()) for p, gradient in pairs]
        return torch.cat([x.to(self.device, self.dtype) for x in flat], 1)

    def _times(self, columns: Tensor) -> Tensor:
        """J V, column by column."""
        products = self._zeros(len(self), columns)
        sizes = [as_real(p).numel() for p in self._names]
        for i, column in enumerate(columns.to(self.dtype).unbind(1)):
            parts = zip(self._names, column.split(sizes), strict=True)
            real = [(p, part.reshape(as_real(p).shape)) for p, part in parts]
            products[:, i] = self.jvp([in_numbers_of(p, part) for p, part in real])
        return products

    def _transposed_times(self, columns: Tensor) -> Tensor:
        """Jᵀ W, all columns at once. One column as a stack could have the shape of the losses."""
        m, count = columns.shape
        if m and count > 1:
            return self._flat(self.vjp(columns.mT).values(), count).mT
        sums = self._zeros(self.shape[1], columns)
        for i, column in enumerate(columns.unbind(1)):
            sums[:, i] = self._flat(self.vjp(column).values(), 1)[0]
        return sums

    def _zeros(self, rows: int, columns: Tensor) -> Tensor:
        """Zeros for a product with some columns."""
        shape = rows, columns.shape[1]
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class TransposedJacobian(Operator):
    """Jᵀ, a view of a Jacobian: ``jacobian.T``.

    Attributes:
        T: The Jacobian.
    """

    def __init__(self, jacobian: MatrixForm) -> None:
        self.T = jacobian

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of parameters and of objectives, n and m."""
        m, n = self.T.shape
        return n, m

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the results."""
        return self.T.dtype

    @property
    def device(self) -> torch.device:
        """The device of the results."""
        return self.T.device

    def __repr__(self) -> str:
        return f"{self.T!r}.T"

    def __matmul__(self, operand: Any) -> Tensor:
        """Jᵀ w for weights of the objectives, ``(m,)`` to ``(n,)``, or columns of them.

        All columns together cost :meth:`autogram.Jacobian.vjp` of a stack.

        Raises:
            InvalidOperandError: The operand has another size, or is not a tensor.
        """
        if isinstance(operand, MatrixForm):
            n, _ = self.shape
            raise InvalidOperandError(
                f"The matrix `J.T @ J` would be {n} x {n}, and is not formed. Write its products "
                "with vectors as `J.T @ (J @ v)`."
            )
        return self._product(operand)

    def _times(self, columns: Tensor) -> Tensor:
        return self.T._transposed_times(columns)

    def _transposed_times(self, columns: Tensor) -> Tensor:
        return self.T._times(columns)


def check_jacobian(other: object) -> None:
    """Refuses anything but a Jacobian."""
    if not isinstance(other, MatrixForm):
        raise InvalidOperandError(
            f"A {type(other).__name__} was given where a Jacobian is needed. Pass a result of "
            "`engine.jacobian`."
        )
