"""How much of the library one call goes through: functions and files, seen by ``sys.setprofile``.

Run as ``python -m tests.speed.visited``. Counts are equal on every machine. They say how much
a reader has to follow, and, by the number of calls, what Python costs where a device waits for it.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import autogram
from autogram import Engine

_PACKAGE = str(Path(autogram.__file__).parent)
_STEPS = 20  # behind the first, in which programs are written down
Visits = Counter[tuple[str, str]]


@contextmanager
def visits(within: str = "") -> Iterator[Visits]:
    """Counts the calls of each function of the library, by its file and its name.

    Args:
        within: Counts only what a function of this qualified name calls, and that function.
    """
    found: Visits = Counter()
    depth = 0 if within else 1

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        del argument
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(_PACKAGE):
            return
        is_entry = code.co_qualname == within
        depth += is_entry and event == "call"
        # Comprehensions are no functions to a reader.
        if depth and event == "call" and not code.co_name.startswith("<"):
            found[code.co_filename[len(_PACKAGE) + 1 :], code.co_qualname] += 1
        depth -= is_entry and event == "return"

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def describe(found: Visits) -> str:
    """Functions, files, and calls, as a line of a table."""
    files = {file for file, _ in found}
    return f"{len(found):4} functions {len(files):3} files {sum(found.values()):5} calls"


class _Watched(nn.Module):
    """A linear layer whose only call is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.found: Visits = Counter()

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        with visits() as found:
            y = nn.functional.linear(x, weight, bias)
        self.found = found
        return y.tanh()


def look() -> dict[str, Visits]:
    """What one call, one cotangent, and one Gramian go through, in a later step.

    Cotangents of a kind are counted together: there are three of each.
    """
    torch.manual_seed(0)
    watched = _Watched()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), watched, nn.Linear(8, 8))
    engine = Engine(model, verify="never")
    found: dict[str, Visits] = {}
    for name, within in (("compute_gramian", ""), ("one cotangent", "_Tap.backward")) * _STEPS:
        losses = model(torch.randn(16, 8)).square().sum(1)
        with visits(within) as found[name]:
            engine.compute_gramian(losses)
    found["F.linear"] = watched.found
    wide = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])
    engine = Engine(wide, verify="never")
    for _ in range(_STEPS):  # with factors that are too large for a bundle
        losses = wide(torch.randn(16, 32, 64)).square().mean((1, 2))
        with visits("_Tap.backward") as found["one large cotangent"]:
            engine.compute_gramian(losses)
    return found


def main() -> None:
    """Prints it."""
    found = look()
    for name, visited in found.items():
        note = ", of 3 cotangents" if "cotangent" in name else ""
        print(f"{name:19} {describe(visited)}{note}")
    if "--list" in sys.argv:
        for name, visited in found.items():
            print(f"\n{name}")
            print(
                "\n".join(f"  {n:4} {file} {function}" for (file, function), n in visited.items())
            )


if __name__ == "__main__":
    main()
