"""Models compiled by `torch.compile`: the backend "autogram". See README.md here."""

import sys

from autogram._compiled.backend import autogram
from autogram._compiled.frames import leave_alone

__all__ = ["autogram"]

# Dynamo finds the name among entry points of packages. If it is imported, it may have looked.
if "torch._dynamo" in sys.modules:
    from torch._dynamo import register_backend

    register_backend(autogram)

leave_alone()
