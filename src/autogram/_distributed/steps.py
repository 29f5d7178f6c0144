"""Steps of an engine together with the other ranks: what its methods do with ``distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autogram._arguments import Weighting, check_weighting
from autogram._capture import wrappers_of
from autogram._distributed.gradients import accumulate, check_outside
from autogram._distributed.ranks import Ranks
from autogram._errors import InvalidOperandError, UnsupportedError
from autogram._jacobian import Jacobian
from autogram._losses import Losses, parts_of, shaped

if TYPE_CHECKING:
    from autogram._engine import Engine


class _Local:
    """What one rank computes in a step.

    Args:
        engine: The engine of this rank.
        given: The losses, as the user gave them.

    Attributes:
        parts: The Jacobians, once they are computed.
        outside: Leaves that are no part of J.
        wrappers: What runs the forward pass, and whether it exchanges gradients.
    """

    def __init__(self, engine: Engine, given: Losses) -> None:
        self._engine = engine
        self._given = given
        self.parts: Sequence[Jacobian] = ()
        self.outside: list[Tensor] = []
        self.wrappers: dict[Any, bool] = {}
        self.losses = torch.empty(0)

    def jacobian(self) -> Sequence[Jacobian]:
        """The Jacobian of this rank's losses, kept for one Gramian."""
        self.losses = _checked(self._engine, self._given)
        self.parts = [self._engine.jacobian(self.losses)]
        return self.parts

    def step(self, weighting: Weighting, *, retain_graph: bool) -> Sequence[Jacobian]:
        """The Jacobian of this rank's losses, kept for the Gramian and for gradients."""
        check_weighting(weighting)
        engine = self._engine
        self.losses = losses = _checked(engine, self._given)
        if not losses.numel():
            return self.jacobian()
        self.wrappers = wrappers_of(engine._channel, losses)
        with engine._drivers.one() as driver:
            kept, _, self.outside = driver.step(
                losses, "rows", None, retain_graph=retain_graph, is_summed=False
            )
        check_outside(self.outside)
        self.parts = [Jacobian(*kept, engine._limit)]
        return self.parts


def gramian_of_ranks(engine: Engine, ranks: Ranks, losses: Losses) -> Tensor:
    """``engine.compute_gramian``: of the objectives of all ranks, one after the other."""
    local = _Local(engine, losses)
    gramian = ranks.gramian(local.jacobian)
    ranks.form = _form(engine, losses)
    return gramian


def weights_of_ranks(
    engine: Engine, ranks: Ranks, losses: Losses, weighting: Weighting, scaler: Any
) -> Any:
    """``engine.weights``: of this rank's objectives, by the Gramian of all."""
    local = _Local(engine, losses)

    def compute() -> Sequence[Jacobian]:
        _refuse_scaler(scaler)
        check_weighting(weighting)
        return local.jacobian()

    weights, _ = ranks.weights(compute, weighting)
    return shaped(ranks.own(weights), losses, engine._batch_dim)


def backward_of_ranks(
    engine: Engine,
    ranks: Ranks,
    losses: Losses,
    weighting: Weighting,
    scaler: Any,
    *,
    retain_graph: bool,
) -> tuple[Any, Tensor]:
    """``engine.backward``: the sum over the ranks is added to ``.grad``."""
    local = _Local(engine, losses)

    def compute() -> Sequence[Jacobian]:
        _refuse_scaler(scaler)
        return local.step(weighting, retain_graph=retain_graph)

    weights, gramian = ranks.weights(compute, weighting)
    own = ranks.own(weights)
    accumulate(ranks.group, local.parts, own, ranks.reached, local.wrappers)
    if local.outside:
        cotangent = own.reshape(local.losses.shape).to(local.losses)
        torch.autograd.backward([local.losses], [cotangent], retain_graph, inputs=local.outside)
    return shaped(own, losses, engine._batch_dim), gramian


def own_part(ranks: Ranks | None, weights: Tensor) -> Any:
    """``engine.own``: this rank's part of weights, in the form of its losses."""
    if ranks is None:
        raise InvalidOperandError(
            "The engine computes the Gramian of this process alone, of which all weights are its "
            "own. Make it with `Engine(model, distributed=True)`, or use the weights as they are."
        )
    own = ranks.own(weights)
    return own if ranks.form is None else ranks.form(own)


def _form(engine: Engine, losses: Losses) -> Any:
    """Brings weights into the form of some losses, of which nothing is kept but shapes."""
    parts = [torch.empty(x.shape, device="meta") for x in parts_of(losses)]
    like: Any = parts[0]
    if not isinstance(losses, Tensor):
        like = dict(zip(losses, parts, strict=True)) if hasattr(losses, "keys") else parts
    batch_dim = engine._batch_dim
    return lambda own: shaped(own, like, batch_dim)


def _checked(engine: Engine, losses: Losses) -> Tensor:
    """The losses as one tensor. A rank without objectives may give any empty tensor."""
    if isinstance(losses, Tensor) and not losses.numel() and not losses.requires_grad:
        return losses.detach().requires_grad_()
    return engine._checked(losses)


def _refuse_scaler(scaler: Any) -> None:
    """Refuses a gradient scaler, which would have to skip a step on all ranks."""
    if scaler is not None and scaler.is_enabled():
        raise UnsupportedError(
            "A scaler is given to an engine of several ranks. Use bfloat16, which needs none, and "
            "pass `scaler=None`."
        )
