"""Parts of checkpoints that run again, in versions of PyTorch without groups of passes."""

from contextlib import nullcontext

import pytest

from autogram._capture.autograd import recomputing
from tests.unit.samples import test_checkpoints as checkpoints


@pytest.mark.parametrize("name", checkpoints.PARTS)
def test_each_read_runs_the_part_and_nothing_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputing, "_Group", nullcontext)
    checkpoints.test_nothing_that_was_read_stays(name)
    checkpoints.test_places_are_inferred(name, is_nested=False)
