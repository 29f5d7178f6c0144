"""Runs the hunt: ``python -m tests.hunt``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch

from tests.hunt import operators, table
from tests.hunt.runner import CONFIGURATIONS, Tally, run

SOURCES = {"table": table.pairs, "operators": operators.pairs}


def main() -> int:
    """Runs what the command line asks for, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt")
    parser.add_argument("--source", choices=["table", "operators"], action="append")
    parser.add_argument("--only", default="", help="the beginning of an id, or all of it")
    parser.add_argument("--most", type=int, default=60, help="how many failures to print")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help=f"in how many configurations to run each scenario, of {len(CONFIGURATIONS)}",
    )
    parser.add_argument("--share", type=int, default=1, help="run one of so many series only")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)

    tally, start = Tally(), time.perf_counter()
    only = arguments.only
    for source in arguments.source or SOURCES:
        for place, pair in enumerate(SOURCES[source]()):
            if not (pair.id.startswith(only) or only.startswith(pair.id)):
                continue

            def choose(number: int, id_: str, place: int = place) -> bool:
                if not id_.startswith(only):
                    return False
                if "/" in only:
                    return True
                scenario, configuration = divmod(number, len(CONFIGURATIONS))
                turn = (configuration - 5 * scenario - place) % len(CONFIGURATIONS)
                return turn < arguments.rounds and (place + scenario) % arguments.share == 0

            run(pair, choose, tally)
    _print(tally, time.perf_counter() - start, arguments.most)
    return bool(tally.failures)


def _print(tally: Tally, seconds: float, most: int) -> None:
    """The counts, and the failures, at most one for each scenario."""
    refused = ", ".join(f"{name} {n}" for name, n in tally.refused.most_common())
    print(f"operators {len(tally.operators)}  pairs {len(tally.pairs)}  series {tally.series}")
    print(f"steps {tally.steps}  exact {tally.exact}  refused {tally.refused.total()} ({refused})")
    print(f"not usable {tally.unusable}  failures {len(tally.failures)}  in {seconds:.0f} s")
    if not tally.failures:
        return
    by_operator = Counter(failure.id.split(":")[0] for failure in tally.failures)
    print("\nfailures by operator")
    for name, count in by_operator.most_common():
        print(f"  {count:6} {name}")
    print("\nfailed steps, one of each scenario")
    seen: set[str] = set()
    for failure in tally.failures:
        scenario = failure.id.rsplit("/", 1)[0]
        if scenario not in seen and len(seen) < most:
            seen.add(scenario)
            print(
                f'  step {failure.step}: {failure.what}\n    python -m tests.hunt --only "{failure.id}"'
            )


if __name__ == "__main__":
    sys.exit(main())
