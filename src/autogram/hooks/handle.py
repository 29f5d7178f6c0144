"""Adds one hook to one module, with PyTorch's own registration, and removes it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from autogram.hooks.around import put_around
from autogram.hooks.backward import Gates, gates_of

HookKind = Literal["forward_pre", "forward", "backward", "around"]


class Handle:
    """One function on one module. It holds the module weakly.

    While it is inactive, the function is not registered with PyTorch.

    Attributes:
        id: The names of the function and of the module, as in ``"my_hook[encoder.layer.0]"``.
        name: The name given at registration, or the function's own.
        function: The function.
        kind: The kind of hook, which determines when the function is called.
    """

    def __init__(
        self,
        id: str,
        name: str,
        function: Any,
        module: nn.Module,
        kind: HookKind,
        forget: Callable[[Handle], None],
        *,
        with_kwargs: bool,
    ) -> None:
        self.id = id
        self.name = name
        self.function = function
        self.kind: HookKind = kind
        self._module = weakref.ref(module)
        self._forget = forget
        self._options = {"with_kwargs": with_kwargs}
        self._gates: Gates | None = None
        if kind == "backward":
            self._gates = function if isinstance(function, Gates) else gates_of(function)
        self._order = RemovableHandle(OrderedDict()).id  # the next number of PyTorch's own
        self._off: list[Callable[[], None]] = []

    @property
    def module(self) -> nn.Module | None:
        """The module, or ``None`` if nothing else holds it any more."""
        return self._module()

    @property
    def is_active(self) -> bool:
        """Whether the function is called."""
        return bool(self._off)

    def remove(self) -> None:
        """Removes the function from the module for good."""
        self._set(is_on=False)
        self._forget(self)

    def __repr__(self) -> str:
        state = "active" if self.is_active else "inactive"
        return f"Handle({self.id!r}, kind={self.kind!r}, {state})"

    def _set(self, *, is_on: bool) -> None:
        """Adds the function to the module, or removes it."""
        if not is_on:
            while self._off:
                self._off.pop()()
        elif not self._off and (module := self.module) is not None:
            self._off = self._put_on(module)

    def _put_on(self, module: nn.Module) -> list[Callable[[], None]]:
        """Adds the function to the module, and returns functions that remove it."""
        if self.kind == "around":
            return [put_around(module, self.function, self._order)]
        put_pre, put = module.register_forward_pre_hook, module.register_forward_hook
        if self._gates is None:
            register = put_pre if self.kind == "forward_pre" else put
            return [self._registered(register, self.function, **self._options)]
        before = self._registered(put_pre, self._gates.before, with_kwargs=True)
        options = {"with_kwargs": True, "always_call": True}
        return [before, self._registered(put, self._gates.after, **options)]

    def _registered(
        self, register: Callable[..., RemovableHandle], function: Any, **options: bool
    ) -> Callable[[], None]:
        """Registers a function in its original place, and returns a function that removes it."""
        entry = _RegisteredHook(function, self._order)
        handle = register(entry, **options)
        hooks: Any = handle.hooks_dict_ref()
        later, order = [], inf
        for key in [*hooks][-2::-1]:
            # Earlier hooks with a higher number were put there by `prepend=True`.
            if not self._order < getattr(hooks[key], "order", key) < order:
                break
            order = getattr(hooks[key], "order", key)
            later.append(key)
        for key in reversed(later):
            hooks.move_to_end(key)

        def take_off() -> None:
            entry.is_on = False
            handle.remove()

        return take_off


class _RegisteredHook:
    """A function registered with PyTorch. Copies and pickles of the module leave it out.

    During a call, PyTorch uses the module's hooks from the beginning of the call. If
    another hook has removed a function meanwhile, ``is_on`` keeps it from being called.
    """

    __slots__ = ("function", "is_on", "order")

    def __init__(self, function: Any, order: int) -> None:
        self.function, self.order, self.is_on = function, order, True

    def __call__(self, *args: Any) -> Any:
        return self.function(*args) if self.is_on else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Gone, ()


class _Gone:
    """Replaces a hook in a copy of its module, and removes itself at the first call."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
