"""What is recorded, or read from the graph, for tests of the folders beside this file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from autogram._capture.forward.tapping import Tapping
from autogram._capture.from_graph.node_uses import NodeUse
from autogram._capture.from_graph.use_plan import UsePlan
from autogram._capture.uses import FallbackUse, Use


@contextmanager
def seen_uses() -> Iterator[list[Use]]:
    """The uses that are recorded meanwhile, or read from the graph."""
    seen: list[Use] = []
    tap, read = Tapping.tap, UsePlan.uses

    def tap_and_tell(use: Use, *rest: Any, **options: Any) -> Tensor:
        seen.append(use)
        return tap(use, *rest, **options)

    def read_and_tell(*args: Any) -> list[tuple[NodeUse, int]]:
        uses = read(*args)
        seen.extend(use for use, _ in uses)
        return uses

    recorded = mock.patch.object(Tapping, "tap", staticmethod(tap_and_tell))
    with recorded, mock.patch.object(UsePlan, "uses", read_and_tell):
        yield seen


def left_to_fallback(uses: list[Use]) -> list[str]:
    """The functions of uses that have no rule."""
    return [use.function for use in uses if isinstance(use, FallbackUse)]
