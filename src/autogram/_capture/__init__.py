"""Capture: records the uses of parameters, and shows their cotangents. See README.md here."""

from autogram._capture.autograd.exact import exact, without_autocast
from autogram._capture.autograd.passes import running_pass
from autogram._capture.backward.driver import BatchDim, Driver
from autogram._capture.backward.drivers import Drivers
from autogram._capture.backward.record import Entry, Record
from autogram._capture.backward.unseen import Unseen
from autogram._capture.backward.verification import Verify
from autogram._capture.distribution import (
    is_distributed,
    is_exchanged,
    refuse_gradients,
    refuse_pass,
    refuse_shards,
)
from autogram._capture.forward.session import Parameters, Session
from autogram._capture.limit import Limit, retried_with_less
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._errors import warn_user

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
    "Session",
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
