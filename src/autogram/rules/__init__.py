"""Rules: blocks of single torch functions, one file per family of functions, listed here."""

from autogram.rules import (  # noqa: F401 - importing a file registers its rules
    convolution,
    elementwise,
    embedding,
    joining,
    linear,
    normalization,
    recurrent,
    sampling,
    solving,
)
from autogram.rules._recipe import (
    Formula,
    Recipe,
    lookup,
    multilinear,
    positions,
    product,
    promoted,
)
from autogram.rules._registry import (
    Rule,
    find_rule,
    holds_for_complex,
    register_rule,
    registered_functions,
    unregister_rule,
)

__all__ = [
    "Formula",
    "Recipe",
    "Rule",
    "find_rule",
    "holds_for_complex",
    "lookup",
    "multilinear",
    "positions",
    "product",
    "promoted",
    "register_rule",
    "registered_functions",
    "unregister_rule",
]
