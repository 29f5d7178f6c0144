"""Hooks on modules: a registry, gradients of each call, and captured calls. See README.md here."""

from autogram.hooks.capture import Call, capture
from autogram.hooks.handle import Handle
from autogram.hooks.registry import HookManager

__all__ = ["Call", "Handle", "HookManager", "capture"]
