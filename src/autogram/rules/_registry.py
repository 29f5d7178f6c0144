"""The registry: which rule belongs to which function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from autogram._errors import RuleError
from autogram.rules._recipe import Recipe
from autogram.rules._visible import as_seen, hide, show

Rule = Callable[..., Sequence[Recipe] | None]
R = TypeVar("R", bound=Rule)

_RULES: dict[Callable[..., Any], Rule] = {}
_OF_COMPLEX: set[Callable[..., Any]] = set()  # functions whose rules hold for complex tensors, too


def register_rule(
    *functions: Callable[..., Any], holds_for_complex: bool = False
) -> Callable[[R], R]:
    """Registers the decorated function as the rule of some functions.

    A rule takes the arguments of the call and returns a recipe for each tensor that may be a
    parameter, or computed from parameters alone. The rule runs before the call, so that an in-place
    call still has its inputs. Where the rule returns ``None``, or no recipe for a tensor that needs
    one, rows are computed without the rule: exact and slower. :func:`autogram.testing.check_rule`
    tests a rule.

    A rule of the same name in the same module replaces the rule before, so that a cell of a
    notebook may run again.

    Args:
        functions: Torch functions as ``__torch_function__`` names them: ``torch.Tensor.add`` for
            ``x + y``, ``torch.conv2d`` for ``F.conv2d``, ``torch.ops.library.name.default`` for an
            operator of ``torch.library``. Or custom autograd Functions (the classes): their `apply`
            is replaced by a function that recordings see, and that otherwise does the same. Take
            shorthands such as ``scale = Scale.apply`` after the registration.
        holds_for_complex: Whether the rule holds for complex tensors, too. A recipe by
            :func:`product` or :func:`multilinear` does where PyTorch's gradient is this einsum of
            the cotangent and of the conjugated factors. By default, such calls do without the rule.

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
            show(function)
            _RULES[as_seen(function)] = rule
            if holds_for_complex:
                _OF_COMPLEX.add(as_seen(function))
        return rule

    return register


def unregister_rule(*functions: Callable[..., Any]) -> None:
    """Removes the rules of some functions. Rows of their calls are exact and slower from then on.

    Args:
        functions: As they were registered. Custom autograd Functions get their ``apply`` back.

    Raises:
        RuleError: One of the functions has no rule.
    """
    for function in functions:
        if find_rule(function) is None:
            raise RuleError(
                f"`{function}` has no rule that could be forgotten. Pass a function that "
                "`register_rule` was given."
            )
        del _RULES[as_seen(function)]
        _OF_COMPLEX.discard(as_seen(function))
        hide(function)


def _check(function: Callable[..., Any], rule: Rule) -> None:
    if isinstance(as_seen(function), type) or not callable(function):
        raise RuleError(
            f"`{function}` cannot have a rule: its calls are not seen. Register the torch "
            "functions that it calls, or write it as a `torch.autograd.Function`."
        )
    known = find_rule(function)
    if known is not None and _name(known) != _name(rule):
        raise RuleError(
            f"`{function}` has a rule already, `{known}`: a second one would hide it. Register "
            "each function once, or call `unregister_rule` first."
        )


def _name(rule: Rule) -> tuple[Any, Any]:
    return getattr(rule, "__module__", None), getattr(rule, "__qualname__", rule)


def variants(*names: str) -> list[Callable[..., Any]]:
    """The functions in ``torch`` and the methods of ``Tensor`` that have one of some names."""
    found = [getattr(owner, name, None) for name in names for owner in (torch, torch.Tensor)]
    return list(dict.fromkeys(function for function in found if function is not None))


def find_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule of a function, if there is one."""
    return _RULES.get(function) or _RULES.get(as_seen(function))


def holds_for_complex(function: Callable[..., Any]) -> bool:
    """Whether the rule of a function holds for complex tensors, too."""
    return function in _OF_COMPLEX or as_seen(function) in _OF_COMPLEX


def registered_functions() -> list[Callable[..., Any]]:
    """All functions that have a rule, as a `TorchFunctionMode` sees them."""
    return list(_RULES)
