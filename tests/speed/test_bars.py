"""The picture of the README shows what was measured, and other ways compute the same."""

import json
from pathlib import Path

import pytest
import torch

from tests.speed import bars
from tests.speed.bars import Bar
from tests.speed.measure import gramian_error
from tests.speed.memory import peak_of, resident
from tests.speed.rows import VMAP, OpacusEngine
from tests.speed.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
BARS = [
    Bar("mlp", "SGD", 0.1, 1.0, 2**20),
    Bar("mlp", "autogram", 0.15, 1.5, 2**21, 1e-15),
    Bar("mlp", "torchjd", 5.0, 50.0, 2**22, 0.1),
    Bar("mlp", "Opacus", failure="it does not"),
]


def test_the_page_has_what_was_measured() -> None:
    """The table of the documentation is that of the file which the picture is drawn from."""
    found = json.loads((ROOT / "docs" / "pictures" / "speed.json").read_text("utf-8"))["bars"]
    table = bars.make_table([Bar(**bar) for bar in found])
    assert table in (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert {bar["model"] for bar in found} == set(WORKLOADS)
    assert all(bar["error"] < 1e-10 for bar in found if bar["way"] == "autogram")


def test_bars_show_ratios_failures_and_wrong_results() -> None:
    """Long bars are cut, and their number is there."""
    panel, empty = bars.draw(BARS).axes
    assert not empty.get_visible()
    shown = [bar.get_width() for bar in panel.patches]
    pairs = [(1, 1), (1.5, 2), (50, 4), (0, 0)]  # time and memory
    assert shown == [min(ratio, bars.LONGEST) for pair in pairs for ratio in pair]
    texts = [text.get_text() for text in panel.texts]
    assert texts == ["1.0", "1.0", "1.5", "2.0", "50.0 »  wrong result", "4.0", "fails", ""]
    table = bars.make_table(BARS)
    assert "| torchjd | 50.00 | 4.00 | **wrong**: 1e-01 |" in table
    assert "| SGD | 100.0 ms | 1 MB |  |" in table


@pytest.mark.slow
def test_rows_of_torch_func_are_right() -> None:
    """The Gramian in float64, against plain autograd."""
    assert bars.error_of(WORKLOADS["mlp"], VMAP) < 1e-12
    assert bars.error_of(WORKLOADS["mlp"], "fused") < 1e-12


# PyTorch warns of the hooks of Opacus, which sees no input that requires a gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.slow
def test_rows_of_opacus_are_right() -> None:
    """The Gramian and the gradients, where it is installed."""
    pytest.importorskip("opacus")
    assert gramian_error(WORKLOADS["mlp"], OpacusEngine) < 1e-12


@pytest.mark.skipif(not resident(), reason="only Linux tells how much memory a process holds")
def test_peak_of_a_step() -> None:
    """At least as much as the step has at once."""
    before = resident()
    torch.ones(2**20)
    peak = peak_of(lambda: torch.ones(2**25, dtype=torch.float32).sum())
    assert peak - before > 0.9 * 4 * 2**25
