"""The report: what was recorded, how it is contracted, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class UseReport:
    """One call that reads a parameter.

    Attributes:
        function: The torch function.
        index: The place of the call among those of its forward pass that read parameters.
        rule: The rule that its block is from, as a place in the source, or ``None`` for explicit
            rows by vector-Jacobian products, whose cost is not known.
        layout: Where the samples lie in its result, or ``None`` where the batch is one sample.
        is_derived: Whether it reads a tensor that is derived from the parameter, to which rows are
            then pulled back.
    """

    function: str
    index: int
    rule: str | None
    layout: str | None
    is_derived: bool


@dataclass(frozen=True)
class ParameterReport:
    """The Gramian of one parameter.

    Attributes:
        name: Its qualified name.
        shape: Its shape.
        uses: The calls that read it.
        found: How the places of the samples are known: ``"probe"``, ``"remembered"``, or ``"one
            sample"``.
        plan: ``"rows"``, ``"factors"``, ``"lookup"``, or several of them for different regions.
        costs: Of each plan that was considered, in multiply-adds, with memory traffic counted as
            such; of each region the cheaper one was taken.
        flops: Floating-point operations of the contraction.
        gradient_flops: Those of the parameter's gradient in an ordinary backward pass.
        bytes: Size of the factors and of the largest intermediate result.
        share: Part of the total of ``flops``.
    """

    name: str
    shape: tuple[int, ...]
    uses: tuple[UseReport, ...]
    found: str
    plan: str
    costs: dict[str, int]
    flops: int
    gradient_flops: int
    bytes: int
    share: float = 0.0


@dataclass(frozen=True)
class Report:
    """What the last Gramian was computed from. ``str`` of it is a table.

    Attributes:
        samples: B, or 1 where the objectives were treated as coupled.
        per_sample: K, the number of backward passes through the activations.
        parameters: One entry for each parameter with a use that the losses depend on.
        uncovered: Why any other parameter has no part in it, by name.
    """

    samples: int = 0
    per_sample: int = 0
    parameters: tuple[ParameterReport, ...] = ()
    uncovered: dict[str, str] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Floating-point operations of all contractions."""
        return sum(of.flops for of in self.parameters)

    @property
    def gradient_flops(self) -> int:
        """Those of the parameters' gradients in an ordinary backward pass."""
        return sum(of.gradient_flops for of in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """The same as nested dicts, lists, numbers and strings."""
        totals = {"flops": self.flops, "gradient_flops": self.gradient_flops}
        found: dict[str, Any] = _plain({**asdict(self), **totals})
        return found

    def __str__(self) -> str:
        if not self.samples:
            return "No Gramian has been computed yet."
        whole = "the whole batch as one sample" if self.samples == 1 else f"{self.samples} samples"
        lines = [
            f"Objectives: {self.per_sample} of {whole}, by {self.per_sample} backward pass"
            f"{'es' * (self.per_sample > 1)} through the activations, and contractions.",
            "",
            *_table(self.parameters),
            "",
            "Rows, factors: the cost of either way in multiply-adds and memory traffic. The plan "
            "is the cheaper.",
            f"Contractions: {_short(self.flops)}FLOP. An ordinary backward pass has one pass "
            f"through the activations, and {_short(self.gradient_flops)}FLOP for the gradients of "
            "these parameters.",
        ]
        uses = [use for of in self.parameters for use in of.uses]
        if any(use.rule is None for use in uses):
            lines.append("A fallback makes explicit rows by backward passes that are not counted.")
        if any(use.is_derived for use in uses):
            lines.append("What it costs to pull rows back from derived tensors is not counted.")
        lines += [f"Not covered: `{name}` {reason}" for name, reason in self.uncovered.items()]
        return "\n".join(lines)


def _table(parameters: Iterable[ParameterReport]) -> list[str]:
    """Lines with a column for each thing to say."""
    head = ("parameter", "shape", "calls", "samples in", "found", "plan", "rows", "factors")
    lines = [(*head, "FLOP", "bytes", "share"), *(_line(of) for of in parameters)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(word.ljust(n) for word, n in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _line(of: ParameterReport) -> tuple[str, ...]:
    """The entries of a line."""
    return (
        of.name,
        "x".join(map(str, of.shape)) or "()",
        _several(_call(use) for use in of.uses),
        _several(use.layout or "one sample" for use in of.uses),
        of.found,
        of.plan,
        *(_short(of.costs[name]) if name in of.costs else "" for name in ("rows", "factors")),
        _short(of.flops),
        _short(of.bytes),
        f"{of.share:.1%}",
    )


def _call(use: UseReport) -> str:
    """A call, with what is not usual about it."""
    notes = ["fallback"] if use.rule is None else []
    if use.rule is not None and not use.rule.startswith("autogram."):
        notes.append(use.rule)
    if use.is_derived:
        notes.append("derived")
    return f"{use.function} ({', '.join(notes)})" if notes else use.function


def _several(words: Iterable[str]) -> str:
    """Words, each once, with how often it occurs."""
    counts = Counter(words)
    return ", ".join(word if n == 1 else f"{n} x {word}" for word, n in counts.items())


def _short(number: int) -> str:
    """A number in units that leave three digits."""
    value, units = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _plain(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
