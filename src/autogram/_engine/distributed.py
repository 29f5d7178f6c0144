"""Steps together with the engines of other ranks: what methods do with ``distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autogram._arguments import Weighting
from autogram._distributed import Ranks, Wrappers, together
from autogram._engine.hooked import Hooked
from autogram._engine.scale import Scale
from autogram._engine.steps import Step
from autogram._errors import RankError
from autogram._jacobian import Jacobian
from autogram._losses import L, Losses, parts_of, shapes_of, weights_like

Compute = Callable[[Losses], Jacobian]
"""``engine.jacobian``."""


def gramian_of_ranks(engine: Hooked, ranks: Ranks, compute: Compute, losses: Losses) -> Tensor:
    """``engine.compute_gramian``: of the objectives of all ranks, one after the other."""
    gramian = ranks.gramian(lambda: _jacobian(engine, ranks, compute, losses))
    _note_form(engine, ranks, losses)
    return gramian


def weights_of_ranks(
    engine: Hooked, ranks: Ranks, compute: Compute, losses: L, weighting: Weighting, scaler: Any
) -> L:
    """``engine.weights``: of this rank's objectives, by the Gramian of all."""
    scale = Scale(weighting, scaler)
    weights, _ = ranks.weights(
        lambda: _jacobian(engine, ranks, compute, losses, scale), scale.weighting, scale.number
    )
    _note_form(engine, ranks, losses)
    own = ranks.own(weights)
    return weights_like(own, losses, engine._batch_dim)  # type: ignore[no-any-return]  # their form


def backward_of_ranks(
    engine: Hooked,
    ranks: Ranks,
    losses: Losses,
    weighting: Weighting,
    scaler: Any,
    *,
    retain_graph: bool,
) -> tuple[Any, Tensor]:
    """``engine.backward``: the sum over the ranks is added to ``.grad``."""
    step = Step(engine, "engine.backward", "rows", Scale(weighting, scaler))
    try:
        with ranks.listening(engine._channel, "step"), step.passing(losses):
            step.scale.check()
            step.add(engine._checked(losses), retain_graph=retain_graph, is_only=True)
    except RankError:
        raise  # by all ranks
    except Exception as error:
        step.error = error
    gramian, weights = step.finish()
    _note_form(engine, ranks, losses)
    return weights_like(weights, losses, engine._batch_dim), gramian


def _jacobian(
    engine: Hooked, ranks: Ranks, compute: Compute, losses: Losses, scale: Scale | None = None
) -> Jacobian:
    """The Jacobian of the losses of this rank, times the scale if there is one."""
    channel = engine._channel
    wrappers = Wrappers(ranks.group)
    with (
        ranks.listening(channel, "Gramian"),
        together(ranks, channel, losses),
        wrappers.passing(channel, parts_of(losses)),
    ):
        if scale is None:
            return compute(losses)
        scale.check()
        with scale.passing():
            return compute(scale.of(engine._checked(losses)))


def _note_form(engine: Hooked, ranks: Ranks, losses: Losses) -> None:
    """Notes how weights get the form of some losses, of which nothing is kept but shapes."""
    like, batch_dim = shapes_of(losses), engine._batch_dim
    ranks.form = lambda own: weights_like(own, like, batch_dim)
