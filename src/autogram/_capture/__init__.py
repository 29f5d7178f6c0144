"""Capture: records the uses of parameters, and shows their cotangents. See README.md here."""

from autogram._capture.distribution import (
    is_distributed,
    is_exchanged,
    refuse_gradients,
    refuse_pass,
    refuse_shards,
)
from autogram._capture.driver import BatchDim, Driver
from autogram._capture.drivers import Drivers
from autogram._capture.exact import exact, without_autocast
from autogram._capture.memory import Limit, retried_with_less
from autogram._capture.objectives import Objectives
from autogram._capture.parameters import Parameters
from autogram._capture.passes import running_pass
from autogram._capture.record import Entry, Record
from autogram._capture.recording import Channel
from autogram._capture.recordings import Recordings
from autogram._capture.unseen import Unseen
from autogram._capture.verification import Verify
from autogram._capture.warning import warn_user

__all__ = [
    "BatchDim",
    "Channel",
    "Driver",
    "Drivers",
    "Entry",
    "Limit",
    "Objectives",
    "Parameters",
    "Record",
    "Recordings",
    "Unseen",
    "Verify",
    "exact",
    "is_distributed",
    "is_exchanged",
    "refuse_gradients",
    "refuse_pass",
    "refuse_shards",
    "retried_with_less",
    "running_pass",
    "warn_user",
    "without_autocast",
]
