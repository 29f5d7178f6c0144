"""Noting: hooks of an engine's modules note which forward pass a result is from."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from autogram._capture.distribution import note_wrapper
from autogram._capture.forward.session import Session
from autogram._capture.recording import Recording


class NotingSession(Session):
    """Notes, at the nodes of modules' results, the parameters that the forward pass had.

    Nothing else is done in a forward pass: no call of torch is seen.
    """

    _recording: Recording | None = None
    _are_given: tuple[bool, ...] = ()
    """For each module that was entered: whether it was given tensors that are no parameters."""
    _outer: FrameType | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enters a module."""
        del module
        if self._recording is not None and self._is_abandoned():
            self.close()
        if self._recording is None:
            if not torch.is_grad_enabled() or self._is_paused:
                return
            self._recording = self._channel.begin()
            note_wrapper(self._recording)
            self._outer = sys._getframe(1)
        given = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._are_given += (any(x not in self._recording.names for x in given),)

    def end(self, module: nn.Module, output: Any) -> None:
        """Leaves a module, also if its forward raised."""
        del module
        if self._recording is None:
            return
        is_given, self._are_given = self._are_given[-1], self._are_given[:-1]
        for x in _pytree.tree_leaves(output):
            if isinstance(x, Tensor) and (is_given or not self._are_given):
                self._recording.note_at(x)
        if not self._are_given:
            self.close()

    def close(self) -> None:
        """Ends the forward pass, if one is open in this thread."""
        self._recording, self._are_given, self._outer = None, (), None

    def _is_abandoned(self) -> bool:
        """Whether the call that began the pass has ended without leaving, as by an interrupt."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outer:
            frame = frame.f_back
        return frame is None
