"""What a Jacobian is multiplied by, as a user gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autogram._capture import Objectives
from autogram._errors import InvalidOperandError

Direction = Mapping[str, Tensor] | Sequence[Tensor]
Names = Mapping[Tensor, str]


def weights_of(w: Tensor, objectives: Objectives) -> Tensor:
    """Weights as ``(k, b)``, or as ``(s, k, b)`` if several vectors were given."""
    losses = objectives.losses
    shapes = [(losses.numel(),), tuple(losses.shape)]
    is_stack = tuple(w.shape) not in shapes
    if is_stack and (w.dim() == 0 or tuple(w.shape[1:]) not in shapes):
        raise InvalidOperandError(
            f"The weights have shape {tuple(w.shape)}. For losses of shape "
            f"{tuple(losses.shape)}, pass {shapes[0]} or the losses' shape, or a stack of such."
        )
    flat = w.detach().reshape(-1 if is_stack else 1, losses.numel())
    if objectives.is_in_order:
        weights = flat
    else:
        weights = torch.empty_like(flat)
        weights[:, objectives.places.to(flat.device)] = flat
    sizes = objectives.per_sample, objectives.samples
    return weights.view(-1, *sizes) if is_stack else weights.view(sizes)


def direction_of(direction: Direction, names: Names) -> dict[Tensor, Tensor]:
    """A direction by parameter."""
    if not isinstance(direction, Mapping):
        if len(direction) != len(names):
            raise InvalidOperandError(
                f"The direction has {len(direction)} tensors, and the Jacobian is of "
                f"{len(names)} parameters. Pass one for each of `names`, or a dict."
            )
        direction = dict(zip(names.values(), direction, strict=True))
    by_parameter = {}
    for name, tensor in direction.items():
        parameter = parameter_of(name, names)
        if tensor.shape != parameter.shape:
            raise InvalidOperandError(
                f"The direction's entry `{name}` has shape {tuple(tensor.shape)}, and the "
                f"parameter has {tuple(parameter.shape)}. Pass a tensor of that shape."
            )
        by_parameter[parameter] = tensor.detach()
    return by_parameter


def parameter_of(name: str, names: Names) -> Tensor:
    """The parameter of some name."""
    for parameter, its_name in names.items():
        if its_name == name:
            return parameter
    raise InvalidOperandError(
        f"`{name}` is no parameter of the Jacobian. `names` lists them; frozen parameters are "
        "not among them."
    )
