"""Rules by node compared with what the node itself computes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autogram.rules import Formula
from autogram.rules._nodes import node_recipe, read_fields
from tests.unit._blocks.rows import Layout, layouts_of, of_each_sample, rows_of

OBJECTIVES = 2
# Without oneDNN, PyTorch composes an LSTM of other nodes.
HAS_MKLDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")


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


def compared(
    node: Any, position: int, number: int = 0, layouts: Sequence[Layout | None] | None = None
) -> int:
    """How many layouts the rows of an input were compared for, or 0 if no rule knows them.

    The cotangent is that of one result of the node, by its number. Without ``layouts``, samples
    are along each dimension that the formula allows.
    """
    recipe = node_recipe(operation_of(node), node, position, number)
    saved = None if recipe is None else read_fields(node, recipe.fields)
    if recipe is None or saved is None:
        return 0
    result = node._input_metadata[number]
    shape = tuple(result.shape)
    cotangent = torch.randn(OBJECTIVES, *shape, dtype=result.dtype)
    rows = partial(by_node, node, position, number)
    if not rows(cotangent).isfinite().all():
        return 0  # the zeros of other samples would not keep infinite derivatives out
    if layouts is None:
        layouts = [None, *layouts_of(shape, recipe.formula.dims, recipe.formula.depth)]
    for layout in layouts:
        expected = torch.stack([rows(x) for x in of_each_sample(layout, cotangent)], 1)
        found = by_formula(recipe.formula, layout, cotangent, saved, expected.shape)
        name = f"{node.name()}, input {position}, {layout}"
        torch.testing.assert_close(found.to(expected.dtype), expected, msg=named(name))
    return len(layouts)


def named(name: str) -> Callable[[str], str]:
    """A message that begins with a name."""
    return lambda text: f"{name}: {text}"


def by_formula(
    formula: Formula,
    layout: Layout | None,
    cotangent: Tensor,
    saved: tuple[Tensor, ...],
    rows: torch.Size,
) -> Tensor:
    """The one block of a formula as rows of some shape, ``(k, b, *input)``."""
    (block,) = formula.blocks(layout, cotangent, *saved)
    groups, shape = formula.groups, rows[2:]
    split = shape if groups is None else (groups, shape[0] // groups, *shape[1:])
    return rows_of(block, split).reshape(rows)


def by_node(node: Any, position: int, number: int, cotangent: Tensor) -> Tensor:
    """The gradients of an input that a node computes, ``(k, *input)``, as real numbers."""
    following, which = node.next_functions[position]
    of_input = following._input_metadata[which]
    before, behind = [None] * number, [None] * (len(node._input_metadata) - 1 - number)
    rows = []
    for each in cotangent:
        gradients = node(*before, each, *behind)
        own = gradients[position] if isinstance(gradients, tuple) else gradients
        if own is None:
            own = torch.zeros(tuple(of_input.shape))
        own = own.to_dense() if own.layout != torch.strided else own
        own = own.sum_to_size(tuple(of_input.shape))
        if own.is_complex():
            own = torch.view_as_real(own) if of_input.dtype.is_complex else own.real
        rows.append(own)
    return torch.stack(rows)
