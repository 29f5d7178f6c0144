"""Fixtures for tests of rules."""

import pytest

from autogram.rules.composed import COMPOSED


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where PyTorch has a kernel for each cell, and composes it of no other calls."""
    for rule in list(COMPOSED):
        monkeypatch.delitem(COMPOSED, rule)
