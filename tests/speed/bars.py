"""The picture of the README: time and memory of a step, beside other libraries.

``python -m tests.speed.bars`` measures, writes ``docs/pictures/speed.json``, and draws
``docs/pictures/speed.png``; ``--draw`` draws what was measured before. Libraries that are not
installed are left out.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import process_time

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autogram.testing import reference_jacobian

from .measure import count_repeats, gramian_error, relative_error, time_steps
from .process import TrainingProcess
from .report import WRONG, as_table, describe_machine
from .rows import OPACUS, VMAP, OpacusEngine, VmapTrainer
from .training import BASELINE, ENGINES
from .workloads import WORKLOADS, Workload

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
WAYS = {
    BASELINE: "SGD",
    "fused": "autogram",
    "torchjd": "torchjd",
    OPACUS: "Opacus",
    VMAP: "vmap(grad)",
}
"""What is measured, and what it is called in the picture."""

TITLES = {
    "mlp": "MLP, 8 layers of width 512",
    "gpt2": "GPT-2, 4 layers, tied embedding",
    "vit": "Vision transformer, 6 layers",
    "cnn": "CNN, 6 convolutions, GroupNorm",
}
COLORS = {"SGD": "#4d4d4d", "autogram": "#d95f02"}
OTHER, BAD = "#7fb3d5", "#f2c6c2"
LONGEST = 6.0  # of a bar, whose number says more


@dataclass(frozen=True)
class Bar:
    """One way to train one model.

    Attributes:
        model: Its name among the workloads.
        way: What it is called.
        seconds: Median processor time of a step, ``None`` if it does not run.
        ratio: Time relative to SGD, in the same rounds.
        peak: Bytes that a step needs at most, apart from the model and the libraries.
        error: Relative error of the Gramian in float64, ``None`` for SGD.
        failure: Why it does not run.
    """

    model: str
    way: str
    seconds: float | None = None
    ratio: float | None = None
    peak: int | None = None
    error: float | None = None
    failure: str | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether the Gramian is another than that of plain autograd."""
        return self.error is not None and self.error > WRONG


def error_of(workload: Workload, name: str) -> float:
    """Relative error of the Gramian in float64, on a small batch."""
    if name != VMAP:
        return gramian_error(workload, OpacusEngine if name == OPACUS else ENGINES[name])

    def make_batch(size: int) -> tuple:
        x, y = workload.make_batch(size)
        return (x.double() if x.is_floating_point() else x), y

    trainer = VmapTrainer(
        replace(
            workload,
            make_model=lambda: workload.make_model().double(),
            make_batch=make_batch,
            batch_size=workload.check_size,
        )
    )
    jacobian = reference_jacobian(trainer.forward(), trainer.parameters)
    return relative_error(trainer.gramian(), jacobian @ jacobian.T)


def measure(model: str, rounds: int) -> list[Bar]:
    """All ways to train one model, in rounds that take turns, each in a process of its own.

    What counts is the time of the processor, on one thread: other programs hardly change it.
    """
    workload = WORKLOADS[model]
    errors: dict[str, float | None] = {BASELINE: None}
    failures: dict[str, str] = {}
    for name in WAYS:
        if name == BASELINE or (name == OPACUS and find_spec("opacus") is None):
            continue
        try:
            errors[name] = error_of(workload, name)
        except Exception as error:  # that a library fails is a result
            failures[name] = f"{type(error).__name__}: {error}".split("\n")[0][:120]
    with ExitStack() as stack:
        processes: dict[str, TrainingProcess] = {}
        for name in errors:
            process = stack.enter_context(
                closing(TrainingProcess(model, name, 1, clock=process_time))
            )
            try:
                process.visit(1)  # warms up, before the next one does
            except RuntimeError as error:
                failures[name] = str(error)
            else:
                processes[name] = process
        visits = {name: process.visit for name, process in processes.items()}
        repeats = {name: count_repeats(visit) for name, visit in visits.items()}
        timings = time_steps(visits, repeats, rounds)
        peaks = {name: process.peak() for name, process in processes.items()}
    bars = [Bar(model, WAYS[name], failure=reason) for name, reason in failures.items()]
    for name, timing in timings.items():
        ratio = timing.over(timings[BASELINE]).median
        seconds = median(timing.seconds)
        bars.append(Bar(model, WAYS[name], seconds, ratio, peaks[name], errors[name]))
    order = list(WAYS.values())
    return sorted(bars, key=lambda bar: order.index(bar.way))


