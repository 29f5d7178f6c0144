"""Losses of every shape and number, on models with several layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import CoupledObjectivesWarning, Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    EVERY_KIND,
    ModelFactory,
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
    features,
    trainable,
)
from tests.unit.engines import counted_passes
from tests.unit.networks import Call


class Mixed(nn.Module):
    """Layers with samples first, tokens first and folded, a bias and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.second = nn.Linear(3, 4)
        self.third = nn.Linear(4, 2)
        self.offset = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:  # (b, t, 4)
        y = self.norm(self.first(x.transpose(0, 1)).tanh())  # (t, b, 3)
        y = self.second(y.reshape(-1, 3)).tanh().view(x.shape[1], x.shape[0], 4)
        return self.third(y.transpose(0, 1).reshape(-1, 4)).view(*x.shape[:2], 2) + self.offset


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv1d(4, 2, 1), nn.ELU()
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


MODELS = [
    pytest.param(Mixed, id="mixed layouts"),
    pytest.param(convolutional, id="convolutions"),
    pytest.param(perceptron, id="perceptron"),
]

# Samples, objectives of a sample; 1 to 64 in total.
NUMBERS = [(1, 1), (1, 5), (2, 1), (2, 2), (4, 1), (4, 2), (7, 3), (16, 4), (64, 1), (1, 64)]


def several(count: int, *, transposed: bool = False) -> Objectives:
    def of(output: Tensor) -> Tensor:
        found = features(output, count)
        return found.T if transposed else found

    return Objectives("", of, batch_dim=1 if transposed else "auto")


@pytest.mark.parametrize(
    "transposed", [pytest.param(False, id="(B, K)"), pytest.param(True, id="(K, B)")]
)
@pytest.mark.parametrize(("samples", "count"), NUMBERS)
@pytest.mark.parametrize("make_model", MODELS)
def test_numbers(make_model: ModelFactory, samples: int, count: int, transposed: bool) -> None:
    objectives = several(count, transposed=transposed)
    assert_gramian_is_exact(make_model, torch.randn(samples, 2, 4), objectives=objectives)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", MODELS)
def test_kinds(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(5, 2, 4), objectives=objectives)


@pytest.mark.parametrize(
    "batch_dim", [pytest.param(1, id="middle"), pytest.param(-2, id="middle, from the end")]
)
def test_batch_dim_in_the_middle(batch_dim: int) -> None:
    """The Gramian has the row-major order of the losses."""
    objectives = Objectives(
        "", lambda y: features(y, 6).unflatten(1, (2, 3)).movedim(0, 1), batch_dim=batch_dim
    )
    assert_gramian_is_exact(Mixed, torch.randn(4, 2, 4), objectives=objectives)


def test_as_many_tokens_as_samples_as_features() -> None:
    """Sizes do not tell where the samples are."""
    assert_gramian_is_exact(Mixed, torch.randn(4, 4, 4), objectives=several(4))


def test_a_sample_without_a_gradient() -> None:
    """The rows of one sample are zero, and layouts are still found."""
    x = torch.randn(4, 2, 4)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    objectives = Objectives("", lambda y: features(y, 1).squeeze(1) * mask)
    assert_gramian_is_exact(Mixed, x, objectives=objectives)


def test_losses_of_tokens_are_objectives_too() -> None:
    """One loss for each token, of shape (B, T)."""
    objectives = Objectives("", lambda y: (y + y.sin()).sum(2))
    assert_gramian_is_exact(Mixed, torch.randn(3, 5, 4)[:, :2], objectives=objectives)


COUPLINGS = [
    pytest.param(lambda y: y - y.mean(0), id="mean over the batch"),
    pytest.param(lambda y: y.cumsum(0), id="running sum"),
    pytest.param(lambda y: y * y.flip(0), id="pairs"),
    pytest.param(lambda y: y.softmax(0), id="softmax over the batch"),
]


@pytest.mark.parametrize("couple", COUPLINGS)
def test_coupled_losses_are_found(couple) -> None:
    """A warning is right here, and the Gramian too."""
    model = perceptron()
    engine = Engine(model)
    losses = features(couple(model(torch.randn(4, 2, 4))), 1).squeeze(1)
    with pytest.warns(CoupledObjectivesWarning, match="batch_dim=None"):
        gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, trainable(model))
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


def test_output_of_a_call_as_losses() -> None:
    model = Call(lambda x, p: x @ p, (4,))
    assert_gramian_is_exact(
        lambda: model, torch.randn(5, 4), objectives=Objectives("", lambda y: y)
    )


LOOPS = [
    pytest.param(lambda x, w: torch.stack([F.linear(row, w).sin() for row in x]), id="stack"),
    pytest.param(lambda x, w: torch.cat([F.linear(r, w).sin() for r in x.split(1)]), id="cat"),
]


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_over_the_samples(loop) -> None:
    """All places of a call belong to one sample."""
    assert_gramian_is_exact(lambda: Call(loop, (5, 4)), torch.randn(3, 4))


