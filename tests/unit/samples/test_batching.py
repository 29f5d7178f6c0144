"""Operations whose batching rules PyTorch has wrong, wherever several cotangents go together."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from tests.unit.checks import irregular
from tests.unit.engines import assert_exact, batch

B = 4  # also the number of objectives, which go together as one sample

Function = Callable[[Tensor], Tensor]


def cdist(h: Tensor) -> Tensor:
    return torch.cdist(h, irregular(5, 3), p=1.0)


def roll(h: Tensor) -> Tensor:
    return h * h.sum().roll(1)


def scattered_cdist(h: Tensor) -> Tensor:
    """One by one, each cotangent needs memory of its own: PyTorch reads from the start of it."""
    return torch.as_strided_scatter(cdist(h), 2 * h[:1, 0], (1,), (1,), 1)


def masked_select(h: Tensor) -> Tensor:
    """The mask has as many rows as there are cotangents, for which PyTorch takes them."""
    return h.sum(1).masked_select(~torch.eye(B, dtype=torch.bool)).view(B, B - 1)


WRONG = [cdist, scattered_cdist, roll, masked_select]


def mixed(y: Tensor) -> Tensor:
    """Objectives that each depend on everything, ``(B,)``."""
    return irregular(B, y.numel()) @ (y.flatten() + 0.3 * y.flatten().sin())


class Between(nn.Module):
    """A function of activations, inside of the model."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


class OfParameter(nn.Module):
    """A function of a parameter alone, that meets the samples afterwards."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.table, self.function = nn.Parameter(batch(B, 3)), function

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) * self.function(self.table).flatten().unsqueeze(1)


class InTransform(nn.Module):
    """A function of activations and a parameter, inside of a transform of `torch.func`."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.scale, self.function = nn.Linear(3, 3), nn.Parameter(batch(3)), function

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vjp(self.function, self.first(x) * self.scale)[0]


class Scripted(nn.Module):
    """The same in a call that the recorder cannot see into."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(3, 3), nn.Parameter(batch(3))
        traced = torch.jit.trace(lambda h, scale: function(h * scale), (batch(B, 3), batch(3)))
        self.call = lambda h: traced(h, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.first(x))


def assert_batched_only_where_that_is_right(model: nn.Module, losses_of: Function) -> None:
    """Assert that a series of calls is exact, without the help of a verification."""
    engine = Engine(model, batch_dim=None, verify="never")
    for _ in range(2):
        assert_exact(engine, losses_of(model(batch(B, 3))), model)


@pytest.mark.parametrize("function", WRONG)
class TestPlaces:
    def test_among_the_losses(self, function: Function) -> None:
        assert_batched_only_where_that_is_right(nn.Linear(3, 3), lambda y: mixed(function(y)))

    def test_in_the_model(self, function: Function) -> None:
        assert_batched_only_where_that_is_right(Between(function), mixed)

    def test_in_a_derived_tensor(self, function: Function) -> None:
        assert_batched_only_where_that_is_right(OfParameter(function), mixed)

    def test_of_a_parameter_among_the_losses(self, function: Function) -> None:
        model = nn.Linear(3, B)
        assert_batched_only_where_that_is_right(
            model, lambda y: mixed(y) + mixed(function(model.weight))
        )

    def test_in_a_transform(self, function: Function) -> None:
        assert_batched_only_where_that_is_right(InTransform(function), mixed)

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_in_a_scripted_call(self, function: Function) -> None:
        assert_batched_only_where_that_is_right(Scripted(function), mixed)


def test_as_the_losses_themselves() -> None:
    """Nothing is between the cotangents of single objectives and the scatter."""
    assert_batched_only_where_that_is_right(nn.Linear(3, 3), scattered_cdist)


def test_with_several_objectives_for_each_sample() -> None:
    """Where the samples are known, cotangents of the K objectives go together."""
    model = nn.Linear(3, 3)
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(2):
        losses = cdist(model(batch(B, 3))) @ irregular(5, 2)  # (B, 2)
        assert_exact(engine, losses, model)


class Fallback(nn.Module):
    """A call without a rule that reads a parameter itself."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.table, self.function = nn.Parameter(batch(*shape)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.table)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        pytest.param(lambda x, p: torch.cdist(x, p, p=1.0), (5, 3), id="cdist"),
        pytest.param(
            lambda x, p: p.masked_select((x[:, :1] > 9) | ~torch.eye(B, dtype=torch.bool)),
            (B,),
            id="masked_select",
        ),
    ],
)
def test_in_a_call_without_a_rule(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    assert_batched_only_where_that_is_right(Fallback(function, *shape), mixed)
