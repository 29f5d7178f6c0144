"""Steps of several processes: with one Gramian of all their samples, beside DDP's own step.

`python -m tests.speed.ranks` prints tables of weak and of strong scaling.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autogram import Engine
from autogram._distributed.group import Group

WORLDS = (1, 2, 4)


class Layer(nn.Module):
    """Attention and a multilayer perceptron, each behind a normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (-1, 64)).transpose(1, 2).chunk(3, 1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """A language model of four layers, 3.7 million parameters."""

    def __init__(self, width: int = 256, vocabulary: int = 2000, tokens: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(tokens, width) / 10)
        self.layers = nn.Sequential(*[Layer(width) for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers(self.embedding(ids[:, :-1]) + self.positions)
        logits = x @ self.embedding.weight.T
        found = nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        return found.mean(1)


class Perceptron(nn.Module):
    """Eight layers of width 512, 2.1 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean(1)


@dataclass
class Case:
    """A model, its samples, and how many of them there are."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int], Tensor]
    weak: int
    """Samples of each process."""
    strong: int
    """Samples of all processes."""


CASES = {
    "mlp": Case("MLP", Perceptron, lambda b: torch.randn(b, 512), 64, 128),
    "transformer": Case("Transformer", Transformer, lambda b: torch.randint(2000, (b, 65)), 4, 16),
}


def weighting(gramian: Tensor) -> Tensor:
    """One that costs next to nothing."""
    return gramian.diagonal().clamp(min=1e-12).rsqrt()


@contextmanager
def counting(group: Group) -> Iterator[list[float]]:
    """How many bytes of rows and of factors this process sends to others, call by call."""
    counts: list[float] = []

    def exchange(sent: Tensor, *rest: Any) -> dist.Work:
        counts.append(sent.nbytes * (group.size - 1) / group.size)
        return Group.exchange(group, sent, *rest)

    def pass_on(sent: Tensor, to: Sequence[int], *rest: Any) -> list[dist.Work]:
        counts.append(sent.nbytes * len(to))
        return Group.pass_on(group, sent, to, *rest)

    with patch.multiple(group, exchange=exchange, pass_on=pass_on):
        yield counts


def measure(case: Case, samples: int, rounds: int) -> dict[str, Any]:
    """Seconds of each kind of step, alternating, the slowest rank in each round."""
    torch.manual_seed(dist.get_rank())
    x = case.draw(samples)
    torch.manual_seed(0)
    plain = DistributedDataParallel(case.make())
    model = DistributedDataParallel(case.make())
    engine = Engine(model, distributed=True, verify="never")

    def ordinary() -> None:
        plain(x).mean().backward()

    def fused() -> None:
        engine.backward(model(x), weighting)

    def gramian() -> None:
        with model.no_sync():
            engine.compute_gramian(model(x))

    steps = {"DDP": ordinary, "step": fused, "Gramian": gramian}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 3):
        for name, step in steps.items():
            plain.zero_grad()
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_ >= 3:
                seconds[name].append(float(took))
    ranks = engine._ranks
    assert ranks is not None
    assert ranks.plan is not None
    ways = ranks.plan.ways.values()
    with counting(ranks.group) as counts:
        gramian()
    sent = torch.tensor(float(sum(counts)))
    dist.all_reduce(sent)
    return {
        **{name: median(found) for name, found in seconds.items()},
        "bytes": float(sent) / dist.get_world_size(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "ways": {way: list(ways).count(way) for way in dict.fromkeys(ways)},
    }


def _run(rank: int, world: int, store: str, answer: str, names: Sequence[str], rounds: int) -> None:
    """What each process does."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    found = {}
    for name in names:
        case = CASES[name]
        found[name] = [measure(case, n, rounds) for n in (case.weak, case.strong // world)]
    if rank == 0:
        torch.save(found, answer)
    dist.destroy_process_group()


def run(world: int, names: Sequence[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """For each model, weak and strong scaling in some number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        arguments = (world, str(Path(folder) / "store"), str(answer), names, rounds)
        torch.multiprocessing.spawn(_run, arguments, world)
        return torch.load(answer)  # type: ignore[no-any-return]  # what was saved


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--world", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    names, worlds = options.model or list(CASES), options.world or WORLDS
    results = {world: run(world, names, options.rounds) for world in worlds}
    for name in names:
        case = CASES[name]
        for i, kind in enumerate(("weak", "strong")):
            print(f"\n{case.name}, {kind} scaling\n")
            print("| processes | samples each | DDP | step | Gramian | step / DDP | sent | ways |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- |")
            for world in worlds:
                found = results[world][name][i]
                samples = case.weak if i == 0 else case.strong // world
                own, step, gramian = (found[of] * 1e3 for of in ("DDP", "step", "Gramian"))
                ways = ", ".join(f"{count} {way}" for way, count in found["ways"].items())
                print(
                    f"| {world} | {samples} | {own:.0f} ms | {step:.0f} ms | {gramian:.0f} ms "
                    f"| {step / own:.1f} | {found['bytes'] / 1e6:.1f} MB | {ways} |"
                )


if __name__ == "__main__":
    main()
