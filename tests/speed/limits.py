"""What a smaller memory limit costs: the Gramian of the output layer of GPT-2.

Run as ``python -m tests.speed.limits [--device cuda]``. The layer maps 768 features of 512 tokens
to 50,257 words, for 8 samples. Its rows have 1.2 GB, and its factors 0.8 GB.
"""

import argparse
import time
from collections.abc import Sequence

import torch

from autogram._blocks import Block, Devices, Limit
from autogram._blocks.plan import plans
from tests.speed.choices import Layer, block_of
from tests.speed.report import as_table

HEAD = Layer(8, 512, 768, 50257)
LIMITS = [2**exponent for exponent in (31, 29, 27, 25, 23, 20)]


def line(block: Block, limit_bytes: int, device: str) -> list[str]:
    """The limit, how the Gramian is computed, the largest result on the way, and seconds."""
    kernels = Devices(Limit(limit_bytes // 4)).on(device)
    plan = plans("gram", [block], (), kernels)[0]
    peak = ""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    start = time.perf_counter()
    plan([block], (), kernels)
    if device == "cuda":
        torch.cuda.synchronize()
        peak = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"
    seconds = time.perf_counter() - start
    how = f"{plan.method} in {plan.pieces} pieces"
    largest = f"{plan.elements * 4 / 2**20:.1f} MiB"
    return [f"{limit_bytes / 2**20:.0f} MiB", how, largest, peak, f"{seconds:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a small layer, to see it run")
    options = parser.parse_args(arguments)
    block = block_of(Layer(2, 4, 8, 16) if options.tiny else HEAD, torch.float32, options.device)
    head = ["limit", "how", "largest result", "measured peak", "seconds"]
    print(as_table([head, ["---"] * len(head)]))
    line(block, LIMITS[0], options.device)  # the first call makes handles and loads kernels
    for limit in LIMITS:
        print(as_table([line(block, limit, options.device)]), flush=True)


if __name__ == "__main__":
    main()
