"""Pictures of Gramians and of training. Needs matplotlib."""

from autogram.plot._heat_map import by_cluster, plot_cosines
from autogram.plot._training import plot_history, plot_norms

__all__ = ["by_cluster", "plot_cosines", "plot_history", "plot_norms"]