UNBATCHED = [
    pytest.param(lambda: nn.Linear(4, 5), torch.zeros(4), id="linear"),
    pytest.param(lambda: nn.LayerNorm(4), torch.zeros(4), id="layer norm"),
    pytest.param(lambda: nn.RMSNorm(4), torch.zeros(4), id="rms norm"),
    pytest.param(lambda: nn.Embedding(5, 4), torch.tensor(3), id="embedding"),
    pytest.param(lambda: nn.PReLU(), torch.zeros(()), id="prelu"),
    pytest.param(lambda: Call(torch.matmul, (4,)), torch.zeros(4), id="dot product"),
    pytest.param(
        lambda: Call(lambda x, w: F.layer_norm(x, x.shape, w), (3, 4)),
        torch.zeros(3, 4),
        id="layer norm over all",
    ),
    pytest.param(
        lambda: Call(lambda x, w: F.bilinear(x, x, w), (5, 4, 4)), torch.zeros(4), id="bilinear"
    ),
]


@pytest.mark.parametrize(("make_model", "like"), UNBATCHED)
def test_input_without_batch_dimension(make_model: ModelFactory, like: Tensor) -> None:
    """Every element of the output makes an objective, and all are of one sample."""
    x = -torch.rand(like.shape) if like.is_floating_point() else like  # a slope acts below zero
    objectives = Objectives("", lambda y: (y * 2 + y.sin()).flatten(), batch_dim=None)
    assert_gramian_is_exact(make_model, x, objectives=objectives)


@pytest.mark.parametrize("folded", [pytest.param(True, id="folded"), pytest.param(False, id="not")])
def test_layout_that_one_batch_leaves_open(folded: bool) -> None:
    """Each sample has its loss at a token of its own, and another one in the next batch.

    In the first batch, places 0 and 3 of the four have a gradient. The samples may be first or
    second there; only the next batches tell.
    """

    def forward(x: Tensor, w: Tensor) -> Tensor:
        by_token = x.transpose(0, 1)
        flat = by_token.reshape(-1, 3) if folded else by_token
        return F.linear(flat, w).tanh().view(*by_token.shape[:2], -1).transpose(0, 1)

    model = Call(forward, (4, 3))
    engine = Engine(model)
    for tokens in ([0, 1], [1, 1], [1, 0], [0, 0]):
        losses = model(torch.randn(2, 2, 3))[torch.arange(2), torch.tensor(tokens)].sum(1)
        jacobian = reference_jacobian(losses, trainable(model))
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


class Branches(nn.Module):
    """Two branches, the second of which has a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.second = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor, gate: float = 1.0, order: Tensor | None = None) -> Tensor:
        h = self.second(x)
        return self.first(x) + gate * (h if order is None else h[order])


CANCELLING: dict[str, Callable[[Tensor, int], Tensor]] = {
    # The multiples by which the search for the samples adds objectives up are 1 and 2.
    "all": lambda y, _: torch.stack([y[:, 0], y[:, 0] / -2], 1),
    "one branch": lambda y, _: torch.stack([y.sum(1), y[:, 0] / -2 + y[:, 1].sin()], 1),
    "some samples": lambda y, step: torch.stack(
        [y[:, 0], torch.where(torch.arange(5) < 3 + step % 2, y[:, 0] / -2, y[:, 0].sin())], 1
    ),
}


@pytest.mark.parametrize("batch_dim", [0, "auto"])
@pytest.mark.parametrize("name", CANCELLING)
def test_objectives_of_a_sample_that_cancel(name: str, batch_dim: Any) -> None:
    """Where a sum of them has no cotangent, each has passes of its own, once."""
    model = Branches()
    engine = Engine(model, batch_dim=batch_dim, verify="never")
    for step in range(4):
        losses = CANCELLING[name](model(torch.randn(5, 3)), step)
        jacobian = reference_jacobian(losses, trainable(model))
        with counted_passes(losses) as passes:
            gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        assert step == 0 or len(passes) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_branches_that_are_silent_at_times(fused: bool) -> None:
    """Several objectives, whose one pass shows that a branch has no cotangent, or has one again."""
    model = Branches()
    engine = Engine(model, batch_dim=0, verify="never")
    order = torch.tensor([1, 0, 2, 4, 3])
    counts = []
    for step in range(16):
        x, gate = torch.randn(5, 3), float(step % 4 == 3)
        losses = model(x, gate, order if step % 8 == 7 else torch.arange(5)).square()
        jacobian = reference_jacobian(losses, trainable(model))
        weights = torch.rand(losses.numel())
        with counted_passes(losses) as passes:
            if fused:
                model.zero_grad()
                engine.backward(losses, lambda _, w=weights: w, retain_graph=True)
                gradient = torch.cat([p.grad.flatten() for p in trainable(model)])
                assert_close_to_reference(gradient, weights @ jacobian)
            else:
                gramian = engine.compute_gramian(losses)
                assert_close_to_reference(gramian, jacobian @ jacobian.T)
        counts.append(len(passes))
    assert [counts[step] for step in (1, 2, 9, 10, 13, 14)] == [1] * 6
