"""Hooks on modules: registered together, switched together, removed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, Any], Any]


class HookManager:
    """Forward hooks on any number of modules.

    Example:
        >>> from torch import nn
        >>> import torch
        >>> shapes = []
        >>> manager = HookManager()
        >>> layer = nn.Linear(3, 2)
        >>> manager.hook(layer, after=lambda module, output: shapes.append(output.shape))
        >>> _ = layer(torch.zeros(5, 3))
        >>> with manager.inactive():
        ...     _ = layer(torch.zeros(6, 3))
        >>> shapes
        [torch.Size([5, 2])]
        >>> manager.remove()
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.is_active = True

    def hook(
        self, module: nn.Module, before: Before | None = None, after: After | None = None
    ) -> None:
        """Registers functions to call before and after a module's forward.

        Args:
            module: The module.
            before: Called with the module, its positional and its keyword arguments.
            after: Called with the module and its output, which a returned value other than
                ``None`` replaces. It is also called, with ``None``, when the forward raises.
        """
        if before is not None:
            run_before = _RunBefore(self, before)
            handle = module.register_forward_pre_hook(run_before, with_kwargs=True)
            self._handles.append(handle)
        if after is not None:
            run_after = _RunAfter(self, after)
            handle = module.register_forward_hook(run_after, always_call=True)
            self._handles.append(handle)

    @contextmanager
    def inactive(self) -> Iterator[None]:
        """Lets modules run as if they had no hooks of this manager."""
        before, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = before

    def remove(self) -> None:
        """Takes all hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _RunBefore:
    """A hook that runs while its manager is active. A copy or a pickle of it does nothing."""

    def __init__(self, manager: HookManager, function: Before) -> None:
        self._manager = manager
        self._function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._manager.is_active:
            self._function(module, args, kwargs)

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _RunAfter:
    """The same after the forward."""

    def __init__(self, manager: HookManager, function: After) -> None:
        self._manager = manager
        self._function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del args
        return self._function(module, output) if self._manager.is_active else None

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    """What a hook becomes in a copy of its module, which belongs to no manager."""

    def __call__(self, *args: Any) -> None:
        del args
