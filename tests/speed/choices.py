"""Rows or factors: what the kernels of a CPU and of a GPU choose, and which of both is faster.

Run as ``python -m tests.speed.choices [--device cuda]``. A Gramian of one layer is computed both
ways on the device, and the choices follow from shapes alone, so that they are printed everywhere.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from autogram._blocks import Block, Devices, Limit
from autogram._blocks.plan import plans
from tests.speed.report import as_table


class Layer(NamedTuple):
    """A linear layer: samples, positions of each, features in and out."""

    samples: int
    positions: int
    inputs: int
    outputs: int


LAYERS = [
    Layer(4, 2, 8, 8),
    Layer(64, 1, 512, 512),
    Layer(64, 16, 32, 32),
    Layer(64, 16, 512, 512),
    Layer(16, 64, 1024, 1024),
    Layer(8, 128, 768, 768),
    Layer(8, 128, 3072, 768),
    Layer(8, 256, 768, 3072),
    Layer(8, 1024, 768, 3072),
    Layer(64, 197, 768, 3072),
    Layer(8, 512, 2048, 16),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LIMIT = Limit(2**27)


def block_of(layer: Layer, dtype: torch.dtype, device: str) -> Block:
    """The factors of a layer, of random numbers."""
    b, t, i, o = layer
    positions = (t,) if t > 1 else ()
    shapes = (1, b, *positions, o), (b, *positions, i)
    operands = tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return Block("kbto,bti->kboi" if positions else "kbo,bi->kboi", operands)


def milliseconds(function: Callable[[], Tensor], device: str, repeats: int) -> float:
    """The shortest of some runs."""
    found = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        found = min(found, time.perf_counter() - start)
    return found * 1e3


def lines(device: str, repeats: int, layers: Sequence[Layer] = LAYERS) -> list[list[str]]:
    """A line for each layer and dtype."""
    devices, found = Devices(_LIMIT), []
    own = devices.on(device)
    for layer in layers:
        for name, dtype in DTYPES.items():
            block = block_of(layer, dtype, device)
            chosen = [plans("gram", [block], (), devices.on(x))[0].method for x in ("cpu", "cuda")]
            times = {}
            for plan in reversed(plans("gram", [block], (), own)):
                run = partial(plan, [block], (), own)
                times[plan.method] = milliseconds(run, device, repeats)  # the cheapest comes last
            cells = [f"{times[x]:.2f}" if x in times else "" for x in ("factors", "rows")]
            found.append([" x ".join(map(str, layer)), name, *chosen, *cells])
    return found


def show(device: str, repeats: int = 5) -> None:
    """Prints the table."""
    head = ["samples x positions x in x out", "dtype", "CPU", "GPU", "factors, ms", "rows, ms"]
    print(f"Choices of a CPU and of a GPU, measured on {device}:\n")
    print(as_table([head, ["---"] * len(head)]))
    for layer in LAYERS:
        print(as_table(lines(device, repeats, [layer])), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    show(parser.parse_args().device)
