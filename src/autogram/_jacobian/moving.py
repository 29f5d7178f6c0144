"""Copies of the factors of a Jacobian on another device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from autogram._blocks import Block, Columns, Devices, Limit, Lookup
from autogram._capture.autograd.exact import exact
from autogram._capture.samples.objectives import Objectives
from autogram._jacobian.parts import JacobianPart, Parts


def moved_parts(
    parts: Parts, parameters: Iterable[Tensor], device: torch.device, limit: Limit
) -> list[JacobianPart]:
    """Parts of a Jacobian with all factors on a device."""
    kernels, copies = Devices(limit).on(device), _Copies(device)
    place = None if all(p.device == device for p in parameters) else device

    def at_place(columns: Columns) -> Columns:
        blocks = [(region, copies.block(block)) for region, block in columns.found()]
        return Columns.of(columns.parameter, kernels, blocks)

    with exact(device):
        return [
            replace(
                part,
                objectives=Objectives(part.objectives.losses.to(device), part.objectives.batch_dim),
                columns={p: at_place(columns) for p, columns in part.columns.items()},
                place=place,
                crossings=part.crossings.empty(),
            )
            for part in parts.each
        ]


class _Copies:
    """Copies of tensors on a device, one for each tensor, even if several blocks share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[Hashable, Tensor] = {}

    def block(self, block: Block | Lookup) -> Block | Lookup:
        """A block with all its tensors on the device."""
        if isinstance(block, Lookup):
            return replace(block, indices=self(block.indices), cotangents=self(block.cotangents))
        operands, adjoint = tuple([self(x) for x in block.operands]), block.adjoint
        if adjoint is not None:
            saved = tuple([self(x) for x in adjoint.saved])
            adjoint = replace(adjoint, cotangent=self(adjoint.cotangent), saved=saved)
        return Block(block.equation, operands, adjoint)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor. Patches of a convolution overlap: their common memory is copied."""
        shape, strides = tensor.shape, tensor.stride()
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        is_spread = tensor.numel() <= max(span, 0)
        key = tensor.data_ptr(), tensor.dtype, span, (shape, strides) if is_spread else None
        if (copy := self._made.get(key)) is None:
            memory = tensor if is_spread else tensor.as_strided((span,), (1,))
            self._made[key] = copy = memory.to(self._device)
        return copy if is_spread else copy.as_strided(shape, strides)
