"""Sketches: rows of J in a few random dimensions, against the rows themselves."""

import copy

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, InvalidOperandError, InvalidOptionError, Sketch
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.environment import DEVICE
from tests.unit.jacobian.test_jacobian import Language, Norms, TwoLookups, Unused


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss for each sample."""
    return model(x).flatten(1).square().sum(1)


def tokens() -> Tensor:
    return torch.randint(0, 6, (4, 5))


MODELS = {
    "dense": (lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2)), (4, 20)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)), (4, 7, 6)),
    "tied": (Language, tokens),
    "lookups": (TwoLookups, tokens),
    "unused": (Unused, (4, 4)),
    "norms": (Norms, (4, 4, 4)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)),
        (4, 2, 5, 5),
    ),
    "derived": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4, 4)),
}


@pytest.mark.parametrize("limit", [2**29, 50])
@pytest.mark.parametrize("name", MODELS)
def test_errors_are_those_of_an_unbiased_estimate(name: str, limit: int) -> None:
    """Over many seeds, errors have the size that is told, and their mean is smaller by its root."""
    make, shape = MODELS[name]
    model, x = make(), shape() if callable(shape) else torch.randn(shape)
    engine = Engine(model, memory_limit_bytes=limit)
    exact = engine.compute_gramian(losses_of(model, x))
    dimensions, seeds = 32, 200
    sketches = [engine.sketch(losses_of(model, x), dimensions, seed) for seed in range(seeds)]
    errors = torch.stack([sketch.gramian() - exact for sketch in sketches])
    norms = exact.diagonal()
    bound = ((torch.outer(norms, norms) + exact.square()) * 3 / dimensions).sqrt()
    spread = errors.square().mean(0).sqrt()
    assert bool((spread < 1.3 * bound).all())
    assert bool((spread > 0).any())
    # 4.5 standard errors of the mean; of a few hundred entries none is expected beyond.
    assert bool((errors.mean(0).abs() <= 4.5 * spread / seeds**0.5 + 1e-12).all())
    told = torch.stack([sketch.standard_error() for sketch in sketches]).mean(0)
    assert bool((told < 2 * bound).all())
    assert bool((told > 0.5 * bound).all())


def test_micro_batches_have_one_projection() -> None:
    """Rows by factors, by explicit rows and of other batches fit together, and so do products."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    engine = Engine(model)
    for length in (2, 11, 2, 30):  # of few positions, factors are projected, of many, rows
        x = torch.randint(0, 9, (6, length))
        whole = engine.sketch(losses_of(model, x), 40, seed=3)
        first, second = (engine.sketch(losses_of(model, part), 40, seed=3) for part in x.split(4))
        assert_close_to_reference(torch.cat([first.rows, second.rows]), whole.rows)
        assert_close_to_reference(first.cross_gramian(second), whole.gramian()[:4, 4:])
        twin = copy.deepcopy(model)
        rows = Engine(twin, memory_limit_bytes=1).sketch(losses_of(twin, x), 40, seed=3).rows
        assert_close_to_reference(rows, whole.rows)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


