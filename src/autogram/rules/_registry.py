"""The registry: maps functions to their rules. Recordings see calls of registered functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.autograd import Function

from autogram.errors import RuleError
from autogram.rules._recipe import Recipe

Rule = Callable[..., Sequence[Recipe] | None]
R = TypeVar("R", bound=Rule)

_RULES: dict[Callable[..., Any], Rule] = {}
_OF_COMPLEX: set[Callable[..., Any]] = set()  # functions whose rules also hold for complex tensors


def register_rule(
    *functions: Callable[..., Any], holds_for_complex: bool = False
) -> Callable[[R], R]:
    """Registers the decorated function as the rule of some functions.

    A rule takes the arguments of the call and returns a recipe for each tensor that may be a
    parameter, or computed from parameters alone. The rule runs before the call, while the inputs
    of an in-place call still exist. Where the rule returns ``None``, or no recipe for a tensor
    that needs one, rows are computed without the rule: exact and slower.
    :func:`autogram.testing.check_rule` tests a rule.

    A rule replaces an earlier one of the same name and module, so that a notebook cell can run
    again.

    Args:
        functions: Torch functions as ``__torch_function__`` names them: ``torch.Tensor.add`` for
            ``x + y``, ``torch.conv2d`` for ``F.conv2d``, ``torch.ops.library.name.default`` for an
            operator of ``torch.library``. Or custom autograd Functions (the classes): their `apply`
            is replaced by a function that recordings see, and that otherwise does the same. Take
            shorthands such as ``scale = Scale.apply`` after the registration.
        holds_for_complex: Whether the rule also holds for complex tensors. A recipe from
            :func:`product` or :func:`multilinear` does if PyTorch's gradient is this einsum of the
            cotangent and the conjugated factors. By default, complex calls ignore the rule.

    Raises:
        RuleError: A function has another rule already, or its calls cannot be recorded.

    Example:
        >>> import torch
        >>> from autogram.rules import product, register_rule, unregister_rule
        >>> @register_rule(torch.hypot)
        ... def hypot(input, other):  # by `other`, of the same shape: dy/do = o / y
        ...     derivative = other / torch.hypot(input, other)
        ...     return [product(other, "ti,ti->ti", derivative)]
        >>> unregister_rule(torch.hypot)
    """

    def register(rule: R) -> R:
        for function in functions:
            _check(function, rule)
        for function in functions:
            _show(function)
            _RULES[_as_seen(function)] = rule
            if holds_for_complex:
                _OF_COMPLEX.add(_as_seen(function))
        return rule

    return register


def unregister_rule(*functions: Callable[..., Any]) -> None:
    """Removes the rules of some functions. Rows of later calls are exact and slower.

    Args:
        functions: As they were registered. Custom autograd Functions get their ``apply`` back.

    Raises:
        RuleError: One of the functions has no rule.
    """
    for function in functions:
        if find_rule(function) is None:
            raise RuleError(
                f"`{function}` has no rule to remove. Pass a function that was passed to "
                "`register_rule`."
            )
        del _RULES[_as_seen(function)]
        _OF_COMPLEX.discard(_as_seen(function))
        _hide(function)


def _check(function: Callable[..., Any], rule: Rule) -> None:
    if isinstance(_as_seen(function), type) or not callable(function):
        raise RuleError(
            f"`{function}` cannot have a rule: engines do not see its calls. Register the torch "
            "functions that it calls, or write it as a `torch.autograd.Function`."
        )
    former = find_rule(function)
    if former is not None and _name(former) != _name(rule):
        raise RuleError(
            f"`{function}` has a rule already, `{former}`: a second one would hide it. Register "
            "each function once, or call `unregister_rule` first."
        )


def _name(rule: Rule) -> tuple[Any, Any]:
    return getattr(rule, "__module__", None), getattr(rule, "__qualname__", rule)


def variants(*names: str) -> list[Callable[..., Any]]:
    """The functions in ``torch`` and the methods of ``Tensor`` with the given names."""
    functions = [getattr(owner, name, None) for name in names for owner in (torch, torch.Tensor)]
    return list(dict.fromkeys(function for function in functions if function is not None))


def find_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule of a function, if there is one."""
    return _RULES.get(function) or _RULES.get(_as_seen(function))


def holds_for_complex(function: Callable[..., Any]) -> bool:
    """Whether the rule of a function also holds for complex tensors."""
    return function in _OF_COMPLEX or _as_seen(function) in _OF_COMPLEX


def registered_functions() -> list[Callable[..., Any]]:
    """All functions that have a rule, as a `TorchFunctionMode` sees them."""
    return list(_RULES)


# In custom autograd Functions, `apply` is replaced by one that torch-function modes see.


def _as_seen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as modes see it: for a custom autograd Function, its ``apply``."""
    owner = _owner(function)
    return function if owner is None else owner.apply


def _show(function: Callable[..., Any]) -> None:
    """Makes modes see the calls of a custom autograd Function; leaves other functions alone.

    Subclasses of the Function keep their ``apply``: their forward may be another.
    """
    owner = _owner(function)
    if owner is not None and not isinstance(vars(owner).get("apply"), _ShownFunction):
        owner.apply = _ShownFunction(owner)


def _hide(function: Callable[..., Any]) -> None:
    """Restores the original ``apply`` of a custom autograd Function."""
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
            # Modes only: calls with tensor subclasses stay unchanged.
            if overrides.has_torch_function((None,)):
                return overrides.handle_torch_function(apply, (), *args, **kwargs)
            return before(*args, **kwargs)

        # It has the attributes of a method of the class, by which `pickle` finds the function.
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
