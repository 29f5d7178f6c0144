"""Pictures of Gramians and of training. Needs matplotlib."""

from autogram._extras import extra

with extra("plot"):
    from autogram.plot._pictures import by_cluster, plot_cosines, plot_history, plot_norms

__all__ = ["by_cluster", "plot_cosines", "plot_history", "plot_norms"]
