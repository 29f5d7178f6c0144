"""Gauss-Newton steps in the space of samples, whose damping and length follow the gain ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autogram._arguments import is_integer, is_number
from autogram._capture.distribution import refuse_gradients
from autogram._engine import Engine
from autogram._errors import (
    InvalidLossesError,
    InvalidOperandError,
    InvalidOptionError,
    NonFiniteError,
    UnsupportedError,
    listed,
)
from autogram._jacobian import Jacobian
from autogram._jacobian.solve import damped_solution
from autogram._undo import undoing, undone

# The share of the predicted gain that a step must reach: a step along a descent direction does,
# if it is short enough.
_ENOUGH = 0.1
# How many pairs of a damping and a length are tried in a step. The damping rises by 4, 16, 64, ...
_MOST_TRIALS = 25


class GaussNewton(Optimizer):
    """Least squares by steps of Gauss and Newton, as Levenberg and Marquardt damp them.

    It minimises the sum of squares of m residuals r, which a closure computes. The step d minimises
    ‖r - J d‖² + λ ‖d‖². It is Jᵀ (J Jᵀ + λ I)⁻¹ r by the push-through identity, so that the linear
    system is ``(m, m)``, however many parameters there are. The parameters become θ - a d.

    Damping and length follow the *gain ratio*: by how much the sum of squares falls, over what the
    linear model of the residuals predicts. The length a is the first of 1, 1/2, 1/4, ... with a
    ratio of at least 0.1. If it is 1, the damping is multiplied by max(1/3, 1 - (2 ratio - 1)³) for
    the next step. If no length will do, the damping rises, and the step is computed again.

    λ is the damping times ‖r‖², so that it vanishes with the residuals. Its number is
    ``optimizer.param_groups[0]["damping"]``, which a ``state_dict`` contains.

    Args:
        engine: The engine of the modules whose parameters are optimized. Parameters that need no
            gradient stay as they are.
        damping: The first number, positive. Far from a solution, small ones are better: a step that
            is too long is made shorter, and keeps its direction.
        halvings: How often the length is halved at most. With 0, each step has its full length, and
            the damping alone is adapted, as Levenberg and Marquardt do.

    Raises:
        InvalidOperandError: ``engine`` is not an engine.
        InvalidOptionError: ``damping`` is not positive, or ``halvings`` is negative.
        UnsupportedError: The engine is one of several processes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import Engine
        >>> from autogram.optim import GaussNewton
        >>> model = nn.Linear(3, 1)
        >>> x, y = torch.randn(4, 3), torch.randn(4)
        >>> optimizer = GaussNewton(Engine(model))
        >>> before = optimizer.step(lambda: model(x).squeeze(1) - y)
        >>> bool((model(x).squeeze(1) - y).norm() < 1e-3 * before.norm())
        True

    References:
        Levenberg 1944, doi:10.1090/qam/10666; Marquardt 1963, doi:10.1137/0111030 (damping).
        Nocedal and Wright, Numerical Optimization, 2006, chapter 10 (least squares), chapter 3 (the
        length); Nielsen, Damping Parameter in Marquardt's Method, 1999 (the factor); Yamashita and
        Fukushima 2001, doi:10.1007/978-3-7091-6217-0_18 (λ in proportion to ‖r‖²).
        Müller and Zeinhofer 2023, arXiv:2302.13163, and Guzmán-Cordero et al. 2025,
        arXiv:2505.12149 (differential equations; the system of the samples).
    """

    def __init__(self, engine: Engine, *, damping: float = 1e-9, halvings: int = 20) -> None:
        given: object = engine
        if not isinstance(given, Engine):
            raise InvalidOperandError(
                f"A {type(given).__name__} was given where an engine is needed. Pass the engine of "
                "the modules to optimize: `GaussNewton(Engine(model))`."
            )
        if engine._ranks is not None:
            raise UnsupportedError(
                "`GaussNewton` solves the system of one process, and the engine is one of several "
                "processes. Make it without `distributed`, and optimize in one process."
            )
        if not is_number(damping) or not 0 < damping < inf:
            raise InvalidOptionError(f"`damping` is {damping!r}. Pass a positive number.")
        if not is_integer(halvings) or halvings < 0:
            raise InvalidOptionError(
                f"`halvings` is {halvings!r}. Pass zero or a positive integer."
            )
        self._engine = engine
        named = [(name, p) for p, name in engine._channel.parameters_now().items()]
        super().__init__(named, {"damping": float(damping), "halvings": int(halvings)})

    @undoing
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]  # as LBFGS
        """Makes one step.

        Args:
            closure: Computes the residuals anew, for the parameters as they are, and returns them
                with their graph: a tensor with m elements. It makes no backward pass, and needs no
                ``zero_grad``. It is called once, and again for each length that is tried, with the
                engine paused; with equal parameters it must give equal residuals. Fresh points or
                batches are drawn before the step.

        Returns:
            The residuals before the step, detached. If no step makes them smaller, the parameters
            and the damping stay as they are.

            Cost: :meth:`autogram.Engine.jacobian` and its Gramian, m³ / 3 for the system, weighted
            gradients, and a forward pass for each length; the last three again where the damping
            rises. RAM: the Jacobian's, the ``(m, m)`` system, and two copies of the parameters.

        Raises:
            InvalidLossesError: The closure does not return a tensor, or one without a graph.
            NonFiniteError: A residual is infinite or not a number.
            UnsupportedError: The residuals depend on parameters that the modules did not have when
                the optimizer was made; or `DistributedDataParallel` would exchange gradients.
            AutogramError: As for :meth:`autogram.Engine.jacobian`.
        """
        closure = torch.enable_grad()(closure)
        group = self.param_groups[0]
        residuals = _checked(closure())
        if not isfinite(loss := _loss_of(residuals)):
            raise NonFiniteError(
                "The closure returned residuals that are infinite or not a number, and the "
                "parameters stay as they are. Look for a division by zero or an overflow in it; "
                "`torch.autograd.detect_anomaly()` finds it."
            )
        with torch.enable_grad():
            jacobian = self._engine.jacobian(residuals)
        self._check(jacobian)
        residuals = residuals.detach()  # the graph is needed no more
        flat, rounding = residuals.flatten().double(), torch.finfo(residuals.dtype).eps
        directions = _directions(jacobian, flat, group["damping"], loss)
        trials = ((each, i) for each in directions for i in range(group["halvings"] + 1))
        for (damping, direction, image), halving in islice(trials, _MOST_TRIALS):
            length = 0.5**halving
            predicted = float(length * image @ (2 * flat - length * image))
            if not predicted > rounding * loss:
                break  # a stationary point
            gain = (loss - self._loss_after(closure, direction, length)) / predicted
            if gain >= _ENOUGH:
                for p, d in direction.items():
                    p.sub_(d.to(p.dtype), alpha=length)
                group["damping"] = damping if halving else damping * _factor(gain)
                break
        return residuals

    def _loss_after(
        self, closure: Callable[[], Tensor], direction: Mapping[Tensor, Tensor], length: float
    ) -> float:
        """The sum of squares after a step, which is taken back.

        Other storages take the place of the parameters': these stay unchanged for the factors of
        the Jacobian, and PyTorch counts no changes in place.
        """
        before = [(p, p.data) for p in direction]
        with undone(partial(_put, before)), self._engine.paused():
            _put([(p, p.data - (length * d).to(p.dtype)) for p, d in direction.items()])
            return _loss_of(_checked(closure()))

    def _check(self, jacobian: Jacobian) -> None:
        """Refuses a Jacobian that this optimizer can make no step with."""
        if jacobian._is_exchanged:
            refuse_gradients("GaussNewton.step")
        known = {p for group in self.param_groups for p in group["params"]}
        if new := [f"`{name}`" for p, name in jacobian._names.items() if p not in known]:
            raise UnsupportedError(
                f"The residuals depend on {listed(new)}, which the optimizer does not have: the "
                "modules have got new parameters since it was made. Make the optimizer anew."
            )


def _checked(residuals: Any) -> Tensor:
    """What a closure has returned, if these are residuals."""
    if not isinstance(residuals, Tensor):
        raise InvalidLossesError(
            f"The closure returned a {type(residuals).__name__}. Return the residuals as one "
            "tensor, with their graph; several tensors go together by `torch.cat`."
        )
    return residuals


def _loss_of(residuals: Tensor) -> float:
    """The sum of squares of residuals."""
    return float(residuals.detach().double().square().sum())


def _directions(
    jacobian: Jacobian, residuals: Tensor, damping: float, loss: float
) -> Iterator[tuple[float, dict[Tensor, Tensor], Tensor]]:
    """With more and more damping: the damping, the step d by parameter, and J d in float64."""
    gramian = jacobian.gramian()
    for rise in count():
        damping *= 4.0**rise
        solution = damped_solution(gramian, residuals, damping * loss)
        step = zip(jacobian._names, jacobian.vjp(solution).values(), strict=True)
        yield damping, dict(step), gramian.double() @ solution.double()


def _factor(gain: float) -> float:
    """By what the damping is multiplied after a step of full length: at least 1/3, at most 2."""
    return max(1 / 3, 1 - (2 * gain - 1) ** 3)


def _put(data: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Gives parameters some values, in other storages."""
    for parameter, values in data:
        parameter.data = values
