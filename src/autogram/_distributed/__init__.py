"""Process groups: one exact Gramian of the objectives of all ranks. See README.md here."""

from autogram._distributed.ranks import Ranks
from autogram._distributed.steps import (
    backward_of_ranks,
    gramian_of_ranks,
    own_part,
    weights_of_ranks,
)

__all__ = ["Ranks", "backward_of_ranks", "gramian_of_ranks", "own_part", "weights_of_ranks"]
