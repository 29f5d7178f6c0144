"""Process groups: one exact Gramian of the objectives of all ranks. See README.md here."""

from autogram._distributed.gradients import accumulate, gradients_of
from autogram._distributed.ranks import Ranks, together
from autogram._distributed.wrapper import Wrappers

__all__ = ["Ranks", "Wrappers", "accumulate", "gradients_of", "together"]
