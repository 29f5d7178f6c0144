"""The command line: ``autogram check module:function``, or ``python -m autogram check ...``."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from typing import Literal

import torch

from autogram import __version__
from autogram._check.checking import check
from autogram._check.printing import Bar, text_of
from autogram._check.subject import UsageError

_EXIT_CODES = "Exit codes: 0 right, 1 wrong or failed, 2 a wrong command or a failing function."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default that of the command line, and returns the exit code."""
    given = _parser().parse_args(arguments)
    bar = Bar(None if given.quiet else sys.stderr)
    try:
        found = check(given.function, given.batch_dim, given.seconds, bar.show)
    except UsageError as error:
        bar.close()
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"autogram: {error}", file=sys.stderr)
        return 2
    bar.close()
    print(json.dumps(found.to_dict(), indent=2) if given.json else text_of(found))
    return 0 if found.status in ("fine", "one objective") else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autogram", description="Exact Gramians of Jacobians for PyTorch."
    )
    version = f"autogram {__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    checked = commands.add_parser(
        "check",
        help="what an engine does for your model: report, verification, times",
        description="Takes your function that returns a model and losses, and reports how the "
        "Gramian of these losses is computed, whether it is right, what to do about parameters "
        "with explicit rows, and how long training steps take.",
        epilog=_EXIT_CODES,
    )
    checked.add_argument(
        "function",
        help="module:function, or file.py:function. It returns (model, losses), or, to time whole "
        "steps, (model, function) with a function that recomputes the losses",
    )
    checked.add_argument("--json", action="store_true", help="print a JSON object")
    checked.add_argument("--quiet", action="store_true", help="show no progress")
    checked.add_argument(
        "--seconds", type=_seconds, default=5.0, help="how long to time steps (5), 0 to skip timing"
    )
    checked.add_argument(
        "--batch-dim",
        type=_batch_dim,
        default="auto",
        help="as for Engine: auto, none, or the dimension of the losses that counts the samples",
    )
    return parser


def _seconds(text: str) -> float:
    """A time to spend."""
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def _batch_dim(text: str) -> int | Literal["auto"] | None:
    """A dimension, or one of the words."""
    if text in ("auto", "none"):
        return "auto" if text == "auto" else None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not auto, none or a number") from None
