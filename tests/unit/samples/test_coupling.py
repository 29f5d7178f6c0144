"""Losses that are not per-sample, or not every time, and passes that cannot be batched."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError
from tests.unit.checks import Objectives, assert_gramian_is_exact, features
from tests.unit.engines import assert_exact, batch, mlp, per_sample

B = 4
PLACES = [
    Objectives("(B,) from the end", lambda y: features(y, 1).squeeze(1), -1),
    Objectives("(B, K) from the end", lambda y: features(y, 3), -2),
    Objectives("(K, B) from the end", lambda y: features(y, 3).T, -1),
    Objectives("(1, B)", lambda y: features(y, 1).T, 1),
    Objectives("(2, 3, B)", lambda y: features(y, 6).unflatten(1, (2, 3)).movedim(0, 2), -1),
    Objectives("(1,)", lambda y: features(y, 1).sum(0)),
    Objectives("(2, B, 3) as one sample", lambda y: features(y, 6).view(B, 2, 3).mT, None),
]


@pytest.mark.parametrize("objectives", PLACES, ids=repr)
def test_rarer_places_of_samples_in_the_losses(objectives: Objectives) -> None:
    """Counted from the end, and dimensions of size one."""
    assert_gramian_is_exact(mlp, batch(B, 3), objectives=objectives)


def test_objectives_that_add_up_to_a_constant() -> None:
    """With equal weights for all objectives of a sample, their cotangent would be zero."""
    objectives = Objectives("probabilities", lambda y: y.softmax(1), 0)
    assert_gramian_is_exact(mlp, batch(B, 3), objectives=objectives)


@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
def test_no_objectives(batch_dim: Any) -> None:
    """An empty batch has an empty Gramian."""
    model = mlp()
    engine = Engine(model, batch_dim=batch_dim)
    assert engine.compute_gramian(per_sample(model(batch(0, 3)))).shape == (0, 0)
    assert_exact(engine, per_sample(model(batch(B, 3))), model)


class Normalised(nn.Module):
    """Batch normalisation in training mode behind a layer: the samples meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


@pytest.mark.parametrize("each", [1, 3])
def test_batch_normalisation_in_training_mode_as_one_sample(each: int) -> None:
    """With `batch_dim=None` there is nothing to warn of."""
    objectives = Objectives("", lambda y: features(y, each), None)
    assert_gramian_is_exact(Normalised, batch(6, 3), objectives=objectives)


def test_auto_warns_once_where_samples_are_mixed() -> None:
    """The warning names the place, points at the user's line, and comes once for an engine."""
    model = Normalised()
    engine = Engine(model)
    losses = per_sample(model(batch(6, 3)))
    with pytest.warns(CoupledObjectivesWarning, match=r"`first\.weight`") as found:
        engine.compute_gramian(losses)
    assert len(found) == 1
    assert found[0].filename == __file__
    assert "batch_dim=None" in str(found[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (6, 6, 5):
            assert_exact(engine, per_sample(model(batch(size, 3))), model)


def test_samples_are_found_again_in_evaluation_mode() -> None:
    """What was learnt in training mode does not hold in evaluation mode, and the other way round.

    An engine that must have samples shows it: it raises in the one mode and not in the other.
    """
    model = Normalised()
    engine = Engine(model, batch_dim=0)
    x = batch(6, 3)
    for _ in range(2):
        model.eval()
        assert_exact(engine, per_sample(model(x)), model)
        model.train()
        losses = per_sample(model(x))
        with pytest.raises(MixedSamplesError):
            engine.compute_gramian(losses)


def test_batch_normalisation_before_every_parameter_mixes_nothing() -> None:
    """Where no parameter is used before the samples meet, the losses are per-sample."""
    assert_gramian_is_exact(
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)),
        batch(6, 3),
        objectives=Objectives("(B,)", per_sample, 0),
    )


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "contrast": lambda y: (y @ y.T).logsumexp(1),
    "neighbours": lambda y: (y + y.roll(1, 0)).square().sum(1),
    "share of the batch": lambda y: y.square().sum(1).log_softmax(0),
    "centred": lambda y: y.sum(1) - y.sum(1).mean(),
    "standardised": lambda y: (y.sum(1) - y.sum(1).mean()) / y.sum(1).std(),
    "combinations": lambda y: torch.randn(len(y), len(y)) @ y.sum(1),
    "first and last meet": lambda y: y.sum(1) + torch.eye(len(y))[0] * y[-1].prod(),
    "some of them": lambda y: y.sum(1)[[0, 2, 5]],
    "reversed": lambda y: per_sample(y).flip(0),
    "sorted": lambda y: per_sample(y).sort().values,
    "largest": lambda y: per_sample(y).topk(3).values,
    "twice": lambda y: per_sample(y).repeat(2),
    "each twice": lambda y: per_sample(y).repeat_interleave(2),
    "with one of the batch": lambda y: torch.cat([per_sample(y), y.std(0).sum().view(1)]),
    "two losses after each other": lambda y: torch.cat([per_sample(y), y.sin().sum(1)]),
    "permuted and with one of the batch": lambda y: torch.cat(
        [per_sample(y).flip(0), per_sample(y).logsumexp(0).view(1)]
    ),
}