def make_table(bars: Sequence[Bar]) -> str:
    """Markdown table, with one line for each model and way."""
    rows = [["model", "by", "time", "memory", "error"], ["---", "---", "---:", "---:", "---:"]]
    bases = {bar.model: bar for bar in bars if bar.way == WAYS[BASELINE]}
    for bar in bars:
        base = bases[bar.model]
        if bar.ratio is None or bar.seconds is None:
            rows.append([TITLES[bar.model], bar.way, "fails", "", ""])
            continue
        time = f"{1e3 * bar.seconds:.1f} ms" if bar is base else f"{bar.ratio:.2f}"
        peak = "not measured"
        if bar.peak and base.peak:
            peak = f"{bar.peak / 2**20:.0f} MB" if bar is base else f"{bar.peak / base.peak:.2f}"
        error = "" if bar.error is None else f"{bar.error:.0e}"
        rows.append(
            [
                TITLES[bar.model],
                bar.way,
                time,
                peak,
                f"**wrong**: {error}" if bar.is_wrong else error,
            ]
        )
    return as_table(rows)


def draw(bars: Sequence[Bar]) -> Figure:
    """One panel for each model: times as thick bars, memory as thin ones, relative to SGD."""
    models = list(dict.fromkeys(bar.model for bar in bars))
    rows = -(-len(models) // 2)
    figure = Figure(figsize=(8, 2.6 * rows + 0.3), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False, sharey=True).flatten()
    for axes, model in zip(panels, models, strict=False):  # an odd number leaves one empty
        own = [bar for bar in bars if bar.model == model]
        base = next(bar for bar in own if bar.way == WAYS[BASELINE])
        for place, bar in enumerate(own):
            peak = bar.peak / base.peak if bar.peak and base.peak else None
            _draw_ratio(axes, place - 0.16, 0.44, bar, bar.ratio)
            _draw_ratio(axes, place + 0.26, 0.24, bar, peak)
        axes.set_title(TITLES[model], fontsize=13, loc="left")
        axes.set_yticks(range(len(own)), [bar.way for bar in own], fontsize=12)
    for axes in panels:
        axes.set_xlim(0, LONGEST * 1.3)
        axes.set_xticks(())
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()  # and with it those that share it
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    figure.supxlabel("thick: time of a step, thin: memory, each relative to SGD", fontsize=12)
    return figure


def _draw_ratio(axes: Axes, place: float, height: float, bar: Bar, ratio: float | None) -> None:
    """One bar with its number: pale where the result is wrong, cut where it is long."""
    is_time = height > 0.3
    color = BAD if bar.is_wrong else COLORS.get(bar.way, OTHER)
    shown = min(ratio or 0, LONGEST)
    axes.barh(place, shown, height, color=color, alpha=1 if is_time else 0.6)
    text = "" if ratio is None else f"{ratio:.1f}" + (" »" if ratio > LONGEST else "")
    if is_time and ratio is None:
        text = "fails"
    if is_time and bar.is_wrong:
        text += "  wrong result"
    size = 11 if is_time else 9
    axes.text(shown + 0.08, place, text, va="center", fontsize=size)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, unless told to draw alone, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    parser.add_argument("--model", action="append", choices=WORKLOADS, help="all if not given")
    parser.add_argument("--rounds", type=int, default=3, help="each in both orders")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for both files")
    options = parser.parse_args(arguments)
    path = options.folder / "speed.json"
    if not options.draw:
        found = []
        for model in options.model or WORKLOADS:
            print(f"Measuring: {WORKLOADS[model].description}", file=sys.stderr)
            found += measure(model, options.rounds)
        results = {"machine": describe_machine(), "bars": [asdict(bar) for bar in found]}
        path.write_text(json.dumps(results, indent=1) + "\n")
    bars = [Bar(**bar) for bar in json.loads(path.read_text())["bars"]]
    picture = path.with_suffix(".png")
    draw(bars).savefig(picture, dpi=120, bbox_inches="tight", pad_inches=0.1)
    print(make_table(bars))
    print(f"The picture is in {picture}")


if __name__ == "__main__":
    main()
