"""Hooks on modules: registered together, switched together, removed together."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from sys import getrefcount
from typing import Any, Self

from torch import is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, Any], Any]


class _Switch(threading.local):
    """On or off, in each thread on its own: one may evaluate while another trains."""

    is_on = True


class HookManager:
    """Functions to call before and after the forward passes of any number of modules.

    All hooks of a manager are switched together, for a thread or for a block of code, and removed
    together: by :meth:`remove`, or at the end of a ``with`` block. A copy or a pickle of a hooked
    module has no hooks, and a module inside of what `torch.compile` has compiled calls none.

    The hooks run around those that PyTorch knows. PyTorch's own cost each call more, also if they
    do nothing.

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
        self._hooks: list[tuple[_Hooked, _Hook]] = []
        self._switch = _Switch()

    @property
    def is_active(self) -> bool:
        """Whether the hooks run, in this thread."""
        return self._switch.is_on

    @property
    def has_hooks(self) -> bool:
        """Whether any hook was registered and not removed since."""
        return bool(self._hooks)

    def hook(
        self,
        module: nn.Module,
        before: Before | None = None,
        after: After | None = None,
        *,
        only_with_gradients: bool = False,
    ) -> None:
        """Registers functions to call before and after a module's forward.

        Of several on one module, the last is the innermost.

        Args:
            module: The module.
            before: Called with the module, its positional and its keyword arguments.
            after: Called with the module and its output, which a returned value other than
                ``None`` replaces. It is also called, with ``None``, when the forward raises.
            only_with_gradients: Whether to call them only while gradients are enabled.
        """
        hooked = _hooked(module)
        if hooked is None:
            if vars(module).get(_NAME) is not None:
                return  # compiled: hooks on it do nothing
            hooked = _attach(module, _enter)
        hook = _Hook(self._switch, before, after, only_with_gradients)
        hooked.set((*hooked.hooks, hook))
        self._hooks.append((hooked, hook))

    def activate(self) -> None:
        """Lets the hooks run in this thread, as they do at first."""
        self._switch.is_on = True

    def deactivate(self) -> None:
        """Lets modules run in this thread as if they had no hooks of this manager."""
        self._switch.is_on = False

    def active(self) -> AbstractContextManager[None]:
        """Lets the hooks run inside of a block, also where they are inactive around it."""
        return self._switched(is_on=True)

    def inactive(self) -> AbstractContextManager[None]:
        """Lets modules run inside of a block as if they had no hooks of this manager."""
        return self._switched(is_on=False)

    def remove(self) -> None:
        """Takes all hooks off the modules. Others may be registered afterwards."""
        for hooked, hook in self._hooks:
            hooked.set(tuple(other for other in hooked.hooks if other is not hook))
        self._hooks.clear()

    @contextmanager
    def _switched(self, *, is_on: bool) -> Iterator[None]:
        """Switches the hooks of this thread, and puts the switch back."""
        before, self._switch.is_on = self._switch.is_on, is_on
        try:
            yield
        finally:
            self._switch.is_on = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass(eq=False, slots=True)
class _Hook:
    """Functions to call before and after the forward of one module."""

    switch: _Switch
    before: Before | None
    after: After | None
    only_with_gradients: bool


@dataclass(eq=False, slots=True)
class _Hooked:
    """A module with hooks."""

    module: Callable[[], nn.Module | None]
    entrance: weakref.ref[_Entrance] = field(init=False)
    hooks: tuple[_Hook, ...] = ()
    """Those of all managers, from the outermost to the innermost."""
    only_with_gradients: bool = True
    """Whether all of them are."""

    def set(self, hooks: tuple[_Hook, ...]) -> None:
        """Replaces the hooks. Without any, the module is as it was before the first."""
        self.hooks = hooks
        self.only_with_gradients = all(hook.only_with_gradients for hook in hooks)
        module = self.module()
        if not hooks:
            if module is not None and _hooked(module) is self:
                del vars(module)[_NAME]
            self.module = lambda: None  # only a shallow copy of the module still comes here


# PyTorch calls what a module has under this name instead of the forward and of the hooks that
# PyTorch knows. `nn.Module.compile` puts what it compiles there. Copies and pickles leave it out.
_NAME = "_compiled_call_impl"
_CALLER = nn.Module._wrapped_call_impl.__code__  # the code of PyTorch that calls it


class _Entrance(partial[Any]):
    """Calls a module with its hooks. In C, because each call of the module comes here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that are copied with all that they have


def _attach(module: nn.Module, function: Callable[..., Any]) -> _Hooked:
    """Lets a function be called instead of a module, with what is known of the hooks in front."""
    hooked = _Hooked(weakref.ref(module))
    vars(module)[_NAME] = entrance = _Entrance(function, hooked)
    hooked.entrance = weakref.ref(entrance)
    return hooked


def _hooked(module: nn.Module) -> _Hooked | None:
    """What is known of a module's hooks, if it has any."""
    entrance = vars(module).get(_NAME)
    return entrance.args[0] if isinstance(entrance, _Entrance) else None


def _count_references() -> int:
    """How many references an entrance has while it is called, if its module alone has it."""
    module = nn.Identity()
    _attach(module, lambda hooked: getrefcount(hooked.entrance()))
    references: int = module()
    return references


_REFERENCES = _count_references()


def _enter(hooked: _Hooked, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a module, with its hooks if there is something for them to do."""
    module: Any = hooked.module()
    if is_dynamo_compiling():
        return module._call_impl(*args, **kwargs)
    if module is None or getrefcount(hooked.entrance()) > _REFERENCES:
        # Another object has the entrance too: perhaps a shallow copy, as `nn.DataParallel` makes.
        # To ask the caller each time would take as long as all the rest.
        frame = sys._getframe(1)
        if frame.f_code is _CALLER:
            module = frame.f_locals["self"]
    if is_grad_enabled() or not hooked.only_with_gradients:
        for hook in hooked.hooks:
            if hook.switch.is_on:
                return _run(module, hooked.hooks, args, kwargs)
    return module._call_impl(*args, **kwargs)


def _run(
    module: nn.Module, hooks: Sequence[_Hook], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a module between those of its hooks that are active."""
    has_gradients = is_grad_enabled()
    hooks = [h for h in hooks if h.switch.is_on and (has_gradients or not h.only_with_gradients)]
    entered: list[_Hook] = []
    output, is_done = None, False
    try:
        for hook in hooks:
            entered.append(hook)
            if hook.before is not None:
                hook.before(module, args, kwargs)
        output = module._call_impl(*args, **kwargs)
        is_done = True
    finally:
        while entered:
            after = entered.pop().after
            if after is not None:
                replaced = after(module, output)
                if is_done and replaced is not None:
                    output = replaced
    return output
