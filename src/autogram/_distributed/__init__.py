"""Process groups: one exact Gramian of the objectives of all ranks. See README.md here."""

from autogram._distributed.gradients import accumulate, check_outside
from autogram._distributed.ranks import Ranks

__all__ = ["Ranks", "accumulate", "check_outside"]
