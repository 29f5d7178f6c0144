"""Noting: hooks of an engine's modules note which forward pass a result is from."""

from __future__ import annotations

import sys
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

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enters a module."""
        may_be_new = module is self._outermost or id(module) in self._root_ids
        if self._recording is not None and may_be_new and self._was_abandoned():
            self.close()
        if self._recording is None:
            if not torch.is_grad_enabled() or self._is_paused:
                return
            self._recording = self._channel.begin()
            note_wrapper(self._recording)
            self._outermost, self._frame = module, sys._getframe(1)
        tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._are_given += (any(x not in self._recording.names for x in tensors),)

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
        super().close()
        self._recording, self._are_given = None, ()
