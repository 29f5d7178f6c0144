"""Random projections of the rows of one parameter, from the rows or from their factors.

Each element of a parameter has a random sign, and is added to one of d numbers. The sign of an
element is the product of two signs, one for its index in the first dimension and one for its index
in all others; its place among the d numbers is the sum of two places modulo d, likewise. The row
of an outer product is thus the convolution of the projected factors, and the row of an embedding
needs only the rows of the table that were read. All of these ways give the same projection.

References:
    Charikar, Chen and Farach-Colton 2002, Finding Frequent Items in Data Streams (signs and folds).
    Pham and Pagh 2013, doi:10.1145/2487575.2487591 (factors by convolutions).
"""

from __future__ import annotations

from functools import partial, reduce
from math import prod

import torch
from torch import Tensor

from autogram._blocks.block import Block
from autogram._blocks.columns import Columns
from autogram._blocks.lookup import Lookup
from autogram._blocks.region import Region, from_storage


class Projection:
    """A random linear map from the elements of a parameter to d numbers.

    E[P(x) . P(y)] = x . y over random seeds, for all x and y. It does not depend on the strides.
    Equal seeds give equal maps on every device.
    """

    def __init__(self, parameter: Region, dimensions: int, seed: int, device: torch.device) -> None:
        first, *rest = [n for n in parameter.shape if n > 1] or [1]
        sizes = [first, prod(rest)]
        generator = torch.Generator("cpu").manual_seed(seed)
        draw = partial(torch.randint, generator=generator, device="cpu")
        drawn = [(draw(dimensions, (size,)), draw(2, (size,)) * 2 - 1) for size in sizes]
        self.dimensions = dimensions
        self.device = device
        self._parameter = parameter
        self._logical = sorted(range(len(parameter.order)), key=parameter.order.__getitem__)
        self._first, self._rest = ((to.to(device), sign.to(device)) for to, sign in drawn)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Projects rows ``(n, elements)`` in the order of the parameter's storage: ``(n, d)``."""
        (to, sign), (to_rest, sign_rest) = self._first, self._rest
        target = (to.unsqueeze(1) + to_rest).remainder(self.dimensions).flatten()
        rows = from_storage(rows, self._parameter).reshape(len(rows), -1)
        signed = rows * (sign.unsqueeze(1) * sign_rest).flatten()
        return signed.new_zeros(len(rows), self.dimensions).index_add_(1, target, signed)

    def of_lookup(self, lookup: Lookup, dtype: torch.dtype) -> Tensor:
        """Projects the rows of a lookup, ``(k, b, d)``, whatever the size of the table."""
        is_by_first = self._labels(lookup)[0] == "v"
        read, rest = (self._first, self._rest)[:: 1 if is_by_first else -1]
        (to, sign), (to_rest, sign_rest) = read, rest
        k, b, _, _ = lookup.cotangents.shape
        indices = lookup.indices.unsqueeze(2)
        target = (to[indices] + to_rest).remainder(self.dimensions)
        signed = lookup.cotangents.to(dtype) * (sign[indices] * sign_rest)
        sketch = signed.new_zeros(k, b, self.dimensions)
        return sketch.scatter_add_(2, target.flatten(1).expand(k, -1, -1), signed.flatten(2))

    def of_factors(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Projects the rows of a block that is an outer product, ``(k, b, d)``."""
        first, *rest = self._labels(block)
        inputs, operands = [], []
        for of, operand in zip(block.inputs, block.operands, strict=True):
            moved, labels = operand.to(dtype), of
            for own, (to, sign) in ((first, self._first), (rest, self._rest)):
                if own[0] in of:
                    others = "".join(label for label in of if label not in own)
                    moved = torch.einsum(f"{of}->{others}{''.join(own)}", moved)
                    flat = moved.flatten(len(others)) * sign
                    folded = flat.new_zeros(*flat.shape[:-1], self.dimensions)
                    folded.view(-1, self.dimensions).index_add_(
                        1, to, flat.reshape(-1, flat.shape[-1])
                    )
                    moved, labels = torch.fft.rfft(folded), f"{others}{first}"
            inputs.append(labels)
            operands.append(moved)
        is_complex = [x.is_complex() for x in operands]
        wide = next(x.dtype for x in operands if x.is_complex())
        same = [x if c else x.to(wide) for x, c in zip(operands, is_complex, strict=True)]
        sketch = torch.einsum(f"{','.join(inputs)}->kb{first}", same)
        total: Tensor = torch.fft.irfft(sketch, self.dimensions)
        return total

    def suits(self, block: Block) -> bool:
        """Whether projecting a block's factors is possible, and less work than projecting rows."""
        return self.is_outer(block) and self.elements(block) < block.elements_of_rows

    def elements(self, block: Block) -> int:
        """The number of elements of a block's projected factors."""
        vectors = [
            prod(n for label, n in zip(of, shape, strict=True) if label not in block.parameter)
            for of, shape in zip(block.inputs, block.shapes, strict=True)
            if not set(of).isdisjoint(block.parameter)
        ]
        return 2 * self.dimensions * sum(vectors)

    def is_outer(self, block: Block) -> bool:
        """Whether one factor has the first dimension, and one other all other dimensions."""
        owners = [
            [i for i, of in enumerate(block.inputs) if label in of] for label in self._labels(block)
        ]
        if len(owners) < 2 or any(len(owner) != 1 for owner in owners):
            return False
        first, *rest = owners
        return first not in rest and all(owner == rest[0] for owner in rest)

    def _labels(self, block: Block | Lookup) -> list[str]:
        """The indices of the parameter's dimensions in their order, which storage may not have."""
        return [block.parameter[place] for place in self._logical]


def projected(columns: Columns, projection: Projection, k: int, b: int) -> Tensor | None:
    """The rows of a parameter, projected, ``(k, b, d)``, or ``None`` if nothing was added.

    Rows are formed for as many samples at a time as fit within the limit, at least one.
    """
    dtype = columns.dtype
    if dtype is None:
        return None
    kernels = columns.kernels
    limit = kernels.limit.elements
    parts: list[Tensor] = []
    rest = Columns(columns.parameter, kernels)
    for region, block in columns.found():
        if isinstance(block, Lookup):
            parts.append(projection.of_lookup(block, dtype))
        elif region == columns.parameter.canonical and projection.suits(block):
            count = min(b, -(-projection.elements(block) // limit))
            pieces = [projection.of_factors(x, dtype) for x in block.chunks("b", count)]
            parts.append(torch.cat(pieces, 1))
        else:
            rest.add(region, block)
    if rest.dtype is not None:
        elements = k * columns.parameter.places
        sketches = []
        for some in torch.arange(b, device=projection.device).split(max(1, limit // elements)):
            rows = rest.at(some).dense()
            sketches.append(projection.of_rows(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]))
        parts.append(torch.cat(sketches, 1))
    return reduce(torch.add, parts)
