"""Answers: what the rule of a function says of one call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor

from autogram._capture.forward.calls import Call
from autogram._capture.tracked import Tracked
from autogram.rules import Recipe, Rule

Operands = list[tuple[Tensor, Tracked]]
"""The tracked tensors that a call reads, once for each time."""

Answer = Mapping[int, list[Recipe]]
"""The recipes of the operands, by the result of the call that they are of."""


def ask(rule: Rule, call: Call, operands: Operands) -> Answer | None:
    """The recipes of the operands, or ``None`` if the rule misses one of them."""
    try:
        recipes = rule(*call.args, **call.kwargs)
    except TypeError:
        if _binds(rule, call):
            raise
        return None  # an overload of the function that the rule was not written for
    if recipes is None:
        return None
    ids = sorted([id(tensor) for tensor, _ in operands])
    answer: dict[int, list[Recipe]] = {0: []}
    covered: dict[int, list[int]] = {0: []}
    for recipe in recipes:
        known = [id(tensor) for tensor in recipe.operands if id(tensor) in ids]
        if known:
            answer.setdefault(recipe.output, []).append(recipe)
            covered.setdefault(recipe.output, []).extend(known)
    # A tensor that is passed twice must have two recipes, or a part of its block would be missing.
    for found in covered.values():
        if sorted(found) != ids:
            return None
    return answer


def _binds(rule: Rule, call: Call) -> bool:
    """Whether a rule accepts the arguments of a call."""
    try:
        inspect.signature(rule).bind(*call.args, **call.kwargs)
    except TypeError:
        return False
    return True
