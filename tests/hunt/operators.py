"""Pairs from PyTorch's own sample inputs."""

from tests.hunt.pairs import Pair


def pairs() -> list[Pair]:
    """All pairs."""
    return []
