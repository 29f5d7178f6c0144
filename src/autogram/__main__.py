"""The command line: ``python -m autogram``."""

import sys

from autogram._check import main

if __name__ == "__main__":
    sys.exit(main())
