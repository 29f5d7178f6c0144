"""Hooks on modules: registered together, switched together, removed together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, Any], Any]


class _Switch(threading.local):
    """On or off, in each thread on its own: one may evaluate while another trains."""

    is_on = True


class HookManager:
    """Forward hooks on any number of modules.

    All are switched together, for a thread or for a block of code, and removed together: by
    :meth:`remove`, or at the end of a ``with`` block. A copy or a pickle of a hooked module has
    hooks that do nothing, and so has a module inside of what `torch.compile` has compiled.

    Example:
        >>> from torch import nn
        >>> import torch
        >>> shapes = []
        >>> layer = nn.Linear(3, 2)
        >>> with HookManager() as manager:
        ...     manager.hook(layer, after=lambda module, output: shapes.append(output.shape))
        ...     _ = layer(torch.zeros(5, 3))
        ...     with manager.inactive():
        ...         _ = layer(torch.zeros(6, 3))
        >>> _ = layer(torch.zeros(7, 3))
        >>> shapes
        [torch.Size([5, 2])]
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._switch = _Switch()

    @property
    def is_active(self) -> bool:
        """Whether the hooks run, in this thread."""
        return self._switch.is_on

    @property
    def has_hooks(self) -> bool:
        """Whether any hook was registered and not removed since."""
        return bool(self._handles)

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
            run_before = _RunBefore(self._switch, before)
            handle = module.register_forward_pre_hook(run_before, with_kwargs=True)
            self._handles.append(handle)
        if after is not None:
            run_after = _RunAfter(self._switch, after)
            handle = module.register_forward_hook(run_after, always_call=True)
            self._handles.append(handle)

    def activate(self) -> None:
        """Lets the hooks run in this thread, as they do at first."""
        self._switch.is_on = True

    def deactivate(self) -> None:
        """Lets modules run in this thread as if they had no hooks of this manager."""
        self._switch.is_on = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Lets the hooks run inside of a block, also where they are inactive around it."""
        with self._switched(on=True):
            yield

    @contextmanager
    def inactive(self) -> Iterator[None]:
        """Lets modules run inside of a block as if they had no hooks of this manager."""
        with self._switched(on=False):
            yield

    def remove(self) -> None:
        """Takes all hooks off the modules. Others may be registered afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def _switched(self, *, on: bool) -> Iterator[None]:
        """Switches the hooks of this thread, and puts the switch back."""
        before, self._switch.is_on = self._switch.is_on, on
        try:
            yield
        finally:
            self._switch.is_on = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


# What a hook becomes in a copy of its module, which belongs to no manager: a function of any
# arguments that returns nothing. From the standard library, so that a saved model can be read where
# autogram is not installed.
_NOTHING = getattr, (nullcontext(), "__exit__")


class _RunBefore:
    """A hook that runs while its manager is active. A copy or a pickle of it does nothing."""

    def __init__(self, switch: _Switch, function: Before) -> None:
        self._switch = switch
        self._function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling() and self._switch.is_on:
            self._function(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING


class _RunAfter:
    """The same after the forward."""

    def __init__(self, switch: _Switch, function: After) -> None:
        self._switch = switch
        self._function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del args
        if torch.compiler.is_dynamo_compiling() or not self._switch.is_on:
            return None
        return self._function(module, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING
