"""Tensors that must stay as they are: what is known of them was computed when they were seen."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autogram._errors import ChangedTensorError

Seen = tuple[Tensor, int]
"""A tensor, and its version when it was seen."""


def check_unchanged(seen: Iterable[Seen]) -> None:
    """Checks that no tensor was changed in place.

    Raises:
        ChangedTensorError: One was.
    """
    for tensor, version in seen:
        if tensor._version != version:
            raise ChangedTensorError(
                "A tensor that the Jacobian is made of was changed in place since it was "
                "computed. If an optimizer's step did this to a parameter, or an in-place "
                "operation to an activation: Call the Jacobian's methods before, or compute "
                "the losses and the Jacobian again. If a custom autograd Function or a hook "
                "did it to the gradient that it was given: Return a new tensor there, `g * 2` "
                "and not `g.mul_(2)`."
            )
