"""Process groups: one exact Gramian of the objectives of all ranks. See README.md here."""

from autogram._distributed.gradients import accumulate, gradients_of
from autogram._distributed.ranks import Ranks, attempted, together
from autogram._distributed.signals import held
from autogram._distributed.wrapper import Wrappers

__all__ = ["Ranks", "Wrappers", "accumulate", "attempted", "gradients_of", "held", "together"]
