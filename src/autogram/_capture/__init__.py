"""Capture: records the uses of parameters, and shows their cotangents. See README.md here."""

from autogram._capture.autograd.exact import exact, without_autocast
from autogram._capture.autograd.grad import add_to_grad
from autogram._capture.autograd.graph import leaves_behind
from autogram._capture.autograd.passes import Pass, running_pass
from autogram._capture.backward.driver import BatchDim, Driver, Drivers
from autogram._capture.backward.overflow import expecting_overflow
from autogram._capture.backward.summary import BlockSummary, Summary, UseReport
from autogram._capture.backward.unseen import Unseen
from autogram._capture.backward.verification import Verify
from autogram._capture.distribution import (
    is_distributed,
    is_exchanged,
    refuse_gradients,
    refuse_pass,
    refuse_shards,
    wrapper_now,
    wrappers_of,
)
from autogram._capture.forward.session import Parameters, Session
from autogram._capture.limit import limit_of_bytes, retried_with_less
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.replays import Replays
from autogram._capture.shards import Shards

__all__ = [
    "BatchDim",
    "BlockSummary",
    "Channel",
    "Driver",
    "Drivers",
    "Objectives",
    "Parameters",
    "Pass",
    "Replays",
    "Session",
    "Shards",
    "Summary",
    "Unseen",
    "UseReport",
    "Verify",
    "add_to_grad",
    "exact",
    "expecting_overflow",
    "is_distributed",
    "is_exchanged",
    "leaves_behind",
    "limit_of_bytes",
    "refuse_gradients",
    "refuse_pass",
    "refuse_shards",
    "retried_with_less",
    "running_pass",
    "without_autocast",
    "wrapper_now",
    "wrappers_of",
]
