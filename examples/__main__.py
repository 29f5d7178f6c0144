"""Runs all examples to the end, one after the other: ``make examples``."""

import subprocess
import sys
import time
from pathlib import Path

from examples.showing import print_table

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("[!_]*.py")
    if "__main__" in path.read_text("utf-8")
)


def main() -> int:
    """Runs them with the arguments of the command line, and returns how many failed."""
    rows, failed = [], 0
    for name in NAMES:
        print(f"\n=== python -m examples.{name} {' '.join(sys.argv[1:])}\n", flush=True)
        start = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", f"examples.{name}", *sys.argv[1:]]).returncode
        failed += code != 0
        rows.append((name, f"{time.perf_counter() - start:.0f}", "failed" if code else "done"))
    print()
    print_table(("example", "seconds", "end"), rows)
    return failed


if __name__ == "__main__":
    sys.exit(main())
