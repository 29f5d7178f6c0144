"""What trainers leave behind in a process."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """An accelerator's settings are global; those of a test end with it."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
