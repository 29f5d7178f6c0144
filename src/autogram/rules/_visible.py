"""Custom autograd Functions, whose ``apply`` is replaced by one that torch-function modes see."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import overrides
from torch.autograd import Function


def as_seen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as modes see it: of a custom autograd Function, its ``apply``."""
    owner = _owner(function)
    return function if owner is None else owner.apply


def show(function: Callable[..., Any]) -> None:
    """Makes modes see the calls of a custom autograd Function; leaves other functions alone.

    Subclasses of the Function keep their ``apply``: their forward may be another.
    """
    owner = _owner(function)
    if owner is not None and not isinstance(vars(owner).get("apply"), _ShownFunction):
        owner.apply = _ShownFunction(owner)


def hide(function: Callable[..., Any]) -> None:
    """Gives a custom autograd Function back the ``apply`` that it had."""
    owner = _owner(function)
    shown = None if owner is None else vars(owner).get("apply")
    if isinstance(shown, _ShownFunction):
        del owner.apply
        if shown.is_own:
            owner.apply = shown.before


class _ShownFunction:
    """The attribute ``apply`` of one autograd Function, which shows the call to active modes."""

    def __init__(self, owner: type[Function]) -> None:
        self.owner = owner
        self.is_own = "apply" in vars(owner)
        self.before = inspect.getattr_static(owner, "apply")
        before: Callable[..., Any] = owner.apply

        def apply(*args: Any, **kwargs: Any) -> Any:
            # Modes only: calls with tensor subclasses are as they were.
            if overrides.has_torch_function((None,)):
                return overrides.handle_torch_function(apply, (), *args, **kwargs)
            return before(*args, **kwargs)

        # With the attributes of a method of the class, by which `pickle` finds the function.
        apply.__self__ = owner  # type: ignore[attr-defined]  # functions take attributes
        apply.__name__ = f"{owner.__name__}.apply"
        apply.__qualname__, apply.__module__ = f"{owner.__qualname__}.apply", owner.__module__
        self.apply = apply

    def __get__(self, instance: object, owner: type[Function]) -> Callable[..., Any]:
        if owner is self.owner:
            return self.apply
        inherited: Callable[..., Any] = self.before.__get__(instance, owner)
        return inherited


def _owner(function: Callable[..., Any]) -> Any:
    """The custom autograd Function of a class or of an ``apply``, or ``None``."""
    owner = function if isinstance(function, type) else getattr(function, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None
