"""Fixtures of the tests on whole models."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Give every test the same random numbers, and restore the generator after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
