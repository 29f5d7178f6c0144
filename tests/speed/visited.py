"""How much of the library one call goes through: functions and files, seen by ``sys.setprofile``.

Run as ``python -m tests.speed.visited``. Counts are equal on every machine. They say how much
a reader has to follow, and, by the number of calls, what Python costs where a device waits for it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import autogram
from autogram import Engine

_PACKAGE = str(Path(autogram.__file__).parent)
Visits = Counter[tuple[str, str]]


@contextmanager
def visits(is_wanted: Callable[[], bool] = lambda: True) -> Iterator[Visits]:
    """Counts the calls of each function of the library, by its file and its name."""
    found: Visits = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        code = frame.f_code
        is_function = event == "call" and not code.co_name.startswith("<")  # no comprehension
        if is_function and code.co_filename.startswith(_PACKAGE) and is_wanted():
            found[code.co_filename[len(_PACKAGE) + 1 :], code.co_qualname] += 1

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


def main() -> None:
    """Prints what one call, one cotangent, and one Gramian go through, each as in a later step."""
    torch.manual_seed(0)
    watched, tail = _Watched(), nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), watched, tail)
    engine = Engine(model, verify="never")
    shown: list[str] = []
    for _ in range(4):
        losses = model(torch.randn(16, 8)).square().sum(1)
        with visits() as whole:
            gramian = engine.compute_gramian(losses)
        losses.backward(gramian.diagonal())
        one = Engine(tail, verify="never")
        losses = tail(torch.randn(16, 8)).square().sum(1)
        for _ in range(3):
            with visits() as single:
                one.compute_gramian(losses)
        one.remove()
        shown = [
            f"one call of F.linear:      {describe(watched.found)}",
            f"compute_gramian, 3 layers: {describe(whole)}",
            f"compute_gramian, 1 layer:  {describe(single)}",
        ]
    print("\n".join(shown))
    if "--list" in sys.argv:
        for name, found in (("F.linear", watched.found), ("compute_gramian", whole)):
            print(f"\n{name}")
            print("\n".join(f"  {n:4} {file} {function}" for (file, function), n in found.items()))


if __name__ == "__main__":
    main()
