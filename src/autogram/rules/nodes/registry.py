"""The table of rules by kind of node, and what a rule may read of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram.errors import RuleError
from autogram.rules._recipe import Formula, Prepare, dims_of_one, formula_of, sum_equation


class NodeRecipe(NamedTuple):
    """How the rows of one input of a node follow from the node's cotangent.

    Attributes:
        formula: Makes the one block of the input, from the cotangent of one result of the node,
            and the saved tensors. It holds no tensors.
        fields: The saved tensors that the formula is given, in order: ``"mat1"`` is
            ``node._saved_mat1``. :func:`read_fields` reads them.
    """

    formula: Formula
    fields: tuple[str, ...] = ()


class MissingFieldError(Exception):
    """The nodes of this version of PyTorch do not save what a rule asks for."""


class NodeInput(NamedTuple):
    """One input of a node, and what a rule may read: sizes, dtypes and numbers, but no tensor.

    Reading a saved tensor may run a checkpointed part again.
    """

    operation: str
    node: Any
    position: int
    number_of_result: int = 0

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result whose cotangent is used."""
        return tuple(self.node._input_metadata[self.number_of_result].shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input."""
        return tuple(self._metadata.shape)

    @property
    def is_complex(self) -> bool:
        """Whether the input is complex."""
        dtype: torch.dtype = self._metadata.dtype
        return dtype.is_complex

    @property
    def _metadata(self) -> Any:
        following, number = self.node.next_functions[self.position]
        return following._input_metadata[number]

    def has(self, field: str) -> bool:
        """Whether nodes of this kind save something by this name."""
        return hasattr(type(self.node), f"_saved_{field}")

    def has_tensor(self, field: str) -> bool:
        """Whether nodes of this kind save a tensor by this name."""
        return hasattr(type(self.node), f"_raw_saved_{field}")

    def number(self, field: str) -> Any:
        """What the node saved that is not a tensor: a number, a flag, or several."""
        if not self.has(field) or self.has_tensor(field):
            raise MissingFieldError(field)
        return getattr(self.node, f"_saved_{field}")


NodeRule = Callable[[NodeInput], NodeRecipe | None]

_RULES: dict[str, NodeRule] = {}
_HOLD_FOR_COMPLEX: set[str] = set()
_HOLD_FOR_EACH_RESULT: set[str] = set()


def of_nodes(
    *operations: str, holds_for_complex: bool = False, holds_for_each_result: bool = False
) -> Callable[[NodeRule], NodeRule]:
    """Registers a rule for the nodes of some operations.

    Args:
        operations: Names of classes without ``Backward0``: ``"Addmm"`` for ``AddmmBackward0``.
        holds_for_complex: Whether the rule is also right if the result or the input is complex.
        holds_for_each_result: Whether the rule knows all results of a node, and not the first one
            alone.

    Returns:
        A decorator that returns the rule itself.

    Raises:
        RuleError: An operation has a rule already.
    """

    def register(rule: NodeRule) -> NodeRule:
        for operation in operations:
            if operation in _RULES:
                raise RuleError(
                    f"Nodes of `{operation}` have a rule already. Remove one of the two."
                )
            _RULES[operation] = rule
            if holds_for_complex:
                _HOLD_FOR_COMPLEX.add(operation)
            if holds_for_each_result:
                _HOLD_FOR_EACH_RESULT.add(operation)
        return rule

    return register


def registered_operations() -> list[str]:
    """The operations whose nodes have a rule, in alphabetical order."""
    return sorted(_RULES)


def node_recipe(operation: str, node: Any, position: int, result: int = 0) -> NodeRecipe | None:
    """The recipe of one input of a node, for the cotangent of one of its results.

    The rows are the sum of those for each result that has a cotangent.

    Args:
        operation: What the node differentiates: ``"Addmm"`` for ``AddmmBackward0``.
        node: A node of autograd's graph. None of its saved tensors is read.
        position: The number of the input in ``node.next_functions``.
        result: The number of the result.

    Returns:
        The recipe, or ``None`` where no rule knows the case, or where the nodes of this version of
        PyTorch do not save what the rule asks for.

    Raises:
        UnsupportedError: The gradient of the node is not that of any objective.
    """
    rule = _RULES.get(operation)
    if rule is None:
        return None
    read = NodeInput(operation, node, position, result)
    if node.next_functions[position][0] is None:
        return None  # it has no gradient
    if result and operation not in _HOLD_FOR_EACH_RESULT:
        return None
    is_complex = node._input_metadata[result].dtype.is_complex
    if not (operation in _HOLD_FOR_COMPLEX if is_complex else not read.is_complex):
        return None
    try:
        recipe = rule(read)
    except MissingFieldError:
        return None
    if recipe is None or not all(map(read.has_tensor, recipe.fields)):
        return None
    return recipe


def read_fields(node: Any, fields: tuple[str, ...]) -> tuple[Tensor, ...] | None:
    """The saved tensors that a recipe names, or ``None`` where the node saved something else.

    A field may hold several tensors, or gaps between them: those that there are count, in order.
    A tensor that is not dense, as a sparse matrix, suits no formula.
    """
    found: list[Tensor] = []
    for field in fields:
        saved = getattr(node, f"_saved_{field}")
        several = saved if isinstance(saved, (list, tuple)) else (saved,)
        tensors = [x.detach() for x in several if x is not None]
        if not tensors or any(x.layout != torch.strided for x in tensors):
            return None
        found += tensors
    return tuple(found)


def addend_at(
    read: NodeInput,
    scale: complex = 1,
    prepare: Prepare | None = None,
    fields: tuple[str, ...] = (),
) -> NodeRecipe:
    """The recipe of an input that is broadcast, and added with a factor to something else.

    For an elementwise function of the input, ``prepare`` multiplies the cotangent by the
    derivative, from the tensors in ``fields``. It is a function of a module, to be cached.
    """
    equation = sum_equation(dims_of_one(read.shape), (dims_of_one(read.result),))
    formula = formula_of(equation, None, prepare, None, scale, read.is_complex)
    return NodeRecipe(formula, fields)
