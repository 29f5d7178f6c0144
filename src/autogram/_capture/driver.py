"""The driver: from losses to the Gramian, by one backward pass through the activations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from autogram._blocks import Layout
from autogram._capture.assembly import Assembly, LayoutsOf, UnknownLayoutError
from autogram._capture.objectives import Objectives
from autogram._capture.probe import Probe
from autogram._capture.recording import Channel, Recording
from autogram._capture.visit import visit
from autogram._errors import (
    CoupledObjectivesWarning,
    MixedSamplesError,
    NotConnectedError,
)

BatchDim = int | Literal["auto"] | None
Key = tuple[int, tuple[int, ...], int | None]

# From `warnings.warn` through `_warn`, `_gramian`, `gramian` and `Engine` to the user's line.
_USER_LEVEL = 5

# How many signatures of forward passes to remember layouts for. Batches of varying length have one
# each; a forgotten one costs one backward pass through the activations.
_REMEMBERED = 512


class Driver:
    """Runs backward passes for one engine, and remembers the layouts that it found.

    Args:
        channel: The channel of the engine's taps.
        batch_dim: The dimension of the losses that counts the samples, ``None`` for one sample, or
            ``"auto"`` to find out.
        limit: The number of elements that one intermediate result may have.
    """

    def __init__(self, channel: Channel, batch_dim: BatchDim, limit: int) -> None:
        self._channel = channel
        self._batch_dim = batch_dim
        self._limit = limit
        self._layouts: dict[Key, Mapping[int, Layout] | None] = {}
        self._has_warned = False

    def gramian(self, losses: Tensor) -> Tensor:
        """The Gramian of the losses, ``(m, m)``.

        Raises:
            NotConnectedError: The losses do not depend on a recorded use of a parameter.
            MixedSamplesError: ``batch_dim`` is a dimension, and the losses are not per-sample.
            NonFiniteError: A cotangent in which the samples are sought is not finite.
            FreedGraphError: The graph was freed by an earlier backward pass.
        """
        # What is computed here is no part of a graph, and is exact whatever the user's autocast.
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            return self._gramian(losses)

    def _gramian(self, losses: Tensor) -> Tensor:
        """The Gramian, with samples or without."""
        batch_dim = 0 if self._batch_dim == "auto" else self._batch_dim
        objectives = Objectives(losses, batch_dim if losses.dim() else None)
        if objectives.samples > 1:
            try:
                return self._assemble_per_sample(objectives)
            except MixedSamplesError as error:
                if self._batch_dim != "auto":
                    raise
                self._warn(error)
        return self._assemble(Objectives(losses, None), None)

    def _assemble_per_sample(self, objectives: Objectives) -> Tensor:
        """The Gramian of per-sample losses, after a look for the samples where it is needed."""

        def layouts_of(recording: Recording) -> Mapping[int, Layout]:
            key = self._key(recording, objectives)
            known = self._layouts.get(key, {})
            if known is None:
                raise MixedSamplesError("The samples are mixed, as in an earlier call.")
            return known

        while True:
            try:
                return self._assemble(objectives, layouts_of)
            except UnknownLayoutError as unknown:
                probe = Probe(objectives.samples)
                try:
                    probe.run(self._channel, objectives, unknown.use)
                except MixedSamplesError:
                    self._remember(self._key(unknown.use.recording, objectives), None)
                    raise
                for recording, layouts in probe.found().items():
                    self._remember(self._key(recording, objectives), layouts)

    def _assemble(self, objectives: Objectives, layouts_of: LayoutsOf | None) -> Tensor:
        """One pass past the taps, with the layouts that are known."""
        assembly = visit(
            self._channel,
            objectives.losses,
            objectives.cotangents(),
            lambda: Assembly(self._channel, layouts_of, self._limit),
        )
        if not assembly.has_arrivals:
            raise NotConnectedError(
                "The losses do not depend on any parameter of the engine's modules that requires a "
                "gradient. Compute them from an output of these modules, in a forward pass that "
                "ran after the engine was made, with gradients enabled."
            )
        gramian = assembly.gramian()
        if gramian is None:
            dtype = torch.promote_types(objectives.losses.dtype, torch.float32)
            m = objectives.losses.numel()
            return objectives.losses.new_zeros(m, m, dtype=dtype)
        return objectives.arrange_gramian(gramian)

    def _key(self, recording: Recording, objectives: Objectives) -> Key:
        """What the layouts of a recording may depend on."""
        return recording.signature, tuple(objectives.losses.shape), objectives.batch_dim

    def _remember(self, key: Key, layouts: Mapping[int, Layout] | None) -> None:
        """Keeps layouts for the next call, ``None`` if the samples are mixed."""
        known = self._layouts.pop(key, None)
        self._layouts[key] = {**known, **layouts} if known and layouts else layouts
        if len(self._layouts) > _REMEMBERED:
            del self._layouts[next(iter(self._layouts))]

    def _warn(self, error: MixedSamplesError) -> None:
        """Tells the user, once, that the whole batch is treated as one sample."""
        if self._has_warned:
            return
        self._has_warned = True
        message = (
            f"The objectives are treated as coupled, which is exact and slower. {error} To treat "
            "them so without this warning, also pass `batch_dim=None`."
        )
        warnings.warn(message, CoupledObjectivesWarning, stacklevel=_USER_LEVEL)
