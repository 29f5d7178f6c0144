"""DistributedDataParallel and compiled models, one inside of the other."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import distributed, nn

from autogram._compiled import autogram
from tests.unit._distributed.test_ddp import Wrap, series
from tests.unit._distributed.worlds import Tied, World, tokens
from tests.unit.processes import RANKS, Scenario

pytestmark = pytest.mark.slow

_OPTIONS = {"autogram.inner": "aot_eager"}


def _inside(model: nn.Module) -> nn.Module:
    """A wrapper around a compiled model. Dynamo splits its graph by the wrapper's buckets."""
    model.compile(backend=autogram, options=_OPTIONS)
    return Wrap(model)


def _around(model: nn.Module) -> nn.Module:
    """A compiled wrapper, of which Dynamo does the same."""
    return torch.compile(Wrap(model), backend=autogram, options=_OPTIONS)


_WAYS = {"inside": _inside, "around": _around}


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    # Else the first bucket would be larger than others. In processes that do nothing else.
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 100
    return {name: partial(series, World(Tied, tokens), wrap) for name, wrap in _WAYS.items()}


@pytest.mark.parametrize("name", _WAYS)
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
