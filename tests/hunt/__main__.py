"""Runs the hunt: ``python -m tests.hunt``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch

from tests.hunt import operators, table
from tests.hunt.runner import CONFIGURATIONS, Tally, chooser, run

SOURCES = {"table": table.pairs, "operators": operators.pairs}


def main() -> int:
    """Runs what the command line asks for, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt")
    parser.add_argument("--source", choices=list(SOURCES), action="append", help="default: both")
    parser.add_argument("--only", default="", help="run what has this id, or an id that begins so")
    parser.add_argument("--most", type=int, default=60, help="how many failures to print")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help=f"in how many configurations to run each scenario, of {len(CONFIGURATIONS)}",
    )
    parser.add_argument(
        "--share", type=int, default=4, help="run one of so many scenarios; all if one is named"
    )
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)

    tally, start = Tally(), time.perf_counter()
    for source in arguments.source or SOURCES:
        for place, pair in enumerate(SOURCES[source](arguments.only)):
            run(pair, chooser(place, arguments.rounds, arguments.share, arguments.only), tally)
            if sys.stderr.isatty():
                print(
                    f"\r{tally.steps} steps, {len(tally.failures)} failures",
                    end="",
                    file=sys.stderr,
                )
    _print(tally, time.perf_counter() - start, arguments.most)
    return bool(tally.failures)


def _print(tally: Tally, seconds: float, most: int) -> None:
    """The counts, and the failures, one of each scenario."""
    refused = ", ".join(f"{name} {n}" for name, n in tally.refused.most_common())
    print(f"operators {len(tally.operators)}  pairs {len(tally.pairs)}  series {tally.series}")
    print(f"steps {tally.steps}  exact {tally.exact}  refused {tally.refused.total()} ({refused})")
    by_values = sum(failure.is_by_values for failure in tally.failures)
    print(f"failures {len(tally.failures)}, of which {by_values} by values of float tensors alone")
    print(f"series that cannot be compared {tally.unusable}  seconds {seconds:.0f}")
    if not tally.failures:
        return
    print("\nfailed steps by operator")
    by_operator = Counter(failure.id.split(":")[0] for failure in tally.failures)
    for name, count in by_operator.most_common():
        print(f"  {count:6} {name}")
    print("\nfailed steps, one of each scenario")
    firsts = {failure.id.rsplit("/", 1)[0]: failure for failure in reversed(tally.failures)}
    for failure in list(reversed(firsts.values()))[:most]:
        note = ", by values alone" if failure.is_by_values else ""
        print(f"  step {failure.step}: {failure.what}{note}")
        print(f'    python -m tests.hunt --only "{failure.id}"')


if __name__ == "__main__":
    sys.exit(main())
