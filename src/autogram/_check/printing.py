"""The findings of a check as text, and a progress bar."""

from __future__ import annotations

from typing import TextIO

from autogram._check.checking import Found
from autogram._check.timing import Times

_WIDTH = 24


class Bar:
    """Shows progress on a stream, if any: a bar on a terminal, otherwise a line for each phase."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._phase = ""
        self._is_terminal = stream is not None and stream.isatty()

    def show(self, phase: str, share: float) -> None:
        """Shows the finished share of a phase."""
        if self._stream is None:
            return
        if self._is_terminal:
            done = round(_WIDTH * share)
            bar = "█" * done + "·" * (_WIDTH - done)
            self._stream.write(f"\r\x1b[K{bar} {phase}")
        elif phase != self._phase:
            self._stream.write(f"{phase} ...\n")
        self._phase = phase
        self._stream.flush()

    def close(self) -> None:
        """Removes the bar."""
        if self._stream is not None and self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def text_of(found: Found) -> str:
    """The findings of a check, in words."""
    parts = []
    if found.shapes:
        shapes = " ".join(str(shape) for shape in found.shapes)
        parts.append(f"Losses: {shapes}, {found.device}")
    if found.report is not None:
        parts.append(str(found.report))
    parts += [
        f"Explicit rows: `{fallback.parameter}` in {', '.join(fallback.functions)} "
        f"({fallback.elements} numbers). {fallback.advice}"
        for fallback in found.fallbacks
    ]
    parts += [f"Warning: {warning}" for warning in found.warnings]
    if found.times is not None:
        parts.append(_of_times(found.times))
    parts.append(_verdict(found))
    return "\n\n".join(parts)


def _verdict(found: Found) -> str:
    if found.status == "fine":
        return "Fine: the Gramian agrees with an ordinary backward pass, parameter by parameter."
    if found.status == "one objective":
        return (
            "Nothing to weigh: the losses are one objective. Return one loss for each sample or "
            'task (`reduction="none"`, no `.mean()`), and more than one.'
        )
    # Other errors of the engine include losses that are not finite, or have no graph.
    word = "Wrong" if found.status == "wrong" else "Failed"
    return f"{word}: {found.kind}: {found.error}"


def _of_times(times: Times) -> str:
    lines = [
        f"Medians of {times.count} {times.what} each, with weights that cost nothing:",
        f"  SGD on the mean of the losses  {times.sgd:10.2f} ms",
        _line("Gramian and a backward pass", times.two_passes, times),
    ]
    if times.fused is not None:
        lines.append(_line("engine.backward", times.fused, times))
    else:
        lines.append("Return a function that computes the losses, to time whole steps.")
    return "\n".join(lines)


def _line(name: str, milliseconds: float, times: Times) -> str:
    return f"  {name:<29}  {milliseconds:10.2f} ms, {milliseconds / times.sgd:.2f} times"