# Losses of some of the samples, or in another order: each still has places of its own.
CHOSEN = ("some of them", "largest", "reversed", "sorted")
OTHER_NUMBER = (
    "twice",
    "each twice",
    "with one of the batch",
    "two losses after each other",
    "permuted and with one of the batch",
)  # not one loss for each sample


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("samples", [6, 7])
@pytest.mark.parametrize("name", COUPLED)
def test_auto_is_exact_for_losses_that_are_not_per_sample(name: str, samples: int) -> None:
    """Whatever the losses are, "auto" gives the right answer."""
    model = mlp()
    engine = Engine(model)
    for _ in range(2):
        assert_exact(engine, COUPLED[name](model(batch(samples, 3))), model)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_become_coupled(name: str) -> None:
    """What was learnt from per-sample losses of the same shape must not be used."""
    model = mlp()
    engine = Engine(model)
    x = batch(6, 3)
    count = COUPLED[name](model(x)).numel()
    assert_exact(engine, per_sample(model(batch(count, 3))), model)
    assert_exact(engine, per_sample(model(x)), model)
    assert_exact(engine, COUPLED[name](model(x)), model)


@pytest.mark.parametrize("name", [name for name in COUPLED if name not in CHOSEN + OTHER_NUMBER])
def test_coupled_losses_are_refused_as_samples(name: str) -> None:
    """Never a wrong number instead, also after losses that were per-sample."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    assert_exact(engine, per_sample(model(batch(6, 3))), model)
    losses = COUPLED[name](model(batch(6, 3)))
    with pytest.raises(MixedSamplesError, match=r"`2\.weight`"):
        engine.compute_gramian(losses)


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_samples_need_not_be_coupled(name: str) -> None:
    """Exact, and no warning."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        assert_exact(engine, COUPLED[name](model(batch(6, 3))), model)


def test_selections_of_equal_size() -> None:
    """Losses of the valid samples only: as many each time, but others."""
    model = mlp()
    engine = Engine(model)
    for chosen in ([0, 2, 4, 6], [0, 1, 4, 7], [0, 1, 2, 3], [1, 2, 5, 6]):
        assert_exact(engine, per_sample(model(batch(8, 3)))[chosen], model)


def test_masks_of_equal_size() -> None:
    """The same with a mask, which is a constant of the user's, outside of the forward."""
    model = mlp()
    engine = Engine(model)
    for chosen in ([0, 2, 4, 6], [0, 1, 4, 7], [0, 1, 2, 3]):
        mask = torch.zeros(8, dtype=torch.bool)
        mask[chosen] = True
        assert_exact(engine, per_sample(model(batch(8, 3))).masked_select(mask), model)
        assert_exact(engine, per_sample(model(batch(8, 3)))[mask], model)


def test_permutations_inside_the_forward() -> None:
    """Another order at each call, the first of which changes nothing."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, order: Tensor) -> Tensor:
            return self.last(self.first(x)[order].tanh())

    model = Model()
    engine = Engine(model)
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 1, 2, 0]):
        assert_exact(engine, per_sample(model(batch(4, 3), torch.tensor(order))), model)


class Heads(nn.Module):
    """A trunk with one head for each of three tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        shared = self.trunk(x).tanh()
        return [head(shared) for head in self.heads]


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("batch_dim", ["auto", None])
@pytest.mark.parametrize("samples", [1, 3, 6])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trunk trained", "trunk frozen"])
def test_losses_of_tasks(samples: int, is_frozen: bool, batch_dim: Any) -> None:
    """One loss for each task over the whole batch, as many samples as tasks or not."""
    model = Heads()
    model.trunk.requires_grad_(not is_frozen)
    engine = Engine(model, batch_dim=batch_dim)
    for _ in range(2):
        losses = torch.stack([output.square().mean() for output in model(batch(samples, 3))])
        assert_exact(engine, losses, model)


