"""Uses that a compiled part may contract itself: all that read some parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from autogram._capture.uses import Use


class Account(Hashable, Protocol):
    """What is known of a parameter in a pass."""

    expected: int
    is_reached: bool


def closed(reads: Mapping[Use, Sequence[Account]]) -> list[Use]:
    """Those of some uses that read nothing which other uses read, too.

    Args:
        reads: The accounts of what each use reads.
    """
    found = dict(reads)
    while True:
        counts = Counter(account for accounts in found.values() for account in accounts)
        others = [
            use
            for use, accounts in found.items()
            if any(x.is_reached or counts[x] != x.expected for x in accounts)
        ]
        if not others:
            return list(found)
        for use in others:
            del found[use]
