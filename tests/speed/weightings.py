"""What weights cost: each Gramian weighting of torchjd and ours, and whole steps with UPGrad.

`python -m tests.speed --weightings` prints both tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchjd import aggregation
from torchjd.aggregation import UPGradWeighting
from torchjd.autogram import Engine as TorchjdEngine

from autogram import Engine
from autogram.weightings import DualProj, GradVac, PCGrad, UPGrad

SIZES = (16, 64, 128, 256, 512, 1024, 2048)
SLOW = 5.0  # seconds, behind which a weighting is not tried for more objectives

WEIGHTINGS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "`UPGrad` (autogram)": UPGrad,
    "`DualProj` (autogram)": DualProj,
    "`PCGrad` (autogram)": PCGrad,
    "`GradVac` (autogram)": GradVac,
    "`UPGradWeighting`": UPGradWeighting,
    "`DualProjWeighting`": aggregation.DualProjWeighting,
    "`MGDAWeighting`": aggregation.MGDAWeighting,
    "`PCGradWeighting`": aggregation.PCGradWeighting,
    "`GradVacWeighting`": aggregation.GradVacWeighting,
    "`CAGradWeighting(c=0.5)`": lambda: aggregation.CAGradWeighting(c=0.5),
    "`AlignedMTLWeighting`": aggregation.AlignedMTLWeighting,
    "`IMTLGWeighting`": aggregation.IMTLGWeighting,
    "`KrumWeighting(1)`": lambda: aggregation.KrumWeighting(1),
}


def make_problem(m: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A classifier after some steps of SGD, where gradients conflict, and a batch of m samples."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    ).to(device)
    x, y = torch.randn(m, 20, device=device), torch.randint(10, (m,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def seconds(function: Callable[[], Any], repetitions: int = 5) -> float:
    """The median time of a call, once warm, for as long as that is no patience."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) <= repetitions and time.perf_counter() - start < SLOW:
        before = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    return median(times[1:] or times)


def steps(m: int, device: str) -> dict[str, float]:
    """Seconds of whole steps: forward, Gramian, weights, backward, update."""
    found = {}
    for name in ("SGD", "autogram, separate", "autogram, fused", "torchjd"):
        model, x, y = make_problem(m, device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        engine = TorchjdEngine(model, batch_dim=0) if name == "torchjd" else None
        own = Engine(model, batch_dim=0) if name.startswith("autogram") else None
        weighting = UPGradWeighting() if name == "torchjd" else UPGrad()

        def step(
            model: nn.Module = model,
            x: Tensor = x,
            y: Tensor = y,
            optimizer: torch.optim.Optimizer = optimizer,
            engine: Any = engine or own,
            weighting: Any = weighting,
            name: str = name,
        ) -> None:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x), y, reduction="none")
            if name == "SGD":
                losses.mean().backward()
            elif name.endswith("fused"):
                engine.backward(losses, weighting)
            else:
                losses.backward(weighting(engine.compute_gramian(losses)))
            optimizer.step()

        found[name] = seconds(step)
    return found


def print_tables(device: str, largest: int) -> None:
    """Print what weightings take for up to so many objectives, and what whole steps do."""
    sizes = [m for m in SIZES if m <= largest]
    problems = {m: make_problem(m, device) for m in sizes}
    gramians, base = {}, {}
    for m, (model, x, y) in problems.items():
        engine = Engine(model, batch_dim=0)

        def losses(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(model(x), y, reduction="none")

        kept = losses()
        gramians[m] = engine.compute_gramian(kept)
        base[m] = (
            seconds(lambda losses=losses: losses().mean().backward()),
            seconds(lambda engine=engine, kept=kept: engine.compute_gramian(kept)),
        )
    print(f"| milliseconds for m = | {' | '.join(map(str, sizes))} |")
    print(f"| --- |{' --- |' * len(sizes)}")
    for i, name in enumerate(("SGD step", "Gramian")):
        print(f"| *{name}* | {' | '.join(f'{base[m][i] * 1e3:.1f}' for m in sizes)} |")
    for name, make in WEIGHTINGS.items():
        cells, is_slow = [], False
        for m in sizes:
            if is_slow:
                cells.append("")
                continue
            try:
                taken = seconds(lambda m=m, make=make: make()(gramians[m]))
            except Exception as error:  # what a weighting says about a Gramian is its own affair
                cells.append(type(error).__name__)
                continue
            is_slow = taken > SLOW
            cells.append(f"{taken * 1e3:.1f}" if taken < 1 else f"{taken * 1e3:.0f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    m = min(256, largest)
    print(f"\nWhole steps with UPGrad, m = {m}, milliseconds:")
    for name, taken in steps(m, device).items():
        print(f"  {name}: {taken * 1e3:.1f}", flush=True)
