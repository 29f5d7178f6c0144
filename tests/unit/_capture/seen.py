"""What is recorded, for tests of the folders beside this file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from autogram._capture.forward.tapping import Tapping
from autogram._capture.uses import FallbackUse, Use


@contextmanager
def seen_uses() -> Iterator[list[Use]]:
    """The uses that are recorded meanwhile."""
    seen: list[Use] = []
    tap = Tapping.tap

    def tap_and_tell(use: Use, *rest: Any, **options: Any) -> Tensor:
        seen.append(use)
        return tap(use, *rest, **options)

    with mock.patch.object(Tapping, "tap", staticmethod(tap_and_tell)):
        yield seen


def left_to_fallback(uses: list[Use]) -> list[str]:
    """The functions of uses that have no rule."""
    return [use.function for use in uses if isinstance(use, FallbackUse)]
