"""Objects that are called at the beginning and at the end of each call of a module.

PyTorch's hooks cost each call of a module one to two microseconds, even if they do nothing.
An object around a module costs half of that if gradients are disabled, and its ``end`` is always
called, whatever happens inside.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from sys import getrefcount
from types import CodeType, FunctionType
from typing import Any, Protocol

from torch import is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling


class Around(Protocol):
    """An object that is called around the calls of a module while gradients are enabled."""

    is_off: bool
    """Whether the object is not called for calls that begin now."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs before the module. A result other than ``None`` replaces ``args``."""

    def end(self, module: nn.Module, output: Any) -> Any:
        """Receives the module's output, or ``None`` if its forward raised.

        A result other than ``None`` replaces the output.
        """


@dataclass(eq=False, slots=True)
class _Hooked:
    """A module with objects around it."""

    module: Callable[[], nn.Module | None]
    entrance: weakref.ref[_Entrance] = field(init=False)
    around: tuple[tuple[int, Around], ...] = ()
    """From the outermost to the innermost, with the order of registration."""

    def set(self, around: tuple[tuple[int, Around], ...]) -> None:
        """Replaces the objects around. Without any, the module returns to its original state."""
        self.around = around
        module = self.module()
        if not around:
            if module is not None and _hooked(module) is self:
                del vars(module)[_NAME]
            self.module = lambda: None  # only a shallow copy of the module still calls this


def put_around(module: nn.Module, around: Around, order: int) -> Callable[[], None]:
    """Puts an object around a module, inside objects with a lower order.

    An object around a module that `nn.Module.compile` has compiled is not called.

    Returns:
        A function that removes the object.
    """
    hooked = _hooked(module)
    if hooked is None:
        if vars(module).get(_NAME) is not None:
            return lambda: None
        hooked = _attach(module, _with_own_code(_enter))
    entry = (order, around)
    hooked.set(tuple(sorted((*hooked.around, entry), key=lambda x: x[0])))
    return lambda: hooked.set(tuple(x for x in hooked.around if x is not entry))


# If a module has this attribute, PyTorch calls it instead of the forward and PyTorch's own hooks.
# `nn.Module.compile` stores its result there. Copies and pickles leave the attribute out.
_NAME = "_compiled_call_impl"
_CALLER = nn.Module._wrapped_call_impl.__code__  # the code of PyTorch that calls it


class _Entrance(partial[Any]):
    """Calls a module with the objects around it. In C, because each call of the module runs it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that are copied with all their attributes


def _attach(module: nn.Module, function: Callable[..., Any]) -> _Hooked:
    """Lets a function be called instead of a module. Its first argument is this result."""
    hooked = _Hooked(weakref.ref(module))
    vars(module)[_NAME] = entrance = _Entrance(function, hooked)
    hooked.entrance = weakref.ref(entrance)
    return hooked


def _with_own_code(function: Any) -> FunctionType:
    """A copy of a function, because Dynamo compiles only a few variants of each code object.

    If Dynamo gives up the code that calls modules, it compiles modules one by one from here.
    """
    code: CodeType = function.__code__
    return FunctionType(code.replace(), function.__globals__, function.__name__)


def _hooked(module: nn.Module) -> _Hooked | None:
    """The module's entry here, or ``None`` if no object is around it."""
    entrance = vars(module).get(_NAME)
    return entrance.args[0] if isinstance(entrance, _Entrance) else None


def _count_references() -> int:
    """The number of references to an entrance during its call, if only its module holds it."""
    module = nn.Identity()
    _attach(module, lambda hooked: getrefcount(hooked.entrance()))
    references: int = module()
    return references


_REFERENCES = _count_references()


def _enter(hooked: _Hooked, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a module, with the objects around it if gradients are enabled."""
    module: Any = hooked.module()
    if is_dynamo_compiling():
        return module._call_impl(*args, **kwargs)
    if module is None or getrefcount(hooked.entrance()) > _REFERENCES:
        # Something else holds the entrance, too: perhaps a shallow copy made by `nn.DataParallel`.
        # Inspecting the caller's frame in each call would double the time of this function.
        frame = sys._getframe(1)
        if frame.f_code is _CALLER:
            module = frame.f_locals["self"]
    if is_grad_enabled():
        on = [around for _, around in hooked.around if not around.is_off]
        if on:
            return _run(module, args, kwargs, *on)
    return module._call_impl(*args, **kwargs)


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around, *inner: Around
) -> Any:
    """Calls a module inside the objects around it. Each is ended, even if another one raises."""
    try:
        given = around.begin(module, args, kwargs)
        args = args if given is None else given
        call: Callable[..., Any] = module._call_impl
        output = _run(module, args, kwargs, *inner) if inner else call(*args, **kwargs)
    except BaseException:
        around.end(module, None)
        raise
    replaced = around.end(module, output)
    return output if replaced is None else replaced
