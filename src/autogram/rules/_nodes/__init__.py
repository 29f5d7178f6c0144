"""Rules for kinds of nodes of autograd's graph, one file per family, listed here."""

from autogram.rules._nodes import (  # noqa: F401 - importing a file registers its rules
    convolution,
    elementwise,
    normalization,
    products,
    recurrent,
    sampling,
    solving,
    tables,
)
from autogram.rules._nodes.registry import (
    NodeInput,
    NodeRecipe,
    NodeRule,
    joint_recipe,
    node_recipe,
    node_rule,
    of_nodes,
    read_fields,
    registered_operations,
)

__all__ = [
    "NodeInput",
    "NodeRecipe",
    "NodeRule",
    "joint_recipe",
    "node_recipe",
    "node_rule",
    "of_nodes",
    "read_fields",
    "registered_operations",
]
