"""The table of rules by kind of node, and the fields of a node that a rule may read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram.errors import RuleError
from autogram.rules._recipe import Formula, Prepare, dims_of_one, formula_of, sum_equation


class NodeRecipe(NamedTuple):
    """How to compute the rows of one input of a node from the node's cotangent.

    Attributes:
        formula: Makes the one block of the input, from the cotangent of one result of the node,
            and the saved tensors. It holds no tensors. The formula of a :func:`joint_recipe` makes
            the blocks of several inputs.
        fields: The saved tensors that the formula takes, in order: ``"mat1"`` is
            ``node._saved_mat1``. :func:`read_fields` reads them.
    """

    formula: Formula
    fields: tuple[str, ...] = ()


class MissingFieldError(Exception):
    """The nodes of this version of PyTorch do not save a field that a rule reads."""


class NodeInput(NamedTuple):
    """One input of a node, as a rule may read it: sizes, dtypes and numbers, but no tensors.

    Reading a saved tensor could run a checkpointed part again.
    """

    operation: str
    node: Any
    positions: tuple[int, ...]
    """The number of the input, or of several whose blocks one formula gives together."""
    number_of_result: int = 0

    @property
    def position(self) -> int:
        """The number of the input, or of the first of several."""
        return self.positions[0]

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
        """Whether nodes of this kind save a field of this name."""
        return hasattr(type(self.node), f"_saved_{field}")

    def has_tensor(self, field: str) -> bool:
        """Whether nodes of this kind save a tensor of this name."""
        return hasattr(type(self.node), f"_raw_saved_{field}")

    def number(self, field: str) -> Any:
        """A saved value that is not a tensor: a number, a flag, or several of them."""
        if not self.has(field) or self.has_tensor(field):
            raise MissingFieldError(field)
        return getattr(self.node, f"_saved_{field}")


NodeRule = Callable[[NodeInput], NodeRecipe | None]


class Registered(NamedTuple):
    """A rule, and the cases that it holds for; see :func:`of_nodes`."""

    rule: NodeRule
    holds_for_complex: bool
    holds_for_each_result: bool
    gives_several: bool


_RULES: dict[str, Registered] = {}


def of_nodes(
    *operations: str,
    holds_for_complex: bool = False,
    holds_for_each_result: bool = False,
    gives_several: bool = False,
) -> Callable[[NodeRule], NodeRule]:
    """Registers a rule for the nodes of some operations.

    Args:
        operations: Names of classes without ``Backward0``: ``"Addmm"`` for ``AddmmBackward0``.
        holds_for_complex: Whether the rule is also right if the result or the input is complex.
        holds_for_each_result: Whether the rule covers all results of a node, instead of only the
            first one.
        gives_several: Whether the rule gives the blocks of several inputs together, because one
            of them costs as much as all.

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
            options = holds_for_complex, holds_for_each_result, gives_several
            _RULES[operation] = Registered(rule, *options)
        return rule

    return register


def registered_operations() -> list[str]:
    """The operations whose nodes have a rule, in alphabetical order."""
    return sorted(_RULES)


def node_rule(operation: str) -> NodeRule | None:
    """The rule for nodes of an operation, if there is one."""
    registered = _RULES.get(operation)
    return None if registered is None else registered.rule


def node_recipe(operation: str, node: Any, position: int, result: int = 0) -> NodeRecipe | None:
    """The recipe of one input of a node, for the cotangent of one of its results.

    The rows are the sum of the rows for each result that has a cotangent.

    Args:
        operation: The differentiated operation: ``"Addmm"`` for ``AddmmBackward0``.
        node: A node of autograd's graph. None of its saved tensors is read.
        position: The number of the input in ``node.next_functions``.
        result: The number of the result.

    Returns:
        The recipe, or ``None`` if no rule covers the case, or if the nodes of this version of
        PyTorch do not save a field that the rule reads.

    Raises:
        UnsupportedError: The gradient of the node is not that of any objective.
    """
    registered = _RULES.get(operation)
    if registered is None:
        return None
    return _recipe_of(registered, NodeInput(operation, node, (position,), result))


def joint_recipe(
    operation: str, node: Any, positions: Sequence[int], result: int = 0
) -> NodeRecipe | None:
    """The recipe of several inputs of a node, whose blocks are cheaper to compute together.

    Its formula gives a block for each input, in the order of ``positions``, which is ascending.

    Args:
        operation: As in :func:`node_recipe`.
        node: As in :func:`node_recipe`.
        positions: The numbers of the inputs.
        result: The number of the result.

    Returns:
        The recipe, or ``None`` if each input needs a recipe of its own.

    Raises:
        UnsupportedError: The gradient of the node is not that of any objective.
    """
    registered = _RULES.get(operation)
    if registered is None or not registered.gives_several:
        return None
    return _recipe_of(registered, NodeInput(operation, node, tuple(positions), result))


def _recipe_of(registered: Registered, read: NodeInput) -> NodeRecipe | None:
    """The rule's recipe, if the rule holds and nodes of this kind save the fields it reads."""
    if read.node.next_functions[read.position][0] is None:
        return None  # the input has no gradient
    if read.number_of_result and not registered.holds_for_each_result:
        return None
    is_complex = read.node._input_metadata[read.number_of_result].dtype.is_complex
    if not (registered.holds_for_complex if is_complex else not read.is_complex):
        return None
    try:
        recipe = registered.rule(read)
    except MissingFieldError:
        return None
    if recipe is None or not all(map(read.has_tensor, recipe.fields)):
        return None
    return recipe


def read_fields(node: Any, fields: tuple[str, ...]) -> tuple[Tensor, ...] | None:
    """The saved tensors that a recipe names, or ``None`` if the node saved something else.

    A field may hold several tensors, with gaps between them: gaps are skipped.
    No formula accepts a tensor that is not dense, such as a sparse matrix.
    """
    dense: list[Tensor] = []
    for field in fields:
        saved = getattr(node, f"_saved_{field}")
        several = saved if isinstance(saved, (list, tuple)) else (saved,)
        tensors = [x.detach() for x in several if x is not None]
        if not tensors or any(x.layout != torch.strided for x in tensors):
            return None
        dense += tensors
    return tuple(dense)


def addend_at(
    read: NodeInput,
    scale: complex = 1,
    prepare: Prepare | None = None,
    fields: tuple[str, ...] = (),
) -> NodeRecipe:
    """The recipe of an input that is broadcast, multiplied by ``scale``, and added.

    For an elementwise function of the input, ``prepare`` multiplies the cotangent by the
    derivative, from the tensors in ``fields``. It must be a module's function, to be cached.
    """
    equation = sum_equation(dims_of_one(read.shape), (dims_of_one(read.result),))
    formula = formula_of(equation, None, prepare, None, scale, read.is_complex)
    return NodeRecipe(formula, fields)
