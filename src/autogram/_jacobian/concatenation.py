"""Joins the Jacobians of several backward passes."""

from __future__ import annotations

from collections.abc import Sequence

from autogram._arguments import check_related
from autogram._jacobian.jacobian import Jacobian
from autogram._jacobian.operator import check_jacobian
from autogram.errors import InvalidOperandError


def concatenate(jacobians: Sequence[Jacobian]) -> Jacobian:
    """The Jacobian of all objectives of some Jacobians, in their order.

    The result gives an exact Gramian of more samples than fit in one forward pass. It copies no
    factors; products of rows copy the factors of one parameter at a time.

    Args:
        jacobians: Jacobians of the same modules, from any graphs and with any numbers of
            objectives.

    Returns:
        An ordinary Jacobian, whose vectors over objectives have shape ``(m,)``, with m the sum of
        all numbers of objectives. If one of the Jacobians lacks a parameter, its columns are zero
        there.

    Raises:
        InvalidOperandError: The sequence is empty or contains something else; two Jacobians share
            no parameter, or have different parameters with one name; or they are on different
            devices.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import Engine, concatenate
        >>> model = nn.Linear(3, 1)
        >>> engine = Engine(model)
        >>> batches = [torch.randn(4, 3), torch.randn(2, 3)]
        >>> jacobian = concatenate([engine.jacobian(model(x).squeeze(1)) for x in batches])
        >>> jacobian.gramian().shape
        torch.Size([6, 6])
    """
    jacobians = list(jacobians)
    for jacobian in jacobians:
        check_jacobian(jacobian)
    if not jacobians:
        raise InvalidOperandError("There is no Jacobian to concatenate. Pass at least one.")
    first, *others = jacobians
    names = dict(first._names)
    for other in others:
        check_related(names, other._names)
        first._parts.check_place(other._parts)
        names.update({p: name for p, name in other._names.items() if p not in names})
    if len(set(names.values())) < len(names):
        name = next(name for name in names.values() if list(names.values()).count(name) > 1)
        raise InvalidOperandError(
            f"The Jacobians have different parameters of the name `{name}`. Pass Jacobians from "
            "one engine, or from engines on the same model."
        )
    parts = [part for jacobian in jacobians for part in jacobian._parts.each]
    is_exchanged = any(jacobian._is_exchanged for jacobian in jacobians)
    return Jacobian(
        [part for part in parts if part.m] or parts[:1],
        names,
        first._limit,
        first._finite,
        is_exchanged=is_exchanged,
    )
