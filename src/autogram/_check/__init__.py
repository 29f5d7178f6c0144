"""The check of a user's model from a command line. See README.md here."""

from autogram._check.command import main

__all__ = ["main"]
