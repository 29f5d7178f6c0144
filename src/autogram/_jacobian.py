"""The Jacobian as an object: products with it, from the factors of its blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor

from autogram._arguments import Direction, Grouping, direction_of, labels, parameter_of, weights_of
from autogram._blocks import Columns, Limit, bundled, gram_of_bundle, weighted_sums
from autogram._capture import (
    Objectives,
    add_to_grad,
    exact,
    refuse_gradients,
    retried_with_less,
    running_pass,
)
from autogram._errors import InvalidOperandError, UnsupportedError
from autogram._solve import damped_solution


class Jacobian:
    """The Jacobian J of m objectives with respect to n parameters, as an implicit operator.

    :meth:`autogram.Engine.jacobian` makes it. It holds factors and not rows: for each call in the
    forward pass that read a parameter, the cotangent of the output and the input. Every method
    contracts factors, in the order that costs least, and in parts where an intermediate result
    would exceed the engine's memory limit. No method runs a backward pass or needs the graph.

    RAM: the cotangents of all activations that were computed from parameters, times K for K
    objectives per sample. The inputs are shared with the graph, and stay alive after it. Calls
    without a rule, and derived tensors such as weight-normed ones, have rows.

    Rows are in the row-major order of the losses, and columns in the order of
    ``named_parameters``, each parameter flattened. Results are detached, and in the dtype of the
    parameters, at least float32. The columns of a parameter that no objective reaches are zero.

    Every method raises :class:`autogram.ChangedTensorError` if a factor was changed in place in the
    meantime, for instance by a step of the optimizer, and :class:`autogram.MemoryLimitError` if
    memory ran out, and again with an eighth of the limit.

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
        objectives: Objectives,
        columns: Mapping[Tensor, Columns],
        names: Mapping[Tensor, str],
        limit: Limit,
        *,
        is_exchanged: bool = False,
    ) -> None:
        # Without the graph: it may go while this lives.
        self._objectives = Objectives(objectives.losses.detach(), objectives.batch_dim)
        self._columns = {p: columns[p] for p in names if p in columns}
        self._names = dict(names)
        self._limit = limit
        self._is_exchanged = is_exchanged

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of objectives and of parameters, m and n."""
        return self._objectives.losses.numel(), sum(p.numel() for p in self._names)

    @property
    def dtype(self) -> torch.dtype:
        """That of the results, which have the dtype of the parameters, and at least float32."""
        found = [columns.dtype for columns in self._columns.values()]
        dtypes = [dtype for dtype in found if dtype is not None]
        default = torch.promote_types(self._objectives.losses.dtype, torch.float32)
        return reduce(torch.promote_types, dtypes) if dtypes else default

    @property
    def device(self) -> torch.device:
        """The device of the losses, on which results with one entry for each objective are."""
        return self._objectives.losses.device

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

    @retried_with_less
    def gramian(self) -> Tensor:
        """J Jᵀ, all inner products of the objectives' gradients, ``(m, m)``."""
        with self._exact():
            return self._gramian(self._columns.values())

    @retried_with_less
    def block_gramians(self, by: Grouping | None = None) -> dict[str, Tensor]:
        """Gramians of groups of parameters, each ``(m, m)``, which add up to the whole.

        Args:
            by: Gives the group of a parameter from its name, for instance
                ``lambda name: name.split(".")[0]``; or ``optimizer.param_groups``, whose keys are
                ``"name"`` or else the number, and which may lack parameters. By default, each
                parameter is its own group.
        """
        groups: dict[str, list[Columns]] = {}
        for parameter, label in labels(by, self._names).items():
            group = groups.setdefault(label, [])
            if parameter in self._columns:
                group.append(self._columns[parameter])
        with self._exact():
            return {name: self._gramian(columns) for name, columns in groups.items()}

    @retried_with_less
    def row_norms(self) -> Tensor:
        """Euclidean norm of each objective's gradient, ``(m,)``, without the Gramian.

        References:
            Goodfellow, Efficient Per-Example Gradient Computations, 2015, arXiv:1510.01799.
            Bu, Mao and Xu 2022, arXiv:2205.10683: by factors or by rows, whatever is cheaper.
        """
        with self._exact():
            parts = (columns.square_norms() for columns in self._columns.values())
            return self._objectives.in_order(self._sum(parts, self._sizes).flatten(), 0).sqrt()

    @retried_with_less
    def vjp(self, w: Tensor) -> dict[str, Tensor]:
        """Jᵀ w, the gradient of the objectives' sum with weights.

        Args:
            w: Weights of shape ``(m,)`` or of the losses' shape; or several vectors of weights,
                stacked along a first dimension.

        Returns:
            For each parameter's name, a tensor of its shape, with the first dimension of ``w`` in
            front if that is a stack. Costs each vector what weight gradients cost in a backward
            pass.

        Raises:
            InvalidOperandError: ``w`` has another shape.

        References:
            Bu, Wang, Zha and Karypis, Differentially Private Optimization on Large Model at Small
            Cost, 2022, arXiv:2210.00038.
        """
        with self._exact():
            weights = weights_of(w, self._objectives, can_be_stack=True)
            found = dict(weighted_sums(self._columns, weights))
            shape, dtype = weights.shape[:-2], self.dtype
            gradients = {}
            for parameter, name in self._names.items():
                gradient = found.get(parameter)
                if gradient is None:
                    gradient = parameter.new_zeros(shape + parameter.shape, dtype=dtype)
                gradients[name] = gradient
            return gradients

    def accumulate_grad(self, w: Tensor) -> None:
        """Adds Jᵀ w to ``.grad`` of the parameters, as a backward pass would.

        A gradient has the dtype of its parameter, and hooks on parameters run. The gradient of a
        parameter that no objective reaches stays as it is. That of a sparse embedding is dense.

        Args:
            w: Weights of shape ``(m,)`` or of the losses' shape.

        Raises:
            InvalidOperandError: ``w`` has another shape.
            UnsupportedError: `DistributedDataParallel` would exchange the gradients; or a backward
                pass of an engine is under way.
        """
        if self._is_exchanged:
            refuse_gradients("accumulate_grad")
        if running_pass() is not None:
            raise UnsupportedError(
                "Gradients are to be added to `.grad` inside of a backward pass of an engine, by a "
                "hook or a custom autograd Function. Such passes are made as often as samples are "
                "looked for, and leave `.grad` as it was. Add them outside."
            )
        with self._exact():
            weights = weights_of(w, self._objectives)
            gradients = self._gradients(weights)
            while gradients:
                add_to_grad(*gradients.popitem())

    @retried_with_less
    def _gradients(self, weights: Tensor) -> dict[Tensor, Tensor]:
        """What to add to the parameters' gradients, from the last parameter to the first."""
        return {
            parameter: torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)
            for parameter, total in weighted_sums(self._columns, weights)
        }

    @retried_with_less
    def jvp(self, direction: Direction) -> Tensor:
        """J v, the derivatives of the objectives along a direction, ``(m,)``.

        Args:
            direction: A tensor of the parameter's shape for each parameter, by name or in the order
                of :attr:`names`. Names that are missing count as zeros.

        Raises:
            InvalidOperandError: A name is unknown, or a tensor or their number does not fit.
        """
        with self._exact():
            by_parameter = direction_of(direction, self._names)
            parts = (
                columns.directional(by_parameter[parameter])
                for parameter, columns in self._columns.items()
                if parameter in by_parameter
            )
            return self._objectives.in_order(self._sum(parts, self._sizes).flatten(), 0)

    def least_squares(self, residuals: Tensor, *, damping: float = 0.0) -> dict[str, Tensor]:
        """Jᵀ (J Jᵀ + damping I)⁻¹ r, the damped step of least norm towards residuals r.

        With it, ‖r - J d‖² + damping ‖d‖² is least. The system has the size of the objectives, and
        is solved in float64, without directions of J Jᵀ that are zero to rounding.

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
            Chen and Heyl 2024, arXiv:2302.01941 (minSR, the system of the samples).
        """
        if not damping >= 0:
            raise InvalidOperandError(f"The damping is {damping}. Pass zero, or a positive number.")
        weights_of(residuals, self._objectives)  # raises if the shape does not fit
        return self.vjp(damped_solution(self.gramian(), residuals.detach().flatten(), damping))

    @retried_with_less
    def cross_gramian(self, other: Jacobian) -> Tensor:
        """J₁ J₂ᵀ, inner products of the gradients of two sets of objectives, ``(m, m')``.

        Args:
            other: The Jacobian of m' objectives, from any graph, with respect to the same
                parameters. A parameter that only one of the two Jacobians has adds nothing.

        Raises:
            InvalidOperandError: The two have no parameter in common.
        """
        if self._names.keys().isdisjoint(other._names):
            raise InvalidOperandError(
                "The two Jacobians have no parameter in common. Both must be of the same modules: "
                "make them with one engine, or with engines on the same model."
            )
        with self._exact(), other._exact():
            parts = (
                columns.cross_gram(other._columns[parameter])
                for parameter, columns in self._columns.items()
                if parameter in other._columns
            )
            total = self._sum(parts, self._sizes + other._sizes).flatten(0, 1).flatten(1)
            return other._objectives.in_order(self._objectives.in_order(total, 0), 1)

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
            For each parameter's name, a tensor of its shape with the objectives in front (one, if
            an integer was given). RAM: the rows of the samples that these objectives belong to.

        Raises:
            IndexError: There is no such objective.
            InvalidOperandError: There is no such parameter.
        """
        for name in names or ():
            parameter_of(name, self._names)  # raises where there is none
        with self._exact():
            among = self._objectives.in_order(torch.arange(self.shape[0]), 0)  # (k, b), flattened
            index = among[objectives].flatten()  # raises an IndexError
            samples, b = torch.unique(index % self._sizes[1], return_inverse=True)
            k, dtype, gradients = index // self._sizes[1], self.dtype, {}
            for parameter, name in self._names.items():
                if names is not None and name not in names:
                    continue
                columns = self._columns.get(parameter)
                found = None if columns is None else columns.rows(samples)
                if found is None:
                    gradients[name] = parameter.new_zeros(len(index), *parameter.shape, dtype=dtype)
                else:
                    gradients[name] = found[k, b]
            return gradients

    def dense(self) -> Tensor:
        """J itself, ``(m, n)``, with each parameter's columns in row-major order."""
        m = self.shape[0]
        found = zip(self._names, self.rows(slice(None)).values(), strict=True)
        flat = [gradient.reshape(m, p.numel()) for p, gradient in found]
        return torch.cat([x.to(self.device, self.dtype) for x in flat], 1)

    @property
    def _sizes(self) -> tuple[int, int]:
        """K and B."""
        return self._objectives.per_sample, self._objectives.samples

    @contextmanager
    def _exact(self) -> Iterator[None]:
        """Checks the factors, and makes results exact under autocast and no part of a graph."""
        for columns in self._columns.values():
            columns.check()
        with exact(self.device):
            yield

    def _gramian(self, found: Iterable[Columns]) -> Tensor:
        """The Gramian of some columns, ``(m, m)``."""
        parts = (gram_of_bundle(bundle) for bundle in bundled(found))
        total = self._sum(parts, self._sizes * 2).flatten(0, 1).flatten(1)
        return self._objectives.in_order(total, 0, 1)

    def _sum(self, parts: Iterable[Tensor | None], shape: tuple[int, ...]) -> Tensor:
        """The sum of what parameters contribute, on the device of the losses."""
        total = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for part in parts:
            if part is not None:
                total += part.to(total.device)
        return total
