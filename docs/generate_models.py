"""Writes the table of docs/models.md from the models that the tests run: ``make models``."""

from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.unit.models.survey import Finding, survey
from tests.unit.models.zoo import SPECIMENS

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- begin of the table: written by `make models` -->", "<!-- end of the table -->"


def table() -> str:
    """The table, with a line for each model and one for the versions."""
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    head = ["model", "class", "rules", "without a rule", "transformed", "samples", "error"]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line([name, *_cells(survey(specimen))]) for name, specimen in SPECIMENS.items()]
    return "\n".join([f"Measured with {versions}.", "", *lines])


def committed_table() -> str:
    """The table in the page as it is."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def without_errors(text: str) -> str:
    """A table without its last column, which is rounding and differs from machine to machine."""
    return "\n".join(
        line.rsplit("|", 2)[0] if line.startswith("|") else line for line in text.splitlines()
    )


def _cells(finding: Finding) -> list[str]:
    """The cells of the table for a model."""
    return [
        f"`{finding.model}`",
        _counts(finding.rules),
        _counts(finding.fallbacks),
        str(finding.derived or ""),
        "apart" if finding.is_per_sample else "coupled",
        f"{finding.error:.0e}" + (" (float32)" if finding.dtype == torch.float32 else ""),
    ]


def _counts(uses: Counter[str]) -> str:
    """Functions with the number of their uses, the most frequent first."""
    ordered = sorted(uses.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"`{function}` {count}" for function, count in ordered)


def _line(cells: list[str]) -> str:
    """A line of a table in Markdown."""
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Put the table into the page."""
    torch.set_default_dtype(torch.float64)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