def test_losses_of_tasks_for_each_sample() -> None:
    """Tasks side by side, one column of the losses each."""
    objectives = Objectives("(B, tasks)", lambda ys: torch.stack([*map(per_sample, ys)], 1), 0)

    class Model(Heads):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(super().forward(x), 1)

    of_stacked = Objectives(objectives.name, lambda y: objectives.of(y.unbind(1)), 0)
    assert_gramian_is_exact(Model, batch(5, 3), objectives=of_stacked)


def test_auto_takes_tasks_first_for_coupled() -> None:
    """Losses of shape (K, B) without `batch_dim=1` are exact too, with a warning."""
    model = mlp()
    engine = Engine(model)
    losses = features(model(batch(4, 3)), 2).T
    with pytest.warns(CoupledObjectivesWarning):
        engine.compute_gramian(losses)
    assert_exact(engine, losses, model)


def _function(derivative: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A sine with its own backward pass."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return derivative(*ctx.saved_tensors, g)

    return Sine


WITHOUT_BATCHING_RULE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numpy": lambda x, g: x.new_tensor(g.cpu().numpy() * x.detach().cos().cpu().numpy()),
    "item": lambda x, g: g * x.cos() if g.sum().item() > -1e9 else g,
    "branch": lambda x, g: g * x.cos() if g.abs().max() >= 0 else g,
    "list": lambda x, g: x.new_tensor(g.tolist()) * x.cos(),
    "in place": lambda x, g: x.cos().mul_(g),
    "out": lambda x, g: torch.mul(g, x.cos(), out=torch.empty_like(x)),
    "random": lambda x, g: g * x.cos() + 0 * torch.rand_like(g),
    "detached": lambda x, g: torch.stack([g[i].data * x[i].cos() for i in range(len(x))]),
}


@pytest.mark.parametrize("batch_dim", ["auto", None])
@pytest.mark.parametrize("name", WITHOUT_BATCHING_RULE)
def test_operation_without_a_batching_rule(name: str, batch_dim: Any) -> None:
    """Several objectives per sample go one by one, where a batched pass is not possible."""
    function = _function(WITHOUT_BATCHING_RULE[name])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(function.apply(self.first(x)))

    objectives = Objectives("", lambda y: features(y, 3), batch_dim)
    assert_gramian_is_exact(Model, batch(4, 3), objectives=objectives)


def test_pytorch_does_not_warn_of_a_slow_batched_pass() -> None:
    """What is missing from PyTorch's batching rules is not the user's business."""

    def ctc(output: Tensor) -> Tensor:
        targets = torch.tensor([[1, 2], [2, 3], [1, 4], [3, 1]])
        lengths = torch.full((4,), 6), torch.full((4,), 2)
        return nn.functional.ctc_loss(output.log_softmax(2), targets, *lengths, reduction="none")

    objectives = Objectives("connectionist", ctc, None)
    assert_gramian_is_exact(lambda: nn.Linear(3, 5), batch(6, 4, 3), objectives=objectives)


class Squares(nn.Module):
    """A function of each sample by itself, mapped over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(3, 4), nn.Parameter(batch(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda y: (y @ self.weight).tanh())(self.first(x))


@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
def test_batched_map_in_the_forward(batch_dim: Any) -> None:
    """Inside of `torch.vmap`, tensors have a dimension that is not seen."""
    assert_gramian_is_exact(Squares, batch(4, 3), objectives=Objectives("", per_sample, batch_dim))


class Spectral(nn.Module):
    """A layer between Fourier transforms, with complex numbers made from real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(batch(3, 3, 4, 2)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x, dim=1)[:, :4]
        modes = torch.einsum("bni,ion->bno", modes, torch.view_as_complex(self.weight))
        modes = modes * torch.view_as_complex(self.weight)[0, 0, :, None]
        return self.last(torch.fft.irfft(modes, n=8, dim=1).tanh())


@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
def test_complex_activations(batch_dim: Any) -> None:
    """The gradient of a complex product has a conjugate in it."""
    assert_gramian_is_exact(
        Spectral, batch(5, 8, 3), objectives=Objectives("", per_sample, batch_dim)
    )
