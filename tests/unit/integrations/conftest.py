"""What trainers leave behind in a process."""

import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Settings of an accelerator are global, some in the environment; they end with the test."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
