"""What is recorded, for tests of the folders beside this file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autogram._capture.forward.tapper import Tapper
from autogram._capture.uses import Use


@contextmanager
def seen_uses() -> Iterator[list[Use]]:
    """The uses that are recorded meanwhile."""
    seen: list[Use] = []
    enter = Tapper._enter

    def enter_and_tell(self: Tapper, use: Use, *rest: Any) -> Use:
        seen.append(use)
        return enter(self, use, *rest)

    with mock.patch.object(Tapper, "_enter", enter_and_tell):
        yield seen
