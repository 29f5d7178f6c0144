"""What a series of steps is made of: an operator, and arguments that change between its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# From hidden activations and an argument to one tensor or several.
Operator = Callable[[Tensor, Any], Any]

# How tensors in an argument come into the forward pass: made in it, given to the module, or held by
# the module and exchanged between steps.
Passing = Literal["made", "given", "held"]


@dataclass(frozen=True)
class Pair:
    """An operator with two arguments, of which the first is meant to leave samples in place.

    Args:
        operator: The name of the operator.
        name: What tells the pair from others of its operator.
        apply: The operator.
        arguments: The arguments, in the order in which they first appear in a series.
        shape: That of the hidden activations.
        base: What is added to the hidden activations, so that they are in the operator's domain.
    """

    operator: str
    name: str
    apply: Operator
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    base: Tensor | None = None

    @property
    def id(self) -> str:
        """What the pair is called by."""
        return f"{self.operator}:{self.name}"

    @property
    def has_tensors(self) -> bool:
        """Whether there is a tensor in an argument."""
        return any(isinstance(x, Tensor) for x in tree_flatten(self.arguments)[0])

    @property
    def is_by_values(self) -> bool:
        """Whether only the values of floating-point tensors differ between the arguments."""
        kept = {
            repr([x.shape if _is_floating(x) else x for x in tree_flatten(argument)[0]])
            for argument in self.arguments
        }
        return len(kept) == 1


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def tensors_of(argument: Any) -> list[Tensor]:
    """The tensors in an argument."""
    return [x for x in tree_flatten(argument)[0] if isinstance(x, Tensor)]


def with_tensors(argument: Any, tensors: Sequence[Tensor]) -> Any:
    """The argument with other tensors in it."""
    leaves, structure = tree_flatten(argument)
    remaining = iter(tensors)
    return tree_unflatten(
        [next(remaining) if isinstance(x, Tensor) else x for x in leaves], structure
    )


def differentiable(output: Any) -> list[Tensor]:
    """The results of an operator through which gradients flow, as dense tensors of real numbers."""
    found = []
    for x in tree_flatten(output)[0]:
        if isinstance(x, Tensor) and x.requires_grad:
            dense = x if x.layout == torch.strided else x.to_dense()
            found.append(torch.view_as_real(dense) if dense.is_complex() else dense)
    return found
