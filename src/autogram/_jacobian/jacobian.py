"""The Jacobian as an object: products with it, from the factors of its blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import NoReturn, overload

import torch
from torch import Tensor

from autogram._arguments import (
    Direction,
    Grouping,
    check_related,
    check_selection,
    direction_of,
    parameter_of,
)
from autogram._blocks import Limit, as_real
from autogram._capture.autograd.exact import exact
from autogram._capture.limit import retried_with_less
from autogram._jacobian.accumulating import Accumulating
from autogram._jacobian.groups import groups_of
from autogram._jacobian.moving import moved_parts
from autogram._jacobian.operator import check_jacobian
from autogram._jacobian.parts import JacobianPart, Parts, dtype_for, zeros_for
from autogram._jacobian.solve import check_damping, damped_solution
from autogram._weights import FiniteWeights
from autogram.errors import UnsupportedError


class Jacobian(Accumulating):
    """The Jacobian J of m objectives with respect to n parameters, as an implicit operator.

    :meth:`autogram.Engine.jacobian` makes a Jacobian. It holds factors instead of rows: for each
    call in the forward pass that read a parameter, the cotangent of the output and the input. Every
    method contracts factors, in the cheapest order, and in parts if an intermediate
    result would exceed the engine's memory limit. No method runs a backward pass or needs the
    graph. ``J @ v``, ``J.T @ w``, ``J[i]`` and ``len(J)`` work as with a matrix.

    RAM: the cotangents of all activations that were computed from parameters, times K for K
    objectives per sample. The inputs share their memory with the graph, and outlive it.
    For calls without a rule, and after derivations such as a matrix inverse, rows are kept.

    Rows are in the row-major order of the losses, and columns in the order of
    ``named_parameters``, each parameter flattened. A complex number has two columns, for its real
    and its imaginary part; gradients of its parameter are complex. Results are detached, and in the
    dtype of the parameters, at least float32. If no objective depends on a parameter, its columns
    are zero.

    Every method raises :class:`~autogram.errors.ChangedTensorError` if one of its factors was
    changed in place in the meantime, for instance by a step of the optimizer, and
    :class:`~autogram.errors.MemoryLimitError` if memory ran out, and again with an eighth of the
    limit.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import Engine
        >>> model = nn.Linear(3, 1)
        >>> engine = Engine(model)
        >>> losses = model(torch.randn(5, 3)).square().squeeze(1)
        >>> jacobian = engine.jacobian(losses)
        >>> jacobian.shape
        (5, 4)
        >>> clipped = 1 / jacobian.row_norms().clamp(min=1)
        >>> jacobian.accumulate_grad(clipped)  # per-sample gradient clipping
    """

    def __init__(
        self,
        parts: Sequence[JacobianPart],
        names: Mapping[Tensor, str],
        limit: Limit,
        finite: FiniteWeights,
        *,
        is_exchanged: bool = False,
    ) -> None:
        self._parts = Parts(parts)
        self._names = dict(names)
        self._limit = limit
        self._finite = finite
        self._is_exchanged = is_exchanged

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of objectives and of parameters, m and n."""
        return sum(self._parts.sizes), sum(as_real(p).numel() for p in self._names)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the results, which is that of the parameters, and at least float32."""
        dtypes = [dtype for part in self._parts.each for dtype in part.dtypes]
        losses = [part.objectives.losses.dtype for part in self._parts.each]
        return reduce(torch.promote_types, dtypes or [*losses, torch.float32])

    @property
    def device(self) -> torch.device:
        """The device of the losses, and of results with one entry for each objective."""
        return self._parts.each[0].objectives.losses.device

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of the columns."""
        return list(self._names.values())

    def __repr__(self) -> str:
        m, n = self.shape
        return (
            f"Jacobian({m} x {n}, {len(self._names)} parameters, dtype={self.dtype}, "
            f"device={str(self.device)!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "A Jacobian cannot be copied or pickled: it is made of tensors of one forward pass, "
            "and of the parameters of one model. Keep the results of its methods, such as "
            "`gramian()` or `rows(slice(None))`."
        )

    def _at(self, device: torch.device) -> Jacobian:
        if {self.device, *[self._parts.place or p.device for p in self._names]} == {device}:
            return self
        parts = moved_parts(self._parts, self._names, device, self._limit)
        exchanged = self._is_exchanged
        return Jacobian(parts, self._names, self._limit, self._finite, is_exchanged=exchanged)

    @retried_with_less
    def gramian(self) -> Tensor:
        """J Jᵀ, all inner products of the objectives' gradients, ``(m, m)``."""
        with exact(self.device):
            gramian = self._parts.products(self._parts, self._names, self.dtype)
            self._parts.check_gramian(gramian)
            return gramian

    @retried_with_less
    def block_gramians(self, by: Grouping | None = None) -> dict[str, Tensor]:
        """Gramians of groups of parameters, each ``(m, m)``, which add up to the whole.

        Args:
            by: A function from a parameter's name to its group, such as ``lambda name:
                name.split(".")[0]``; or ``optimizer.param_groups``, named by ``"name"`` or else
                number, which may lack parameters. By default, each parameter is its own group.

        Raises:
            InvalidOperandError: ``by`` is neither, or several groups have one name.
        """
        groups = groups_of(by, self._names)
        with exact(self.device):
            parts, dtype = self._parts, self.dtype
            gramians = {name: parts.products(parts, group, dtype) for name, group in groups.items()}
            if sum(map(len, groups.values())) == len(self._names):
                parts.check_gramian(sum(gramians.values()))
            return gramians

    @overload
    def row_norms(self, by: None = ...) -> Tensor: ...
    @overload
    def row_norms(self, by: Grouping) -> dict[str, Tensor]: ...
    @retried_with_less
    def row_norms(self, by: Grouping | None = None) -> Tensor | dict[str, Tensor]:
        """Euclidean norm of each objective's gradient, ``(m,)``, without the Gramian.

        Args:
            by: Groups of parameters, as for :meth:`block_gramians`; one group by default.

        Returns:
            The norms, or for each group the norms with respect to its parameters. The squares of
            all groups add up to those of the whole.

        Raises:
            InvalidOperandError: ``by`` is not a grouping, or several groups have one name.

        References:
            Goodfellow, Efficient Per-Example Gradient Computations, 2015, arXiv:1510.01799.
            Bu, Mao and Xu 2022, arXiv:2205.10683: from factors or rows, whichever is cheaper.
        """
        with exact(self.device):
            parts, dtype = self._parts, self.dtype
            if by is None:
                return parts.square_norms(self._names, dtype).sqrt()
            groups = groups_of(by, self._names)
            each = groups.items()
            return {name: parts.square_norms(group, dtype).sqrt() for name, group in each}

    @retried_with_less
    def vjp(self, w: Tensor) -> dict[str, Tensor]:
        """Jᵀ w, the gradient of the weighted sum of the objectives.

        Args:
            w: Weights of shape ``(m,)`` or of the losses' shape; or several vectors of weights,
                stacked along a first dimension.

        Returns:
            For each parameter's name, a tensor of the parameter's shape, preceded by the first
            dimension of ``w`` if ``w`` is a stack. Each vector costs as much as the weight
            gradients in a backward pass.

        Raises:
            InvalidOperandError: ``w`` has another shape.

        References:
            Bu, Wang, Zha and Karypis 2022, arXiv:2210.00038.
        """
        with exact(self.device):
            weights = self._parts.weights_of(w, can_be_stack=True)
            found = self._parts.weighted_sums(weights)
            shape, dtype = weights[0].shape[:-2], self.dtype
            gradients = {}
            for parameter, name in self._names.items():
                if (gradient := found.get(parameter)) is None:
                    gradient = zeros_for(parameter, shape, dtype, self._parts.place)
                gradients[name] = gradient.to(dtype_for(parameter, dtype))
            sums = dict(zip(self._names, gradients.values(), strict=True))
            self._parts.check_sums("Jᵀ w", sums, w, self.dtype)
            return gradients

    @retried_with_less
    def jvp(self, direction: Direction) -> Tensor:
        """J v, the derivatives of the objectives along a direction, ``(m,)``.

        Args:
            direction: A tensor of the parameter's shape for each parameter, by name or in the order
                of :attr:`names`. Missing names count as zeros.

        Raises:
            InvalidOperandError: A name is unknown, or a tensor or their number does not fit.
        """
        by_parameter = direction_of(direction, self._names)
        real = {parameter: as_real(x) for parameter, x in by_parameter.items()}
        with exact(self.device):
            products = self._parts.directional(real, self.dtype)
            if (witness := self._parts.witness) is not None:
                witness.check_directional("J v", products, real)
            return products

    def least_squares(self, residuals: Tensor, *, damping: float = 0.0) -> dict[str, Tensor]:
        """Jᵀ (J Jᵀ + damping I)⁻¹ r, the damped least-norm step for residuals r.

        The step d minimises ‖r - J d‖² + damping ‖d‖². The linear system is ``(m, m)``, and is
        solved in float64. Directions in which J Jᵀ is zero to rounding are left out.

        Args:
            residuals: r, of shape ``(m,)`` or of the losses' shape.
            damping: Not negative, in the units of J Jᵀ.

        Returns:
            For each parameter's name, a tensor of its shape. Costs :meth:`gramian`, a solution of
            the (m, m) system, and :meth:`vjp`.

        Raises:
            InvalidOperandError: ``residuals`` has another shape, or ``damping`` is negative.
            NonFiniteError: The Gramian or the residuals are not finite.

        References:
            Marquardt 1963; Müller and Zeinhofer 2023, arXiv:2302.13163 (energy natural gradients);
            Chen and Heyl 2024, arXiv:2302.01941 (minSR, the system in the samples).
        """
        check_damping(damping)
        self._parts.weights_of(residuals)  # raises if the shape does not fit
        return self.vjp(damped_solution(self.gramian(), residuals.detach().flatten(), damping))

    @retried_with_less
    def cross_gramian(self, other: Jacobian) -> Tensor:
        """J₁ J₂ᵀ, inner products of the gradients of two sets of objectives, ``(m, m')``.

        Each parameter's products are computed from rows or from factors, whichever costs less. From
        its second such product on, a Jacobian keeps rows that make further products cheaper,
        until they fill the engine's memory limit, unless it was made with ``keep="factors"``.

        Args:
            other: The Jacobian of m' objectives, from any graph, with respect to the same
                parameters. A parameter that only one of the two Jacobians has adds nothing.

        Raises:
            InvalidOperandError: The two share no parameter, or ``other`` is not a Jacobian.
        """
        check_jacobian(other)
        check_related(self._names, other._names)
        self._parts.check_place(other._parts)
        with exact(self.device):
            return self._parts.products(other._parts, self._names, self.dtype)

    def rows(
        self,
        objectives: int | slice | Sequence[int] | Tensor,
        names: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """The gradients of some objectives.

        Args:
            objectives: Their indices in the row-major order of the losses.
            names: The parameters, all if ``None``. One at a time keeps RAM low.

        Returns:
            For each parameter's name, a tensor of the parameter's shape with a first dimension for
            the objectives, of size one if an integer was given. RAM: the rows of these objectives'
            samples.

        Raises:
            IndexError: There is no such objective.
            InvalidOperandError: There is no such parameter.
        """
        check_selection(objectives, names)
        names = None if names is None else list(names)
        for name in names or ():
            parameter_of(name, self._names)  # raises where there is none
        with exact(self.device):
            chosen = objectives.cpu() if isinstance(objectives, Tensor) else objectives
            index = torch.arange(self.shape[0], device="cpu")[chosen].flatten()  # or an IndexError
            gradients = {}
            for parameter, name in self._names.items():
                if names is None or name in names:
                    zeros = zeros_for(parameter, (len(index),), self.dtype, self._parts.place)
                    gradients[name] = zeros
                    self._parts.put_rows(zeros, parameter, index)
            if names is None:
                rows = dict(zip(self._names, gradients.values(), strict=True))
                self._parts.check_sums("A row of J", rows, index, self.dtype, are_rows=True)
            return gradients
