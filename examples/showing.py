"""Shows the results of the examples: tables, and pictures in a folder."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

FOLDER = Path("build/examples")


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows below a head, with numbers aligned to the right."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    is_number = [all(_is_number(row[i]) for row in texts[1:]) for i in range(len(head))]
    for row in texts:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        print("  ".join(cells).rstrip())


def save(figure: Figure, name: str) -> Path:
    """Saves a picture, prints its path, and returns it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.png"
    figure.savefig(path, dpi=110)
    print(f"Picture saved to {path}.")
    return path


def milliseconds(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each step. The steps take turns, so that all see the same load."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(torch.tensor(found[1:]).median()) for name, found in times.items()}


def _is_number(cell: str) -> bool:
    """Whether a cell begins like a number."""
    return cell[:1] in set("-+.0123456789")
