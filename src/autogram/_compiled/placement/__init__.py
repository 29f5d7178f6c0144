"""Where samples lie in a compiled backward pass. See README.md here."""

from autogram._compiled.placement.carried import find_carried
from autogram._compiled.placement.place import UNKNOWN, reshaped

__all__ = ["UNKNOWN", "find_carried", "reshaped"]
