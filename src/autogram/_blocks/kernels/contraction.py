"""Contractions: einsums as lists of products of one or two tensors, found once.

A contraction knows all that follows from its equation and from the shapes and strides of its
operands: which product, which views, which copies. Carrying it out is a short list of calls.
``torch.einsum`` reads its equation at each call, which takes longer than a small contraction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Protocol

import opt_einsum
import torch
from torch import Tensor

from autogram._blocks.kernels.workspace import Memory, Purpose

Shapes = tuple[tuple[int, ...], ...]


class Hardware(Protocol):
    """What kernels do for contractions."""

    def copy(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """A contiguous copy, valid until there is another one for the same purpose."""
        ...

    def product_sum(self, x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
        """The product of two tensors of equally many dimensions, summed over some of them."""
        ...


class Contraction(Protocol):
    """A product or a sum."""

    def __call__(
        self, hardware: Hardware, operands: Sequence[Tensor], memory: Memory | None
    ) -> Tensor:
        """The result, in some memory if it is a matrix product."""
        ...


@dataclass(frozen=True)
class Path:
    """The order in which the operands of an einsum meet, and what that costs.

    Attributes:
        steps: The positions of operands that leave the stack, and the equation of what replaces
            them.
        multiplications: Multiply-adds.
        moved: Elements that are written on the way.
        largest: Elements of the largest result on the way.
    """

    steps: tuple[tuple[tuple[int, ...], str], ...]
    multiplications: int
    moved: int
    largest: int

    def cost(self, price_of_memory: int) -> int:
        """One number to compare plans by, in multiply-adds."""
        return self.multiplications + price_of_memory * self.moved


@lru_cache(maxsize=4096)
def find_path(equation: str, shapes: Shapes) -> Path:
    """The cheapest path of an einsum, by number of operations."""
    sizes = sizes_of(equation, shapes)
    steps: list[tuple[tuple[int, ...], str]] = [((0,) * len(shapes), equation)]
    if len(shapes) > 2:
        _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
        steps = [(tuple(found[0]), found[2]) for found in info.contraction_list]
    work = [prod(sizes[label] for label in set(of) - {*",->"}) for _, of in steps]
    moved = [
        volume
        if _kind(of, sizes) is Elementwise
        else prod(sizes[label] for label in of.split("->")[1])
        for (_, of), volume in zip(steps, work, strict=True)
    ]
    return Path(tuple(steps), sum(work), sum(moved), max(moved))


@lru_cache(maxsize=4096)
def sizes_of(equation: str, shapes: Shapes) -> Mapping[str, int]:
    """The size of every index of an einsum."""
    pairs = zip(equation.split("->")[0].split(","), shapes, strict=True)
    return {label: n for labels, shape in pairs for label, n in zip(labels, shape, strict=True)}


@lru_cache(maxsize=4096)
def find_contractions(
    equation: str, shapes: Shapes, strides: Shapes
) -> tuple[tuple[tuple[int, ...], Contraction], ...]:
    """The contractions of an einsum, with the positions of operands that leave the stack.

    Tensors without data are contracted alongside, which shows the strides of results on the way.
    """
    pairs = zip(shapes, strides, strict=True)
    stack = [torch.empty_strided(shape, stride, device="meta") for shape, stride in pairs]
    found: list[tuple[tuple[int, ...], Contraction]] = []
    for positions, of in find_path(equation, shapes).steps:
        taken = [stack.pop(position) for position in positions]
        inputs, output = of.split("->")
        sizes = sizes_of(of, tuple([x.shape for x in taken]))
        contraction = _kind(of, sizes).of(inputs.split(","), output, taken, sizes)
        found.append((positions, contraction))
        stack.append(contraction(_Meta(), taken, None))
    return tuple(found)


class _Meta:
    """Hardware for tensors without data."""

    def copy(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """A contiguous copy."""
        del purpose
        return torch.empty(tensor.shape, device="meta")

    def product_sum(self, x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
        """The product of two tensors, summed."""
        return (x * y).sum(summed) if summed else x * y


def _kind(equation: str, sizes: Mapping[str, int]) -> type[Sum | Elementwise | Matrices | Other]:
    """How to carry out one contraction.

    Where one side has no index of its own, there is no matrix product to be had, and a product
    followed by a sum reads each operand once. ``torch.einsum`` would permute them for a batched
    matrix product with a single column, which took thirty times as long for ``btcs,btcs->bc``.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) == 1 and len(set(inputs)) == len(inputs):
        return Sum
    if len(terms) == 2:
        first, second = terms
        own = [_own(first, second, sizes), _own(second, first, sizes)]
        shared = set(first) & set(second) & set(output)
        if not all(own) and any(sizes[label] > 1 for label in shared):
            return Elementwise
        if set("".join(own)) <= set(output):
            return Matrices
    return Other


def _own(labels: str, others: str, sizes: Mapping[str, int]) -> str:
    """The indices that one side has alone, without those of size one."""
    return "".join(label for label in labels if label not in others and sizes[label] != 1)


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    """The permutation of ``labels`` that gives ``wanted``."""
    return tuple(labels.index(label) for label in wanted)


