"""The table in the documentation is what the survey of the zoo finds."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from docs import generate_models as page
from tests.unit.networks import Sine

from .specimen import CLASSES
from .survey import survey
from .zoo import CONVNEXT, MHA, Batch


@pytest.mark.slow
def test_table_is_up_to_date() -> None:
    """If it is not: `make models`."""
    committed, found = page.committed_table(), page.table()
    versions, _ = committed.split("\n", 1)
    if found.startswith(versions):  # models of another version may call other functions
        assert page.without_errors(found) == page.without_errors(committed)
    for line in found.splitlines()[4:]:
        error, *dtype = line.split("|")[-2].split()
        assert float(error) < (1e-5 if dtype == ["(float32)"] else 1e-13), line


def test_table_is_of_the_pinned_versions() -> None:
    """If it is not: `make models`."""
    pins = (page.PAGE.parent.parent / "constraints.txt").read_text(encoding="utf-8").split()
    versions = page.committed_table().split("\n", 1)[0].removesuffix(".")
    for pinned in versions.removeprefix("Measured with ").split(", "):
        assert pinned.replace(" ", "==") in pins


class Various(nn.Module):
    """One use with a rule, one behind a transformation, and one that the recorder cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.last = weight_norm(nn.Linear(4, CLASSES))
        self.frequency = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(Sine.apply(images[:, 0, 0, :4] * self.scale, self.frequency))


def test_uses_are_told_apart() -> None:
    """Each use is counted once, for what it is."""
    found = survey(replace(MHA, build=lambda _: Various()))
    assert found.model == "Various"
    assert found.rules == {"linear": 1, "mul": 1}
    assert found.fallbacks == {"the call behind `SineBackward`": 1}
    assert found.derived == 2
    assert found.is_per_sample
    assert found.error < 1e-13


def test_coupled_losses_are_told() -> None:
    """Losses that are compared with their mean."""

    def compute_losses(model: nn.Module, batch: Batch) -> Tensor:
        losses = CONVNEXT.compute_losses(model, batch)
        return losses - losses.mean()

    assert survey(CONVNEXT).is_per_sample
    assert not survey(replace(CONVNEXT, compute_losses=compute_losses)).is_per_sample
