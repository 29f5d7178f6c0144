"""What a capture costs on a long sequence: time and peak memory beside a plain step.

python -m tests.speed.captured
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import profile

from autogram.hooks import Call, capture

POSITIONS = 16_384
FIELDS = ("args", "kwargs", "output", "grad_args", "grad_kwargs", "grad_output")


class Attention(nn.Module):
    """Self-attention that also returns its maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x).chunk(3, -1)
        maps = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return maps @ v, maps


class Genomic(nn.Module):
    """A tower of convolutions over a sequence, and attention over what is pooled.

    One activation is shared by all convolutions.
    """

    def __init__(self, width: int = 16, layers: int = 7) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, width, 15, padding=7)
        self.tower = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(layers))
        self.activation = nn.GELU()
        self.attention = Attention(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.stem(x))
        for layer in self.tower:
            x = F.max_pool1d(self.activation(layer(x)) + x, 2)
        x, _ = self.attention(x.mT)
        out: Tensor = self.head(x.mean(1)).squeeze(1)
        return out


Around = Callable[[nn.Module], AbstractContextManager[Any]]

# What is captured, and how.
CAPTURES: dict[str, Around] = {
    "plain step": lambda _: nullcontext(),
    "attention and its gradients": lambda m: capture(m, where="attention"),
    "a mean of each gradient of the shared activation": lambda m: capture(
        m, where="activation", inputs=False, keep=lambda call: call.grad_output.square().mean()
    ),
    "the shared activation and its gradients": lambda m: capture(m, where="activation"),
    "every module and its gradients": lambda m: capture(m),
}


def step(model: nn.Module, x: Tensor, around: Around) -> int:
    """One forward and one backward pass. Returns the bytes that the capture keeps."""
    with around(model) as calls:
        model(x).square().sum().backward()
    model.zero_grad()
    return bytes_of(calls)


def bytes_of(calls: Any) -> int:
    """The bytes of the storages that calls keep, each once."""
    storages: dict[int, int] = {}
    for call in [call for found in (calls or {}).values() for call in found]:
        fields = FIELDS if isinstance(call, Call) else ()  # else what `keep` has made of it
        for tensor in _tensors([getattr(call, field) for field in fields]):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (dict, list, tuple)):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [x for item in items for x in _tensors(item)]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch's CPU allocator has given out while a function runs."""
    with profile(profile_memory=True, acc_events=True) as profiler:  # else 2.11 warns
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]  # after the run
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def seconds(runs: dict[str, Callable[[], object]], repetitions: int = 7) -> dict[str, float]:
    """The median time of each function, taken in turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in taken.items()}


def main() -> None:
    """Prints a table."""
    torch.manual_seed(0)
    model, x = Genomic(), torch.randn(2, 4, POSITIONS)
    runs = {name: lambda around=around: step(model, x, around) for name, around in CAPTURES.items()}
    kept = {name: run() for name, run in runs.items()}
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    times = seconds(runs)
    plain_time, plain_peak = times["plain step"], peaks["plain step"]
    print("| captured | time | peak memory, MiB | kept, MiB |")
    print("| --- | --- | --- | --- |")
    for name in runs:
        more = f"{peaks[name] / 2**20:.1f}"
        print(f"| {name} | {times[name] / plain_time:.2f} | {more} | {kept[name] / 2**20:.1f} |")
    print(f"\nA plain step: {plain_time * 1000:.0f} ms, {plain_peak / 2**20:.1f} MiB.")


if __name__ == "__main__":
    main()