@dataclass(frozen=True)
class View:
    """How a tensor is seen: in another order, with other dimensions.

    Attributes:
        order: The order of its dimensions.
        shape: The shape that it has then.
        strides: Those of the view, or ``None`` where the tensor must be copied.
        is_same: Whether it is seen as it is.
        is_repeating: Whether it reads some elements of its storage more than once.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    is_same: bool
    is_repeating: bool

    @classmethod
    def of(cls, tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...]) -> View:
        """The view of a tensor of which shape and strides are known."""
        try:
            strides = tensor.permute(order).view(shape).stride()
        except RuntimeError:
            return cls(order, shape, None, False, repeats(tensor))
        is_same = tensor.shape == shape and tensor.stride() == strides
        return cls(order, shape, strides, is_same, False)

    def __call__(self, tensor: Tensor, hardware: Hardware, purpose: Purpose) -> Tensor:
        """The tensor, seen so."""
        if self.is_same:
            return tensor
        if self.strides is not None:
            return tensor.as_strided(self.shape, self.strides)
        if self.is_repeating:  # as patches of an image are, which are copied in long runs so
            return hardware.copy(tensor, purpose).permute(self.order).reshape(self.shape)
        return hardware.copy(tensor.permute(self.order), purpose).view(self.shape)


@dataclass(frozen=True)
class Sum:
    """An einsum of one tensor."""

    summed: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, terms: Sequence[str], output: str, operands: Sequence[Tensor], sizes: Mapping[str, int]
    ) -> Sum:
        """The sum that an equation asks for."""
        del operands, sizes
        summed = tuple(dim for dim, label in enumerate(terms[0]) if label not in output)
        return cls(summed, _order("".join(x for x in terms[0] if x in output), output))

    def __call__(
        self, hardware: Hardware, operands: Sequence[Tensor], memory: Memory | None
    ) -> Tensor:
        """The result."""
        del hardware, memory
        (x,) = operands
        return (x.sum(self.summed) if self.summed else x).permute(self.order)


@dataclass(frozen=True)
class Elementwise:
    """An einsum of two tensors as a broadcast product and a sum, in the order of the larger."""

    first: View
    second: View
    total: Sum

    @classmethod
    def of(
        cls, terms: Sequence[str], output: str, operands: Sequence[Tensor], sizes: Mapping[str, int]
    ) -> Elementwise:
        """The product that an equation asks for."""
        x, y = (prod(sizes[label] for label in labels) for labels in terms)
        product = "".join(dict.fromkeys("".join(terms if x >= y else terms[::-1])))
        views = []
        for tensor, labels in zip(operands, terms, strict=True):
            order = _order(labels, "".join(label for label in product if label in labels))
            shape = tuple(sizes[label] if label in labels else 1 for label in product)
            views.append(View.of(tensor, order, shape))
        return cls(views[0], views[1], Sum.of([product], output, operands, sizes))

    def __call__(
        self, hardware: Hardware, operands: Sequence[Tensor], memory: Memory | None
    ) -> Tensor:
        """The result."""
        del memory
        x, y = operands
        x, y = self.first(x, hardware, "first"), self.second(y, hardware, "second")
        return hardware.product_sum(x, y, self.total.summed).permute(self.total.order)


@dataclass(frozen=True)
class Matrices:
    """An einsum of two tensors as one matrix product, or a batch of them."""

    first: View
    second: View
    product: tuple[int, ...]
    """Its shape, ``(rows, columns)`` behind the batch, if there is one."""
    result: View

    @classmethod
    def of(
        cls, terms: Sequence[str], output: str, operands: Sequence[Tensor], sizes: Mapping[str, int]
    ) -> Matrices:
        """The product that an equation asks for."""
        first, second = terms
        batch = "".join(label for label in first if label in second and label in output)
        summed = "".join(label for label in first if label in second and label not in output)
        # Indices of size one may stand in one operand alone and not in the result.
        rows = "".join(label for label in first if label not in second)
        columns = "".join(label for label in second if label not in first)
        n, t, r, c = (prod(sizes[label] for label in of) for of in (batch, summed, rows, columns))
        stack = () if n == 1 else (n,)
        product = (*stack, r, c)
        kept = "".join(label for label in batch + rows + columns if label in output)
        unfolded = torch.empty(product, device="meta").view([sizes[label] for label in kept])
        ordered = unfolded.permute(_order(kept, output))
        strides = torch.empty(product, device="meta").stride()
        is_same = ordered.shape == product and ordered.stride() == strides
        result = View((), tuple(ordered.shape), ordered.stride(), is_same, False)
        return cls(
            View.of(operands[0], _order(first, batch + rows + summed), (*stack, r, t)),
            View.of(operands[1], _order(second, batch + summed + columns), (*stack, t, c)),
            product,
            result,
        )

    def __call__(
        self, hardware: Hardware, operands: Sequence[Tensor], memory: Memory | None
    ) -> Tensor:
        """The result."""
        x, y = operands
        x, y = self.first(x, hardware, "first"), self.second(y, hardware, "second")
        multiply = torch.mm if len(self.product) == 2 else torch.bmm
        out = None if memory is None else memory(self.product, x)
        return self.result(multiply(x, y, out=out), hardware, "first")


@dataclass(frozen=True)
class Other:
    """An einsum that is none of these."""

    equation: str

    @classmethod
    def of(
        cls, terms: Sequence[str], output: str, operands: Sequence[Tensor], sizes: Mapping[str, int]
    ) -> Other:
        """The einsum that an equation asks for."""
        del operands, sizes
        return cls(f"{','.join(terms)}->{output}")

    def __call__(
        self, hardware: Hardware, operands: Sequence[Tensor], memory: Memory | None
    ) -> Tensor:
        """The result."""
        del hardware, memory
        return torch.einsum(self.equation, *operands)


def repeats(tensor: Tensor) -> bool:
    """Whether a view reads some elements of its storage more than once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in pairs) + 1 < tensor.numel()
