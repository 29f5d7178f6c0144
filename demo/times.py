"""The time of a step on this machine, on one thread: SGD, autogram and torchjd."""

from collections.abc import Callable, Mapping
from statistics import median
from time import process_time

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torchjd.autogram import Engine as TorchjdEngine

from autogram import Engine
from demo.digits import make_classifier

N_WARM = 130  # uncounted steps: an engine writes its last program after 128
N_WARM_TORCHJD = 1  # torchjd writes no programs, and its steps may take a second
BATCH_SIZE = 64
COLORS = {"SGD": "#4d4d4d", "torchjd": "#7fb3d5"}
OWN_COLOR = "#d95f02"

Step = Callable[[], None]


def make_perceptron() -> nn.Module:
    """Eight layers of width 512."""
    layers = [part for _ in range(7) for part in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, 8 layers of width 512": (make_perceptron, (512,)),
    "small CNN on digits": (lambda: make_classifier(0), (1, 8, 8)),
    "tiny MLP, width 32": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)),
        (16,),
    ),
}


def mean_weights(gramian: Tensor) -> Tensor:
    """The weights of the mean loss: they take almost no time, so the engine alone is measured."""
    return gramian.new_full((len(gramian),), 1 / len(gramian))


def make_steps(make_model: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Step]:
    """Training steps of each kind, each with its own model."""

    def step(kind: str) -> Step:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x, y = torch.randn(BATCH_SIZE, *shape), torch.randint(10, (BATCH_SIZE,))
        own = Engine(model) if kind.startswith("autogram") else None
        other = TorchjdEngine(model, batch_dim=0) if kind == "torchjd" else None

        def run() -> None:
            losses = F.cross_entropy(model(x), y, reduction="none")
            if own is not None and kind.endswith("backward"):
                own.backward(losses, mean_weights)
            elif own is not None:
                losses.backward(mean_weights(own.compute_gramian(losses)))
            elif other is not None:
                losses.backward(mean_weights(other.compute_gramian(losses)))
            else:
                losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    kinds = ("SGD", "autogram, engine.backward", "autogram, two passes", "torchjd")
    return {kind: step(kind) for kind in kinds}


def measure(warm: int, rounds: int, advance: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Median seconds of a step, by model and kind. Kinds take turns, so that drift affects all.

    The clock counts processor time, on one thread, which other programs hardly change.

    Args:
        warm: Uncounted steps of each kind, before the others.
        rounds: Counted steps of each kind.
        advance: Called after each turn of all kinds.
    """
    found: dict[str, dict[str, float]] = {}
    for name, (make_model, shape) in MODELS.items():
        steps = make_steps(make_model, shape)
        seconds: dict[str, list[float]] = {kind: [] for kind in steps}
        for number in range(warm + rounds):
            for kind, step in steps.items():
                if kind == "torchjd" and number < warm - N_WARM_TORCHJD:
                    continue
                start = process_time()
                step()
                if number >= warm:
                    seconds[kind].append(process_time() - start)
            advance()
        found[name] = {kind: median(times) for kind, times in seconds.items()}
    return found


def make_note(found: Mapping[str, Mapping[str, float]]) -> str:
    """Say in words what the picture shows."""
    said = []
    for name, seconds in found.items():
        ratios = [seconds[kind] / seconds["SGD"] for kind in list(seconds)[1:]]
        said.append(f"{name}: {', '.join(f'{ratio:.1f}' for ratio in ratios)}")
    kinds = ", ".join(list(seconds)[1:])
    return (
        f"Times of a step on {BATCH_SIZE} samples relative to SGD ({kinds}): {'; '.join(said)}. "
        "The limits: on a tiny model, Python takes most of the time, and an engine adds some for "
        "each layer; weightings such as UPGrad take time of their own."
    )


def draw(found: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bars of the times relative to SGD, for each model."""
    figure = Figure(figsize=(8, 1.5 * len(found) + 0.6), layout="constrained")
    for axes, (name, seconds) in zip(figure.subplots(len(found), 1), found.items(), strict=True):
        ratios = {kind: value / seconds["SGD"] for kind, value in seconds.items()}
        bars = axes.barh(
            list(ratios), list(ratios.values()), color=[COLORS.get(x, OWN_COLOR) for x in ratios]
        )
        axes.bar_label(bars, [f" {x:.1f}" for x in ratios.values()], fontsize=11)
        axes.set_title(f"{name}: SGD takes {1e3 * seconds['SGD']:.2f} ms", fontsize=12, loc="left")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(ratios.values()))
        axes.set_xticks(())
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    return figure