def test_a_sketch_is_linear_in_the_rows() -> None:
    """Losses that are sums of others have the sums of their rows."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    engine = Engine(model)
    x = torch.randn(6, 4)
    several = engine.sketch(model(x), 24).rows  # (B, K), in row-major order
    single = engine.sketch(model(x).sum(1), 24).rows
    assert_close_to_reference(several.view(6, 3, 24).sum(1), single)
    coupled = Engine(model, batch_dim=None).sketch(model(x).sum(1), 24).rows
    assert_close_to_reference(coupled, single)
    across = Engine(model, batch_dim=1).sketch(model(x).T.contiguous(), 24).rows
    assert_close_to_reference(across.view(3, 6, 24).sum(0), single)


def test_of_no_objective() -> None:
    model = nn.Linear(3, 1)
    engine = Engine(model)
    sketch = engine.sketch(losses_of(model, torch.randn(0, 3)), 8)
    assert sketch.rows.shape == (0, 8)
    assert sketch.gramian().shape == (0, 0)


def test_misuse() -> None:
    model = nn.Linear(3, 1)
    engine = Engine(model)
    losses = losses_of(model, torch.randn(2, 3))
    with pytest.raises(InvalidOptionError, match="dimensions with seed"):
        engine.sketch(losses, 0)
    with pytest.raises(InvalidOptionError, match="dimensions with seed"):
        engine.sketch(losses, 8, 0.5)
    with pytest.raises(InvalidOptionError, match="dimensions with seed"):
        engine.sketch(losses, True)
    sketch = engine.sketch(losses, 8)
    for other in (engine.sketch(losses, 8, 1), engine.sketch(losses, 9)):
        with pytest.raises(InvalidOperandError, match="cannot be multiplied with one of"):
            sketch.cross_gramian(other)
    with pytest.raises(InvalidOperandError, match=r"A Jacobian was given.*`engine\.sketch`"):
        sketch.cross_gramian(engine.jacobian(losses))  # type: ignore[arg-type]
    joined = Sketch(torch.cat([sketch.rows, sketch.rows]), seed=0)
    assert_close_to_reference(joined.gramian()[:2, 2:], sketch.gramian())


def test_memory_formats() -> None:
    """The projection follows from names and shapes: strides do not matter."""
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 3))
    engine = Engine(model)
    x = torch.randn(3, 3, 5, 6)
    rows = engine.sketch(losses_of(model, x), 24).rows
    model.to(memory_format=torch.channels_last)
    assert_close_to_reference(engine.sketch(losses_of(model, x), 24).rows, rows)
    layer = nn.Linear(30, 20)
    engine = Engine(layer)
    for x in (torch.randn(3, 30), torch.randn(3, 50, 30)):  # by factors, and by rows
        rows = engine.sketch(losses_of(layer, x), 24).rows
        layer.weight.data = layer.weight.data.t().contiguous().t()
        assert_close_to_reference(engine.sketch(losses_of(layer, x), 24).rows, rows)
        layer.weight.data = layer.weight.data.contiguous()


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
def test_parameters_that_are_younger_than_the_graph() -> None:
    """A parameter is known by its name, whichever forward passes are alive."""
    model = nn.Linear(3, 1)
    engine = Engine(model)
    losses = losses_of(model, torch.randn(4, 3))
    model.first, model.second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    first, second = model.first.square().sum(), model.second.exp().sum()
    old = engine.sketch(losses + first + second, 24).rows
    both = engine.sketch(losses + first, 24).rows + engine.sketch(losses + second, 24).rows
    assert_close_to_reference(both - engine.sketch(losses, 24).rows, old)


def test_autocast_does_not_round_products() -> None:
    model = nn.Linear(20, 3, dtype=torch.float32)
    sketch = Engine(model).sketch(losses_of(model, torch.randn(4, 20, dtype=torch.float32)), 24)
    expected = sketch.gramian(), sketch.cross_gramian(sketch), sketch.standard_error()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = sketch.gramian(), sketch.cross_gramian(sketch), sketch.standard_error()
    for ours, without in zip(found, expected, strict=True):
        assert torch.equal(ours, without)


class Temperature(nn.Module):
    """One number by which losses are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.t).sin().sum(1)


@pytest.mark.parametrize("limit", [2**29, 1])
def test_a_parameter_of_one_number(limit: int) -> None:
    """Its row is one number, which goes to one place with a sign."""
    model = Temperature()
    engine = Engine(model, memory_limit_bytes=limit)
    losses = model(torch.randn(4, 3))
    sketch = engine.sketch(losses, 5)
    rows = reference_jacobian(losses, model.parameters()).squeeze(1)
    assert_close_to_reference(sketch.rows.abs().sum(1), rows.abs())
    assert_close_to_reference(sketch.gramian(), torch.outer(rows, rows))
