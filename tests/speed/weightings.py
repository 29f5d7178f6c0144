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
from autogram.weightings import DualProj, GradVac, PCGrad, Projector, UPGrad
from tests.speed.trained import TRAININGS, digits, gramians_of

SIZES = (16, 64, 128, 256, 512, 1024, 2048)
SLOW = 5.0  # seconds, behind which a weighting is not tried for more objectives
TRAINED = (20, 1000)  # steps after which Gramians are compared
LARGEST = {"digits": 2048, "letters": 256, "tasks": 256}  # whose Gramians take no minutes


class _Splitting(Projector):
    """Splitting alone, to the residual of which earlier versions stopped."""

    def _project(self, bounds: Tensor, gramian: Tensor) -> Tensor:
        found, self.certificate = self._split(bounds, gramian, bounds.clamp(min=0))
        return found


SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "splitting": lambda gramian: UPGrad(projector=_Splitting())(gramian),
    "`UPGrad`": lambda gramian: UPGrad()(gramian),
}
STEPS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "SGD": UPGrad,
    "Gramian, mean": lambda: lambda gramian: torch.full_like(gramian[0], 1 / len(gramian)),
    "UPGrad": UPGrad,
    "UPGrad, 32 samples": lambda: UPGrad(samples=32),
    "torchjd": UPGradWeighting,
}

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


def seconds(function: Callable[[], Any], repetitions: int = 5) -> float:
    """The median time of a call, once warm, for as long as that is no patience.

    Without a GPU, it is the time of all processors, which other work on the machine changes less.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    times: list[float] = []
    start = time.perf_counter()
    while len(times) <= repetitions and time.perf_counter() - start < SLOW:
        before = clock()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - before)
    return median(times[1:] or times)


def steps(m: int, device: str) -> dict[str, float]:
    """Seconds of whole steps: forward, Gramian, weights, backward, update."""
    found = {}
    for name, make_weighting in STEPS.items():
        training = digits()
        training.train(TRAINED[0])
        model = training.model.to(device)
        pixels, labels = (x.to(device) for x in training.batch(m))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        make_engine = TorchjdEngine if name == "torchjd" else Engine
        engine = None if name == "SGD" else make_engine(model, batch_dim=0)
        weigh = make_weighting()

        def step(
            model: nn.Module = model,
            pixels: Tensor = pixels,
            labels: Tensor = labels,
            optimizer: torch.optim.Optimizer = optimizer,
            engine: Any = engine,
            weigh: Any = weigh,
        ) -> None:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(pixels), labels, reduction="none")
            if engine is None:
                losses.mean().backward()
            elif isinstance(engine, TorchjdEngine):
                losses.backward(weigh(engine.compute_gramian(losses)))
            else:
                engine.backward(losses, weigh)
            optimizer.step()

        found[name] = seconds(step)
    return found


def compare_solvers(device: str, largest: int) -> None:
    """Print what UPGrad's solvers take for Gramians of trainings, in turns."""
    print("| training | step | m | " + " | ".join(SOLVERS) + " | ratio | error |")
    print("| --- |" + " ---: |" * (len(SOLVERS) + 4))
    for name in TRAININGS:
        sizes = [m for m in SIZES if m <= min(largest, LARGEST[name])]
        for count in TRAINED:
            for m, gramian in gramians_of(name, count, sizes).items():
                gramian = gramian.to(device)
                taken: dict[str, list[float]] = {solver: [] for solver in SOLVERS}
                for _ in range(3):
                    for solver, solve in SOLVERS.items():
                        taken[solver].append(seconds(lambda s=solve, g=gramian: s(g), 1))
                old, new = (median(taken[solver]) for solver in SOLVERS)
                weighting = UPGrad()
                weighting(gramian)
                assert weighting.certificate is not None
                print(
                    f"| {name} | {count} | {m} | {old * 1e3:.1f} | {new * 1e3:.1f} "
                    f"| {old / new:.1f} | {weighting.certificate.error:.0e} |",
                    flush=True,
                )


def print_tables(device: str, largest: int) -> None:
    """Print what weightings take for up to so many objectives, and what whole steps do."""
    sizes = [m for m in SIZES if m <= largest]
    training = digits()
    training.train(TRAINED[0])
    training.model.to(device)
    engine = Engine(training.model, batch_dim=0)
    gramians, base = {}, {}
    for m in sizes:
        pixels, labels = (x.to(device) for x in training.batch(m))

        def losses(pixels: Tensor = pixels, labels: Tensor = labels) -> Tensor:
            return F.cross_entropy(training.model(pixels), labels, reduction="none")

        kept = losses()
        gramians[m] = engine.compute_gramian(kept)
        base[m] = (
            seconds(lambda losses=losses: losses().mean().backward()),
            seconds(lambda kept=kept: engine.compute_gramian(kept)),
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
    print("\nUPGrad by splitting and by the solver of today, milliseconds:\n")
    compare_solvers(device, largest)
