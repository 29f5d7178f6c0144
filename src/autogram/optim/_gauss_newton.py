"""Gauss-Newton steps in sample space, with a damping that follows the gain ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autogram._arguments import is_number
from autogram._engine import Engine
from autogram._jacobian import Jacobian
from autogram._jacobian.solve import damped_solution
from autogram._undo import undoing, undone
from autogram.errors import (
    InvalidLossesError,
    InvalidOperandError,
    InvalidOptionError,
    NonFiniteError,
    UnsupportedError,
    listed,
)

# The share of the predicted gain that a step must reach.
_ENOUGH = 0.01
# Factors of the damping after a step that reaches this share, and after one that does not.
_LOWER, _HIGHER = 0.01, 2.0
# Enough to raise the smallest damping to one.
_MOST_TRIALS = 60


class GaussNewton(Optimizer):
    """Least squares with Gauss-Newton steps, damped as by Levenberg and Marquardt.

    It minimises the sum of squares of m residuals r, which a closure computes. The step d minimises
    ‖r - J d‖² + λ ‖d‖², and the parameters become θ - d. By the push-through identity, d is
    Jᵀ (J Jᵀ + λ I)⁻¹ r: the linear system is ``(m, m)``, however many parameters there are.

    The *gain ratio* determines the damping: the decrease of the sum of squares, divided by the
    decrease that the linear model of the residuals predicts. If the ratio is below 0.01, the step
    is undone and recomputed with twice the damping. After any other step, the damping is divided by
    100: a larger one would leave residuals in directions with small eigenvalues of J Jᵀ unchanged.

    λ is a number times the mean of the diagonal of J Jᵀ. The number does not change if
    residuals are scaled; it is ``optimizer.param_groups[0]["damping"]``, and in the ``state_dict``.

    Args:
        engine: The engine of the modules to optimize. Frozen parameters are unchanged.
        damping: The first number, positive.

    Raises:
        InvalidOperandError: ``engine`` is not an engine.
        InvalidOptionError: ``damping`` is not positive.
        UnsupportedError: The engine covers several processes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import Engine
        >>> from autogram.optim import GaussNewton
        >>> model = nn.Linear(3, 1)
        >>> x, y = torch.randn(4, 3), torch.randn(4)
        >>> optimizer = GaussNewton(Engine(model))
        >>> norms = [optimizer.step(lambda: model(x).squeeze(1) - y).norm() for _ in range(4)]
        >>> bool(norms[-1] < 1e-3 * norms[0])
        True

    References:
        Levenberg 1944, doi:10.1090/qam/10666; Marquardt 1963, doi:10.1137/0111030 (damping).
        Nocedal and Wright, Numerical Optimization, 2006, chapter 10 (least squares, the ratio);
        Transtrum and Sethna 2012, arXiv:1201.5885 (small increases, large decreases).
        Müller and Zeinhofer 2023, arXiv:2302.13163, and Guzmán-Cordero et al. 2025,
        arXiv:2505.12149 (differential equations; the system in the samples).
    """

    def __init__(self, engine: Engine, *, damping: float = 1e-3) -> None:
        given: object = engine
        if not isinstance(given, Engine):
            raise InvalidOperandError(
                f"A {type(given).__name__} was given where an engine is needed. Pass the engine of "
                "the modules to optimize: `GaussNewton(Engine(model))`."
            )
        if engine._ranks is not None:
            raise UnsupportedError(
                "`GaussNewton` solves the system of one process, and the engine covers several "
                "processes. Make it without `distributed`, and optimize in one process."
            )
        if not is_number(damping) or not 0 < damping < inf:
            raise InvalidOptionError(f"`damping` is {damping!r}. Pass a positive number.")
        self._engine = engine
        named = [(name, p) for p, name in engine._channel.parameters_now().items()]
        super().__init__(named, {"damping": float(damping)})

    @undoing
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]  # as LBFGS
        """Makes one step.

        Args:
            closure: Computes the residuals for the current parameters, and returns them
                with their graph: a tensor with m elements. It must not call ``backward``, and needs
                no ``zero_grad``. It is called once, and again for each tried damping, with the
                engine paused; with equal parameters it must return equal residuals. Draw new points
                or batches before the step.

        Returns:
            The residuals before the step, detached. If no step reduces them, the parameters
            are unchanged.

            Cost: :meth:`autogram.Engine.jacobian` and its Gramian; and for each damping, m³ / 3 for
            the system, weighted gradients, and a forward pass. A step tries about seven dampings.
            RAM: the Jacobian's, the ``(m, m)`` system, and two copies of the parameters.

        Raises:
            InvalidLossesError: The closure does not return a tensor, or one without a graph.
            NonFiniteError: A residual is infinite or not a number.
            UnsupportedError: The residuals depend on parameters that the modules got after
                the optimizer was made; or they come from a `DistributedDataParallel`.
            AutogramError: As for :meth:`autogram.Engine.jacobian`.
        """
        closure = torch.enable_grad()(closure)
        group = self.param_groups[0]
        residuals = _checked(closure())
        if not isfinite(loss := _loss_of(residuals)):
            raise NonFiniteError(
                "The closure returned residuals that are infinite or not a number, and the "
                "parameters are unchanged. Look for a division by zero or an overflow in it; "
                "`torch.autograd.detect_anomaly()` finds it."
            )
        with torch.enable_grad():
            jacobian = self._engine.jacobian(residuals)
        self._check(jacobian)
        residuals = residuals.detach()  # the graph is no longer needed
        flat, rounding = residuals.flatten().double(), torch.finfo(residuals.dtype).eps
        for damping, direction, image in islice(_directions(jacobian, flat, group), _MOST_TRIALS):
            predicted = float(image @ (2 * flat - image))
            if not predicted > rounding * loss:
                break  # a stationary point
            if (loss - self._loss_after(closure, direction)) / predicted >= _ENOUGH:
                for p, d in direction.items():
                    p.sub_(d.to(p.dtype))
                group["damping"] = max(_LOWER * damping, torch.finfo(jacobian.dtype).eps)
                break
            group["damping"] = _HIGHER * damping
        return residuals

    def _loss_after(
        self, closure: Callable[[], Tensor], direction: Mapping[Tensor, Tensor]
    ) -> float:
        """The sum of squares after a step, which is then undone.

        The parameters get other storages: the original storages stay unchanged for the factors of
        the Jacobian, and PyTorch counts no changes in place.
        """
        before = [(p, p.data) for p in direction]
        with undone(partial(_put, before)), self._engine.paused():
            _put([(p, p.data - d.to(p.dtype)) for p, d in direction.items()])
            return _loss_of(_checked(closure()))

    def _check(self, jacobian: Jacobian) -> None:
        """Refuses a Jacobian with which this optimizer cannot make a step."""
        if jacobian._is_exchanged:
            raise UnsupportedError(
                "Each process would make its own step here, and `DistributedDataParallel` "
                "expects the same parameters in all processes. Optimize in one process, and pass "
                "the module inside, `ddp.module`, to the engine."
            )
        parameters = {p for group in self.param_groups for p in group["params"]}
        if new := [f"`{name}`" for p, name in jacobian._names.items() if p not in parameters]:
            raise UnsupportedError(
                f"The residuals depend on {listed(new)}, which the optimizer does not have: the "
                "modules got new parameters after it was made. Make the optimizer anew."
            )


def _checked(residuals: Any) -> Tensor:
    """The result of a closure, if it is a tensor of residuals."""
    if not isinstance(residuals, Tensor):
        raise InvalidLossesError(
            f"The closure returned a {type(residuals).__name__}. Return the residuals as one "
            "tensor, with their graph; join several tensors with `torch.cat`."
        )
    return residuals


def _loss_of(residuals: Tensor) -> float:
    """The sum of squares of residuals."""
    return float(residuals.detach().double().square().sum())


def _directions(
    jacobian: Jacobian, residuals: Tensor, group: Mapping[str, Any]
) -> Iterator[tuple[float, dict[Tensor, Tensor], Tensor]]:
    """For the group's current damping: the damping, the step d by parameter, J d in float64."""
    gramian = jacobian.gramian()
    unit = float(gramian.diagonal().double().mean())
    while True:
        damping: float = group["damping"]
        solution = damped_solution(gramian, residuals, damping * unit)
        step = zip(jacobian._names, jacobian.vjp(solution).values(), strict=True)
        yield damping, dict(step), gramian.double() @ solution.double()


def _put(data: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Sets parameters to some values, in other storages."""
    for parameter, values in data:
        parameter.data = values
