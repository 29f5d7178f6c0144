"""Checkpoints: parts of a forward pass that run again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch


class Checkpoints:
    """Knows whether a call will run again without being recorded.

    A checkpoint counts the tensors that are saved in its part of the forward pass, and expects as
    many when it runs that part again. Where the part enters a module, the hooks open a recording
    again and the same taps save the same tensors. Where it is a bare function that reads parameters
    itself, nothing is recorded the second time, so taps must not save anything the first time.
    """

    def __init__(self) -> None:
        self._at_entry = [_innermost_hook()]

    @property
    def is_bare(self) -> bool:
        """Whether a checkpoint has begun since the innermost module was entered."""
        return self._began(_innermost_hook())

    def enter(self) -> bool:
        """Enters a module, and says whether a checkpoint has begun between the last one and it."""
        hook = _innermost_hook()
        is_bare = self._began(hook)
        self._at_entry.append(hook)
        return is_bare

    def leave(self) -> None:
        """Leaves the innermost module."""
        self._at_entry.pop()

    def _began(self, hook: Any) -> bool:
        """Whether a hook is that of a checkpoint, and was not there at the last entry."""
        if hook is None or hook is self._at_entry[-1]:
            return False
        return "checkpoint" in getattr(hook, "__module__", "")


def _innermost_hook() -> Any:
    """The hook that saved tensors go through now; a checkpoint sets one of its own."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks and hooks[0]  # `None` outside of any
