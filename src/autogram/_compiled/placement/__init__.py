"""Where samples are in a compiled backward pass. See README.md here."""

from autogram._compiled.placement.carried import find_carried

__all__ = ["find_carried"]
