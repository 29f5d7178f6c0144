"""The Jacobian as an object: each product against the explicit rows."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    COUPLED,
    EVERY_KIND,
    PER_SAMPLE,
    SECOND,
    SEVERAL,
    ModelFactory,
    Objectives,
    assert_close_to_reference,
    trainable,
)
from tests.unit.engines import per_sample
from tests.unit.jacobians import assert_jacobian_is_exact, assert_operator_is
from tests.unit.networks import call
from tests.unit.parameters.test_sharing import MODELS as SHARING
from tests.unit.parameters.test_sharing import OnItsOutput


class Language(nn.Module):
    """An embedding that is tied to the output layer, and positions."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.positions = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 7, bias=False)
        if is_tied:
            self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.output(hidden.tanh())


class TwoLookups(nn.Module):
    """One table that is read twice, and sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens] * self.table[tokens.flip(1)[:, :1]] + self.table[:3].sum(0)


class Unused(nn.Module):
    """A parameter that no objective reaches, a frozen one, and one behind a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(3, 2)
        self.second.bias.requires_grad_(False)
        self.gate = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden) * self.gate + hidden


class Norms(nn.Module):
    """Scales and convolutions, grouped and not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(4, 6, 2),
            nn.GroupNorm(2, 6),
            nn.Tanh(),
            nn.Conv1d(6, 6, 1, groups=3),
            nn.Flatten(),
            nn.LazyLinear(3),
        )
        self.layers(torch.zeros(1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS = [
    *SHARING,
    pytest.param(Unused, id="unused"),
    pytest.param(Norms, id="convolutions and norms"),
    pytest.param(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), id="weight norm"),
    pytest.param(call(lambda x, w: F.linear(x, w[:3]) + x @ w[1:].T, (4, 4)), id="overlapping"),
    pytest.param(call(lambda x, w: F.linear(x, w[:2]) @ w[2:], (4, 4)), id="halves"),
    pytest.param(call(lambda x, w: x * w[0] + w[:, 1], (4, 4)), id="row and column"),
    pytest.param(call(lambda x, p: (x * p).cumsum(1), ()), id="scalar"),
    pytest.param(
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        id="transformer layer",
    ),
]


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", MODELS)
def test_products_are_exact(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_jacobian_is_exact(make_model, torch.randn(3, 4, 4), objectives=objectives)


LANGUAGE = [
    pytest.param(Language, id="tied"),
    pytest.param(lambda: Language(is_tied=False), id="not tied"),
    pytest.param(TwoLookups, id="two lookups"),
]


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", LANGUAGE)
def test_products_with_lookups_are_exact(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_jacobian_is_exact(make_model, torch.randint(6, (3, 4)), objectives=objectives)


KEPT = [("auto", 1), ("factors", 300), ("rows", 2000), ("factors", 2**29), ("rows", 2**29)]


@pytest.mark.parametrize(("keep", "limit"), KEPT)
@pytest.mark.parametrize("make_model", MODELS)
def test_what_is_kept_does_not_matter(make_model: ModelFactory, keep: str, limit: int) -> None:
    x = torch.randn(3, 4, 4)
    assert_jacobian_is_exact(make_model, x, objectives=SEVERAL, keep=keep, memory_limit_bytes=limit)


@pytest.mark.parametrize(("keep", "limit"), KEPT)
@pytest.mark.parametrize("make_model", LANGUAGE)
def test_what_is_kept_of_lookups_does_not_matter(
    make_model: ModelFactory, keep: str, limit: int
) -> None:
    tokens = torch.randint(6, (3, 4))
    assert_jacobian_is_exact(
        make_model, tokens, objectives=SEVERAL, keep=keep, memory_limit_bytes=limit
    )


# Models, and inputs of two sizes.
PAIRS = [
    pytest.param(lambda: OnItsOutput(nn.Linear(4, 4)), ((3, 4, 4), (5, 2, 4)), id="shared"),
    pytest.param(Norms, ((3, 4, 4), (2, 4, 4)), id="convolutions and norms"),
    pytest.param(Unused, ((3, 4), (1, 4)), id="unused"),
    pytest.param(
        call(lambda x, w: F.linear(x, w[:3]) + x @ w[1:].T, (4, 4)),
        ((3, 4), (2, 4)),
        id="overlapping",
    ),
    pytest.param(call(lambda x, w: x * w[0] + w[:, 1], (4, 4)), ((3, 4), (2, 4)), id="crossing"),
    pytest.param(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        ((3, 4), (2, 6, 4)),
        id="weight norm",
    ),
    pytest.param(Language, ((3, 4), (5, 2)), id="tied"),
    pytest.param(TwoLookups, ((3, 4), (2, 5)), id="two lookups"),
]
SETTINGS = [
    pytest.param(PER_SAMPLE, PER_SAMPLE, id="(B,) (B,)"),
    pytest.param(SEVERAL, PER_SAMPLE, id="(B, K) (B,)"),
    pytest.param(SECOND, SEVERAL, id="(K, B) (B, K)"),
    pytest.param(COUPLED, SEVERAL, id="coupled (B, K)"),
]


@pytest.mark.parametrize("limit", [1, 300, 2**29])
@pytest.mark.parametrize(("first", "second"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shapes"), PAIRS)
def test_cross_gramian_of_two_batches(
    make_model: ModelFactory,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    first: Objectives,
    second: Objectives,
    limit: int,
) -> None:
    """From two graphs, of which the first is dropped, by two engines on one model."""
    model = make_model()
    found, expected = [], []
    for shape, objectives in zip(shapes, (first, second), strict=True):
        engine = Engine(model, batch_dim=objectives.batch_dim, memory_limit_bytes=limit)
        is_text = isinstance(model, (Language, TwoLookups))
        inputs = torch.randint(6, shape) if is_text else torch.randn(shape)
        losses = objectives.of(model(inputs))
        expected.append(reference_jacobian(losses, trainable(model)))
        found.append(engine.jacobian(losses))
    for _ in range(2):  # rows may be kept from the second product on
        assert_close_to_reference(found[0].cross_gramian(found[1]), expected[0] @ expected[1].T)
        assert_close_to_reference(found[1].cross_gramian(found[0]), expected[1] @ expected[0].T)


def test_cross_gramian_of_a_lookup_and_a_layer() -> None:
    """The first Jacobian reads a table by tokens, and the second multiplies by it."""
    table = nn.Embedding(7, 4)
    layer = nn.Linear(4, 7, bias=False)
    layer.weight = table.weight
    one, two = Engine(table), Engine(layer)
    losses = [per_sample(table(torch.randint(7, (3, 5)))), per_sample(layer(torch.randn(2, 4)))]
    first, second = one.jacobian(losses[0]), two.jacobian(losses[1])
    expected = [reference_jacobian(x, [table.weight]) for x in losses]
    assert_close_to_reference(first.cross_gramian(second), expected[0] @ expected[1].T)
    assert_close_to_reference(second.cross_gramian(first), expected[1] @ expected[0].T)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", MODELS)
def test_other_values(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_steps_are_exact(make_model(), torch.randn(3, 3, 4, 4), objectives)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", LANGUAGE)
def test_other_values_of_lookups(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_steps_are_exact(make_model(), torch.randint(6, (3, 3, 4)), objectives)


def assert_steps_are_exact(model: nn.Module, inputs: Tensor, objectives: Objectives) -> None:
    """Assert that what the first step has settled is right in the others."""
    engine = Engine(model, batch_dim=objectives.batch_dim)
    for x in inputs:
        losses = objectives.of(model(x))
        expected = reference_jacobian(losses, trainable(model))
        assert_close_to_reference(engine.compute_gramian(losses), expected @ expected.T)
        assert_operator_is(engine.jacobian(losses), expected)
