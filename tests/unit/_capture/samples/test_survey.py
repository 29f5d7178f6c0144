"""What two graphs have in common, and what tells them apart."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._capture.samples.survey import Survey, _digest
from tests.unit.engines import batch

LAYER = nn.Linear(3, 4, dtype=torch.float64)
Losses = Callable[[Tensor], Tensor]


@pytest.fixture
def survey_of() -> Callable[[Tensor], Survey]:
    """Surveys for the taps of one engine."""
    engine = Engine(LAYER)
    return lambda losses: Survey(engine._channel, losses)


def hidden(samples: int = 4) -> Tensor:
    """Activations of the layer, ``(samples, 4)``."""
    return LAYER(batch(samples, 3)).tanh()


EQUAL: dict[str, tuple[Losses, Losses]] = {
    "other data": (lambda h: h.sum(1), lambda h: h.sum(1)),
    "another number with a fraction": (
        lambda h: nn.functional.leaky_relu(h, 0.1).sum(1),
        lambda h: nn.functional.leaky_relu(h, 0.2).sum(1),
    ),
    "values of an index": (
        lambda h: h[torch.tensor([0, 1, 2, 3])].sum(1),
        lambda h: h[torch.tensor([3, 1, 2, 0])].sum(1),
    ),
}
DIFFERENT: dict[str, tuple[Losses, Losses]] = {
    # Of -1 and -2, Python's `hash` is the same.
    "a negative dimension": (lambda h: h.cumsum(-1).sum(1), lambda h: h.cumsum(-2).sum(1)),
    "an argument in a tuple": (
        lambda h: h.roll((0,), (0,)).sum(1),
        lambda h: h.roll((1,), (0,)).sum(1),
    ),
    "a string": (
        lambda h: nn.functional.gelu(h).sum(1),
        lambda h: nn.functional.gelu(h, approximate="tanh").sum(1),
    ),
    "whether a number is zero": (
        lambda h: nn.functional.leaky_relu(h, 0.1).sum(1),
        lambda h: nn.functional.leaky_relu(h, 0.0).sum(1),
    ),
    "the wiring": (lambda h: (h + h.flip(0).sin()).sum(1), lambda h: (h + h.flip(0)).sin().sum(1)),
    "which operand": (
        lambda h: (h.sin() - h.flip(0).sin()).sum(1),
        lambda h: (h.flip(0).sin() - h.sin()).sum(1),
    ),
    "which result of a node": (lambda h: h.sin().unbind(1)[0], lambda h: h.sin().unbind(1)[1]),
    "which dimension an index is of": (
        lambda h: h[torch.arange(4)].sum(1),
        lambda h: h[:, torch.arange(4)].sum(1),
    ),
    "the size": (lambda h: h[:, :2].sum(1), lambda h: h[:, :3].sum(1)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_changes_no_key(name: str, survey_of: Callable[[Tensor], Survey]) -> None:
    one, other = (survey_of(of(hidden())) for of in EQUAL[name])
    assert one.key == other.key


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_the_key(name: str, survey_of: Callable[[Tensor], Survey]) -> None:
    one, other = (survey_of(of(hidden())) for of in DIFFERENT[name])
    assert one.key != other.key


def test_sizes_are_no_part_of_the_structure(survey_of: Callable[[Tensor], Survey]) -> None:
    one, other = (survey_of(hidden(n).sum(1)) for n in (4, 5))
    assert one.structure == other.structure
    assert one.key != other.key


def test_objects_are_told_apart_by_their_names() -> None:
    """Nodes may save dtypes, and symbolic sizes."""
    one, other = [(1, torch.float16), "a", None], [(1, torch.float32), "a", None]
    assert _digest(one) == _digest(list(one))
    assert _digest(one) != _digest(other)


def test_uses_that_the_losses_reach(survey_of: Callable[[Tensor], Survey]) -> None:
    """Those of another forward pass are not among them."""
    other = hidden()
    survey = survey_of(hidden().sum(1))
    assert [use.function for use in survey.uses] == ["linear"]
    assert len(survey_of(other.sum(1) + hidden().sum(1)).uses) == 2


def test_leaves_that_are_reached_past_every_tap(survey_of: Callable[[Tensor], Survey]) -> None:
    scale = torch.ones((), requires_grad=True)
    x = batch(4, 3).requires_grad_()
    survey = survey_of(LAYER(x).sum(1) * scale + LAYER.bias.sum())
    assert {id(leaf) for leaf in survey.leaves_of_tail} == {id(scale), id(LAYER.bias)}
    assert {id(leaf) for leaf in survey.leaves} == {
        id(scale),
        id(x),
        id(LAYER.bias),
        id(LAYER.weight),
    }
