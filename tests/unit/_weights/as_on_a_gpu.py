"""Weights that are looked at as on a GPU, for tests of the folders beside `_weights`."""

import pytest

from autogram import _weights
from autogram._capture.samples.replays import Flag


def look_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, *, arrives: bool = False) -> None:
    """Lets no step read its own weights. What is read later arrives at once, or never."""
    monkeypatch.setattr(_weights, "_is_read_at_once", lambda _device: False)
    monkeypatch.setattr(Flag, "has_arrived", arrives)
