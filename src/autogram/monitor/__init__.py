"""Monitors conflict: a few numbers from each Gramian, read from the device on request."""

from autogram.monitor._monitor import ConflictMonitor
from autogram.monitor._numbers import Numbers, cosines, noise_and_signal

__all__ = ["ConflictMonitor", "Numbers", "cosines", "noise_and_signal"]
