"""Results of functions that may read parameters which are none of their arguments."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from autogram import Engine, UnseenUseWarning
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import per_sample


class Energy(nn.Module):
    """An energy, whose forces are read by other layers."""

    def __init__(self, read: Callable[["Energy", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.last, self.scale = nn.Linear(3, 3), nn.Parameter(torch.randn(3))
        self.read = read

    def forces(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return -gradient

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x, self.forces(x))


def accumulated(model: Energy, x: Tensor, forces: Tensor) -> Tensor:
    """By ``.grad`` of an input."""
    points = x.clone().requires_grad_()
    own = model.energy(points).sum()
    own.backward(inputs=[points], create_graph=True)
    assert points.grad is not None
    gradient, points.grad = points.grad, None
    return model.last(gradient + forces)


def as_parameters(model: Energy, x: Tensor, forces: Tensor) -> Tensor:
    """A step of an inner training inside of the forward pass."""
    inner = (F.linear(x, model.last.weight) * forces).square().mean()
    (gradient,) = torch.autograd.grad(inner, model.last.weight, create_graph=True)
    return F.linear(x, model.last.weight - 0.1 * gradient)


def by_a_view_of_before(model: Energy, _x: Tensor, forces: Tensor) -> Tensor:
    """The view leads past a tap that is put on its base afterwards."""
    view = forces.T
    return model.last(forces) + model.last(view.T) + model.last(view.T.cos())


def by_views_of_a_view(model: Energy, _x: Tensor, forces: Tensor) -> Tensor:
    view = forces.T
    return model.last(view.T) + model.last(view.T.sin()) + model.last(view.T) + forces


def in_place_behind_a_view(model: Energy, _x: Tensor, forces: Tensor) -> Tensor:
    """The view is changed with its base, which a layer has read."""
    view = forces.view_as(forces)
    read = model.last((forces + model.scale).sin())
    forces += model.scale
    return model.last(view) + read


def tangents(model: Energy, x: Tensor, _forces: Tensor) -> Tensor:
    """In forward mode, calls compute them beside their results."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos())
        value, tangent = forward_ad.unpack_dual(model.energy(dual).tanh())
        assert tangent is not None
    return model.last(x * tangent) * value + tangent


def behind_a_hook(model: Energy, _x: Tensor, forces: Tensor) -> Tensor:
    """PyTorch gives the module a view that may not be changed in place.

    What a pass inside of the module brings to this view, the hook would take for its own.
    """
    handle = model.last.register_full_backward_hook(lambda _, inputs, __: (2 * inputs[0],))
    try:
        return model.last(forces.view_as(forces)) + model.last(2 * forces)
    finally:
        handle.remove()


def without_gradients(model: Energy, _x: Tensor, forces: Tensor) -> Tensor:
    """First by a layer whose result has no graph."""
    with torch.no_grad():
        before = model.last(forces)
    return model.last(forces) + before


READS: dict[str, Callable[[Energy, Tensor, Tensor], Tensor]] = {
    "by a layer": lambda model, _x, forces: model.last(forces),
    "by a layer, later": lambda model, x, forces: model.last((x + 0.1 * forces).sin()),
    "by a product": lambda model, _x, forces: model.scale * forces,
    "by an in-place product": lambda model, _x, forces: forces.mul_(model.scale),
    "in a slice": lambda model, x, forces: torch.cat([x, model.last(forces[:, :])[:, 1:]], 1),
    "by two layers": lambda model, _x, forces: model.last(forces) + model.last(forces.cos()),
    "also by losses": lambda model, _x, forces: model.last(forces) + 2 * forces,
    "by a view of before": by_a_view_of_before,
    "by views of a view": by_views_of_a_view,
    "by views of one call": lambda model, _x, forces: torch.stack([model.last(x) for x in forces]),
    "expanded": lambda model, _x, forces: model.last(forces.expand(2, -1, -1)).sum(0),
    "in place, behind a view": in_place_behind_a_view,
    "behind a hook": behind_a_hook,
    "tangents": tangents,
    "without gradients": without_gradients,
    "by the energy": lambda model, x, forces: model.forces(x + 0.1 * forces),
    "of forces": lambda model, _x, forces: model.last(model.forces(model.last(forces))),
    "accumulated": accumulated,
    "as parameters": as_parameters,
    "without a graph": lambda model, _x, forces: model.last(forces.detach()),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.filterwarnings(f"ignore::autogram.{UnseenUseWarning.__name__}")
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("batch_dim", ["auto", None])
@pytest.mark.parametrize("name", READS)
def test_forces_may_be_read(name: str, batch_dim: int | None) -> None:
    """In each of several steps, of different batches, the last ones in another way."""
    model = Energy(READS[name])
    engine = Engine(model, batch_dim=batch_dim, verify="never")
    for size, way in [(4, name), (4, name), (3, name), (4, "by a layer"), (4, name)]:
        model.read = READS[way]
        losses = per_sample(model(torch.randn(size, 3)))
        jacobian = reference_jacobian(losses, trainable(model))
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def test_forces_that_are_returned_have_factors() -> None:
    """Nothing is tapped that no layer reads, and nobody is warned."""
    model = Energy(lambda _model, _x, forces: 2 * forces)
    engine = Engine(model, verify="never")
    losses = per_sample(model(torch.randn(4, 3)))
    jacobian = reference_jacobian(losses, trainable(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnseenUseWarning)
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


@pytest.mark.filterwarnings(f"ignore::autogram.{UnseenUseWarning.__name__}")
def test_a_distance_with_parameters() -> None:
    """PyTorch's function calls it where nothing is recorded."""

    class Triplets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric, self.scale = nn.Linear(3, 2), nn.Parameter(torch.randn(()))

        def forward(self, x: Tensor) -> Tensor:
            losses = F.triplet_margin_with_distance_loss(
                *x.unbind(1),
                distance_function=lambda a, b: self.metric(a - b).square().sum(1),
                margin=9.0,
                reduction="none",
            )
            return losses * self.scale

    model = Triplets()
    engine = Engine(model, verify="never")
    losses = model(torch.randn(4, 3, 3))
    jacobian = reference_jacobian(losses, trainable(model))
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
