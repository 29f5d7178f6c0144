"""How an engine's recordings are put on its modules, and taken off."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from autogram._capture import Recordings
from autogram.hooks import HookManager


def hook_all(modules: Iterable[nn.Module], recordings: Recordings) -> HookManager:
    """Lets modules, and all inside of them that have parameters, open and close recordings.

    Every module, and not the outermost ones alone: activation checkpointing runs some of them again
    in the backward pass, where the same taps must appear.
    """
    hooks = HookManager()
    for root in modules:
        for module in root.modules():
            if module is root or _can_be_hooked(module):
                hooks.hook(module, recordings.begin, recordings.end, only_with_gradients=True)
    return hooks


def take_off(hooks: HookManager, recordings: Recordings) -> None:
    """Removes the hooks, and closes the recording that they would have closed."""
    hooks.remove()
    recordings.abandon()


def _can_be_hooked(module: nn.Module) -> bool:
    """Whether a module has parameters, and a forward that Python runs."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return not is_scripted and next(module.parameters(), None) is not None
