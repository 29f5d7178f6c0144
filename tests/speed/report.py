"""How the results are printed: the machine in words, and a Markdown table."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .measure import Ratio

WRONG = 1e-6  # relative error from which on a Gramian in float64 is not a matter of rounding


@dataclass(frozen=True)
class Outcome:
    """What one engine did on one workload.

    Attributes:
        ratio: Time of its step over that of gradient descent, `None` if it did not run.
        error: Relative error of its Gramian in float64, `None` if it did not run.
        failure: Why it did not run, `None` if it did.
        remark: What is known about the error; shown where the Gramian is wrong.
    """

    ratio: Ratio | None = None
    error: float | None = None
    failure: str | None = None
    remark: str = ""

    @property
    def time_cell(self) -> str:
        """The ratio with its quartiles."""
        if self.ratio is None:
            return "does not run"
        return with_quartiles(self.ratio)

    @property
    def error_cell(self) -> str:
        """The error, or the reason why there is none."""
        if self.error is None:
            return self.failure or ""
        if self.error > WRONG:
            return f"**wrong**: {self.error:.0e} ({self.remark or 'cause unknown'})"
        return f"{self.error:.0e}"


@dataclass(frozen=True)
class Line:
    """Results on one workload.

    Attributes:
        description: The workload in words.
        seconds: Median time of a step of gradient descent.
        outcomes: What each engine did, by its name.
    """

    description: str
    seconds: float
    outcomes: dict[str, Outcome]


def with_quartiles(ratio: Ratio) -> str:
    """A ratio in words."""
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def as_table(rows: Iterable[Iterable[str]]) -> str:
    """Rows as lines of a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def describe_machine() -> str:
    """The machine in words, without its name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    return (
        f"{cores} cores ({torch.backends.cpu.get_cpu_capability()}), "
        f"{threads} {'thread' if threads == 1 else 'threads'}, torch {torch.__version__}, float32."
    )


def make_table(lines: list[Line]) -> str:
    """Markdown table, with one line per workload, and how to read it."""
    engines = list(lines[0].outcomes)
    header = ["model", "SGD step", *(f"{engine} / SGD" for engine in engines)]
    header += [f"error of {engine}" for engine in engines]
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for line in lines:
        outcomes = [line.outcomes[engine] for engine in engines]
        rows.append(
            [line.description, f"{1000 * line.seconds:.1f} ms"]
            + [outcome.time_cell for outcome in outcomes]
            + [outcome.error_cell for outcome in outcomes]
        )
    return f"{as_table(rows)}\n\n{_legend(lines)}"


def _legend(lines: list[Line]) -> str:
    ratios = [
        outcome.ratio
        for line in lines
        for outcome in line.outcomes.values()
        if outcome.ratio is not None
    ]
    shift = max((max(r.by_order) / min(r.by_order) - 1 for r in ratios), default=0.0)
    return (
        "Time of a whole step (forward, Gramian, constant weights, backward, update) over that of "
        "SGD on the mean loss, each in a process of its own that is started several times: median "
        "(quartiles) over interleaved rounds in two orders of run, "
        f"whose medians differ by at most {shift:.0%}. Errors are of the Gramian in float64 on a "
        "small batch, against autograd loss by loss, relative to the largest entry. The fused step "
        "takes the gradients from the factors of the Gramian; its errors are those of both."
    )
