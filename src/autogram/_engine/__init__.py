"""The engine: what a training loop talks to. See README.md here."""

from autogram._engine.engine import Engine

__all__ = ["Engine"]
