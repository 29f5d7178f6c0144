"""Models compiled by `torch.compile`: the backend "autogram". See README.md here."""

from typing import Any

from autogram._compiled.frames import leave_alone
from autogram._compiled.registration import register

__all__ = ["autogram"]


def __getattr__(name: str) -> Any:
    """The backend, imported only when something is compiled: the entry point leads here."""
    if name != "autogram":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autogram._compiled.backend import autogram

    return autogram


register()
leave_alone()
