"""Models compiled by `torch.compile`: the backend "autogram". See README.md here."""

import sys
from importlib.metadata import PackageNotFoundError, distribution

from autogram._compiled.backend import autogram
from autogram._compiled.frames import leave_alone

__all__ = ["autogram"]


def _is_installed() -> bool:
    """Whether Dynamo will find the name among the entry points of packages."""
    try:
        return bool(distribution("autogram").entry_points)
    except PackageNotFoundError:
        return False


# If Dynamo is imported, it may have looked. To import it takes longer than all that is here.
if "torch._dynamo" in sys.modules or not _is_installed():
    from torch._dynamo import register_backend

    register_backend(autogram)

leave_alone()
