"""The registry: which rule belongs to which torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from autogram._errors import RuleError
from autogram.rules._recipe import JointRecipe, Recipe

Rule = Callable[..., Sequence[Recipe] | Sequence[JointRecipe] | None]
R = TypeVar("R", bound=Rule)

_RULES: dict[Callable[..., Any], Rule] = {}


def register_rule(*functions: Callable[..., Any]) -> Callable[[R], R]:
    """Registers the decorated function as the rule of some torch functions.

    A rule takes the arguments of the call and returns a recipe for each tensor that may be tracked
    and has a block. It runs before the call, so that an in-place call still has its inputs. A call
    that the rule does not know (``None``, or no recipe for a tracked tensor) is left to the
    fallback, which is exact and slower.

    Args:
        functions: The functions, as ``__torch_function__`` names them: ``torch.Tensor.add`` for
            ``x + y``, ``torch.conv2d`` for ``F.conv2d``.

    Raises:
        RuleError: One of them has a rule already.
    """

    def register(rule: R) -> R:
        for function in functions:
            if function in _RULES:
                raise RuleError(
                    f"`{function}` has a rule already, `{_RULES[function]}`: a second one "
                    "would hide it. Register each function once."
                )
            _RULES[function] = rule
        return rule

    return register


def variants(*names: str) -> list[Callable[..., Any]]:
    """The function in ``torch`` and the method of ``Tensor``, as far as they exist, by name."""
    found = [getattr(place, name, None) for name in names for place in (torch, torch.Tensor)]
    return list(dict.fromkeys(function for function in found if function is not None))


def find_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule of a torch function, if there is one."""
    return _RULES.get(function)


def registered_functions() -> list[Callable[..., Any]]:
    """All functions that have a rule."""
    return list(_RULES)
