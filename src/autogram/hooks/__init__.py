"""Hooks on modules: a registry of them, gradients of each call, and capture. See README.md here."""

from autogram.hooks.capture import Call, capture
from autogram.hooks.registry import Handle, HookManager

__all__ = ["Call", "Handle", "HookManager", "capture"]
