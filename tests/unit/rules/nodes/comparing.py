"""Rules by node compared with what the node itself computes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autogram.rules.nodes import NodeRecipe, node_recipe, read_fields
from tests.unit._blocks.rows import Layout, layouts_of, of_each_sample, rows_of

OBJECTIVES = 2


def operation_of(node: Any) -> str:
    """What a node differentiates."""
    name = type(node).__name__.removesuffix("_copy")
    return name.rstrip("0123456789").removesuffix("Backward")


def nodes_behind(*outputs: Any) -> list[Any]:
    """All nodes of the graphs of some results, each once."""
    tensors = [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    pending, found = [x.grad_fn for x in tensors], {}
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found[node] = None
            pending += [following for following, _ in node.next_functions]
    return list(found)


def inputs_of(node: Any) -> Iterator[tuple[int, Any]]:
    """The number of each input that has a gradient, and its sizes and dtype."""
    for position, (following, number) in enumerate(node.next_functions):
        if following is not None:
            yield position, following._input_metadata[number]


def compared(node: Any, position: int) -> int:
    """How many layouts the rows of an input were compared for, or 0 if no rule knows them."""
    recipe = node_recipe(operation_of(node), node, position)
    saved = None if recipe is None else read_fields(node, recipe.fields)
    if recipe is None or saved is None:
        return 0
    result = node._input_metadata[0]
    shape = tuple(result.shape)
    cotangent = torch.randn(OBJECTIVES, *shape, dtype=result.dtype)
    if not by_node(node, position, cotangent).isfinite().all():
        return 0  # the zeros of other samples would not keep infinite derivatives out
    layouts = [None, *layouts_of(shape, recipe.formula.dims, recipe.formula.depth)]
    for layout in layouts:
        assert_same_rows(recipe, node, position, layout, cotangent, saved)
    return len(layouts)


def assert_same_rows(
    recipe: NodeRecipe,
    node: Any,
    position: int,
    layout: Layout | None,
    cotangent: Tensor,
    saved: tuple[Tensor, ...],
) -> None:
    """Assert that the block of an input has the rows that the node computes, sample by sample."""
    each = of_each_sample(layout, cotangent)
    expected = torch.stack([by_node(node, position, x) for x in each], 1)
    (block,) = recipe.formula.blocks(layout, cotangent, *saved)
    groups, shape = recipe.formula.groups, expected.shape[2:]
    split = shape if groups is None else (groups, shape[0] // groups, *shape[1:])
    found = rows_of(block, split).reshape(expected.shape).to(expected.dtype)
    torch.testing.assert_close(
        found, expected, msg=lambda text: f"{node.name()}, input {position}, {layout}: {text}"
    )


def by_node(node: Any, position: int, cotangent: Tensor) -> Tensor:
    """The gradients of an input that a node computes, ``(k, *input)``, as real numbers."""
    following, number = node.next_functions[position]
    of_input, others = following._input_metadata[number], len(node._input_metadata) - 1
    rows = []
    for each in cotangent:
        gradients = node(each, *[None] * others)
        own = gradients[position] if isinstance(gradients, tuple) else gradients
        if own is None:
            own = torch.zeros(tuple(of_input.shape))
        own = own.to_dense() if own.layout != torch.strided else own
        own = own.sum_to_size(tuple(of_input.shape))
        if own.is_complex():
            own = torch.view_as_real(own) if of_input.dtype.is_complex else own.real
        rows.append(own)
    return torch.stack(rows)
