"""Optimizers that solve systems with a Gramian."""

from autogram.optim._gauss_newton import GaussNewton

__all__ = ["GaussNewton"]
