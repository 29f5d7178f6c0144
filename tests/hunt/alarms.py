"""Verifies random programs, each of whose results is right: ``python -m tests.hunt.alarms``.

An error of a check is a false alarm: random programs find no wrong results, as `make fuzz` shows.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from autogram import Engine, NonFiniteError, VerificationError
from tests.unit.grammar import LOSSES, Case, Network, cases

# The dtypes whose right results must raise no alarm.
DTYPES = torch.float64, torch.float32, torch.bfloat16


@dataclass
class Tally:
    """How many programs were verified, and the alarms."""

    verified: int = 0
    alarms: list[str] = field(default_factory=list)


def programs(count: int, *, derandomize: bool = True) -> list[Case]:
    """Random networks with their losses."""
    drawn: list[Case] = []

    @settings(
        max_examples=count,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    return drawn


def run(drawn: Sequence[Case], dtype: torch.dtype) -> Tally:
    """Verifies what programs give in a dtype."""
    tally = Tally()
    with _default(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in drawn:
            try:
                tally.verified += _verify(case, dtype)
            except VerificationError as error:
                tally.alarms.append(f"{case}\n  {error}")
            except NonFiniteError:
                pass
    return tally


def _verify(case: Case, dtype: torch.dtype) -> bool:
    """Verifies a Gramian, a step and a Jacobian with its products, if there is a gradient."""
    model = case.model().to(dtype)
    if not _losses(case, model, dtype).requires_grad:
        return False
    limit = case.memory_limit_bytes
    with Engine(
        model, batch_dim=case.batch_dim, memory_limit_bytes=limit, verify="always"
    ) as engine:
        losses = [_losses(case, model, dtype) for _ in range(3)]
        engine.compute_gramian(losses[0])
        wide = torch.promote_types(dtype, torch.float32)
        weights = torch.linspace(-0.7, 1, losses[0].numel(), dtype=wide)
        engine.backward(losses[1], lambda _: weights)
        found = engine.jacobian(losses[2])
        found.gramian()
        found.jvp(found.vjp(weights))
        found.dense()
    return True


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Makes a dtype the default one in a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _losses(case: Case, model: Network, dtype: torch.dtype) -> Tensor:
    """The losses of one forward pass, with equal random numbers."""
    torch.manual_seed(1)
    x = case.inputs()
    output = model(x.to(dtype) if x.is_floating_point() else x)
    return LOSSES[case.losses][0](model, output)


def main() -> int:
    """Runs what the command line asks for, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt.alarms")
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--dtype", action="append", help="default: all")
    parser.add_argument("--others", action="store_true", help="other programs each time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    drawn = programs(arguments.programs, derandomize=not arguments.others)
    alarms = 0
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if arguments.dtype and name not in arguments.dtype:
            continue
        tally = run(drawn, dtype)
        print(f"{len(tally.alarms)} alarms in {tally.verified} programs in {name}", flush=True)
        print("\n".join(tally.alarms), flush=True)
        alarms += len(tally.alarms)
    return bool(alarms)


if __name__ == "__main__":
    sys.exit(main())
