"""Products of one Jacobian with many others, each of which reads what the first ones formed."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autogram import ChangedTensorError, Engine, Jacobian, concatenate
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.jacobian.test_jacobian import Language

TOKENS, WIDTH, SAMPLES = 14, 32, 6
ROWS = 2 * SAMPLES * TOKENS * WIDTH**2  # operations that form the rows of a layer


def make_model() -> nn.Module:
    """Layers whose rows have more elements than factors, and whose products cost less from rows."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss for each sample."""
    return model(x).flatten(1).square().sum(1)


def inputs(samples: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(samples, tokens, WIDTH)


def flops_of(first: Jacobian, second: Jacobian) -> int:
    """How many operations their products take."""
    with FlopCounterMode(display=False) as counter:
        first.cross_gramian(second)
    return counter.get_total_flops()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_of_few_samples_are_formed_once(parts: int, is_first: bool) -> None:
    """From the second product on, only those of the new Jacobian are."""
    model = make_model()
    engine = Engine(model, verify="never")
    few = concatenate([engine.jacobian(losses_of(model, inputs(SAMPLES))) for _ in range(parts)])
    flops = []
    for _ in range(4):
        pair = few, engine.jacobian(losses_of(model, inputs(SAMPLES)))
        flops.append(flops_of(*(pair if is_first else pair[::-1])))
    assert flops[1] == flops[0]  # they are formed once more, and kept
    assert flops[2] == flops[3] == flops[0] - 2 * parts * ROWS


def test_rows_are_kept_where_that_was_asked_for() -> None:
    """``"factors"`` keeps none."""
    model = make_model()
    engine = Engine(model, verify="never")
    few = engine.jacobian(losses_of(model, inputs(SAMPLES)), keep="factors")
    others = [engine.jacobian(losses_of(model, inputs(SAMPLES))) for _ in range(3)]
    first, *later = [flops_of(few, other) for other in others]
    assert later == [first, first]


def test_rows_are_kept_where_later_products_cost_less() -> None:
    """Of few positions, products of factors cost less than those of rows."""
    model = make_model()
    engine = Engine(model, verify="never")
    few = engine.jacobian(losses_of(model, inputs(SAMPLES, tokens=1)))
    others = [engine.jacobian(losses_of(model, inputs(SAMPLES, tokens=1))) for _ in range(3)]
    first, *later = [flops_of(few, other) for other in others]
    assert later == [first, first]
    assert first < ROWS


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_are_kept_while_there_is_room(parts: int) -> None:
    """The limit holds for all parameters and all parts: here, there is room for one layer."""
    model = make_model()
    limit = 4 * (parts * SAMPLES * WIDTH**2 * 3 // 2)
    engine = Engine(model, verify="never", memory_limit_bytes=limit)
    few = concatenate([engine.jacobian(losses_of(model, inputs(SAMPLES))) for _ in range(parts)])
    others = [engine.jacobian(losses_of(model, inputs(SAMPLES))) for _ in range(4)]
    flops = [flops_of(few, other) for other in others]
    assert flops[0] - flops[2] == flops[0] - flops[3] == parts * ROWS


@pytest.mark.parametrize("is_first", [True, False])
def test_series_of_products_are_exact(is_first: bool) -> None:
    """A table that is read by tokens and multiplied by, in batches of many lengths."""
    model = Language()
    engine = Engine(model)

    def pair(samples: int, tokens: int) -> tuple[Jacobian, Tensor]:
        losses = losses_of(model, torch.randint(6, (samples, tokens)))
        return engine.jacobian(losses), reference_jacobian(losses, trainable(model))

    few, rows = pair(2, 5)
    for samples, tokens in [(3, 5), (1, 4), (4, 5), (2, 1), (3, 5)]:
        other, rows_of_other = pair(samples, tokens)
        if is_first:
            assert_close_to_reference(few.cross_gramian(other), rows @ rows_of_other.T)
        else:
            assert_close_to_reference(other.cross_gramian(few), rows_of_other @ rows.T)
        assert_close_to_reference(few.gramian(), rows @ rows.T)


def test_factors_of_kept_rows_are_still_checked() -> None:
    model = make_model()
    engine = Engine(model)
    x = inputs(SAMPLES)
    few = engine.jacobian(losses_of(model, x))
    for _ in range(3):
        other = engine.jacobian(losses_of(model, inputs(SAMPLES)))
        few.cross_gramian(other)
    x.mul_(2)
    with pytest.raises(ChangedTensorError, match="was changed in place since"):
        few.cross_gramian(other)


def test_kept_rows_are_freed_with_their_jacobian() -> None:
    model = make_model()
    engine = Engine(model)
    few = engine.jacobian(losses_of(model, inputs(SAMPLES)))
    for _ in range(3):
        few.cross_gramian(engine.jacobian(losses_of(model, inputs(SAMPLES))))
    dead = weakref.ref(few)
    del few
    assert dead() is None
