"""The tables of the page on scaling are those that its script computes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "docs" / "generate_scaling.py"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("generate_scaling", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "generate_scaling", module)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(generator: ModuleType) -> None:
    text = generator.PAGE.read_text(encoding="utf-8")
    assert generator.page() == text
    assert f"{generator.most_ranks():.0f} ranks here" in text


def test_a_figure_that_was_changed_is_seen(generator: ModuleType, tmp_path: Path) -> None:
    text = generator.PAGE.read_text(encoding="utf-8")
    generator.PAGE = tmp_path / "scaling.md"
    generator.PAGE.write_text(text.replace("| 4000 |", "| 4001 |"), encoding="utf-8")
    assert generator.page() != generator.PAGE.read_text(encoding="utf-8")


def test_the_sizes_of_the_models(generator: ModuleType) -> None:
    """GPT-2 small has 124 million parameters, of which the script leaves out small ones."""
    assert 120e6 < generator.GPT2.parameters < 125e6
    assert 6.5e9 < generator.LLAMA.parameters < 6.8e9
