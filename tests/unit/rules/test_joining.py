"""Rules of joining tensors."""

import pytest
import torch

from tests.unit.checks import ModelFactory, Objectives
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


def every(p, x):
    """A parameter repeated along the batch."""
    return p.expand(x.shape[0], *p.shape)


CASES = [
    pytest.param(
        call(lambda x, p: torch.cat([x, every(p, x)], 1), (2, 4)), (3, 5, 4), id="cat behind"
    ),
    pytest.param(
        call(lambda x, p: torch.cat([every(p, x), x], 1), (2, 4)), (3, 5, 4), id="cat before"
    ),
    pytest.param(call(lambda x, p: torch.cat((x, p), 1), (3, 2)), (3, 4), id="cat of own rows"),
    pytest.param(
        call(lambda x, p: torch.cat((x, p), dim=-1), (3, 2)), (3, 4), id="cat, dim by name"
    ),
    pytest.param(call(lambda x, p: torch.cat((x, p), axis=1), (3, 2)), (3, 4), id="cat, axis"),
    pytest.param(call(lambda x, p: torch.cat([p, x, p], 1), (3, 2)), (3, 4), id="cat, twice"),
    pytest.param(
        call(lambda x, p, q: torch.cat([p, x, q], 1), (3, 2), (3, 1)), (3, 4), id="cat, two of them"
    ),
    pytest.param(call(lambda x, p: torch.concat([x, p], 1), (3, 2)), (3, 4), id="concat"),
    pytest.param(call(lambda x, p: torch.concatenate([x, p], 1), (3, 2)), (3, 4), id="concatenate"),
    pytest.param(
        call(lambda x, p: torch.cat([x.mT, every(p, x)], 2).mT, (4, 2)),
        (3, 5, 4),
        id="cat, last dimension",
    ),
    pytest.param(call(lambda x, p: torch.stack([x, p], 1), (3, 4)), (3, 4), id="stack"),
    pytest.param(
        call(lambda x, p: torch.stack([p, x, p], dim=-1), (3, 4)), (3, 4), id="stack, twice"
    ),
    pytest.param(
        call(lambda x, p: torch.stack([x, every(p, x)], -2), (4,)), (3, 4), id="stack of expanded"
    ),
    pytest.param(call(lambda x, p: torch.hstack([x, p]), (3, 2)), (3, 4), id="hstack"),
    pytest.param(
        call(lambda x, p: torch.stack([x[:, 0], p], 1), (3,)), (3, 4), id="stack of vectors"
    ),
    pytest.param(
        call(lambda x, p: torch.cat([x.transpose(0, 1), p]).transpose(0, 1), (2, 3, 4)),
        (3, 5, 4),
        id="cat, sequence first",
    ),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)


def rows_along_the_batch(x, p):
    """Rows of a parameter are joined to the samples, and the model goes on with all of them."""
    return torch.cat([x, p]).cumsum(1)


@pytest.mark.parametrize(("wrap", "objectives"), [SETTINGS[1]])
def test_cat_along_the_batch(wrap: Wrap, objectives: Objectives) -> None:
    """No sample has a place in the rows of the parameter, so the losses are coupled."""
    model = call(rows_along_the_batch, (2, 4))
    assert_rule_is_exact(model, torch.randn(3, 4), wrap, objectives)
