"""Contractions: einsums as lists of products of one or two tensors, found once.

A contraction knows all that follows from its equation and from the shapes and strides of its
operands: which product, which views, which copies. Carrying it out is a short list of calls.
``torch.einsum`` reads its equation at each call, which takes longer than a small contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from string import ascii_letters
from typing import Literal, NamedTuple

import opt_einsum
import torch
from torch import Tensor

from autogram._blocks.kernels.workspace import Memory, Purpose

Shapes = tuple[tuple[int, ...], ...]
_Kind = Literal["sum", "elementwise", "matrices", "other"]


class Prices(NamedTuple):
    """What something costs on some hardware, in multiply-adds of a matrix product.

    Attributes:
        memory: Writing one element, and reading it again.
        call: Launching one operation, where that takes longer than the operation.
    """

    memory: int
    call: int = 0


class Hardware:
    """The operations that contractions are made of, here as plain calls of PyTorch.

    Attributes:
        is_traced: Whether a compiler takes the operations, and may choose other strides.
    """

    is_traced = False

    def scratch(self, shape: Sequence[int], like: Tensor, purpose: Purpose = "rows") -> Tensor:
        """A contiguous tensor, valid until memory for the same purpose is asked for again."""
        del purpose
        return like.new_empty(shape)

    def copy(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """A contiguous copy in scratch memory."""
        return self.scratch(tensor.shape, tensor, purpose).copy_(tensor)

    def permuted_patches(self, patches: Tensor, order: tuple[int, ...], purpose: Purpose) -> Tensor:
        """A contiguous copy of the patches of an image, with their dimensions in another order."""
        return self.copy(patches.permute(order), purpose)

    def total(self, x: Tensor, summed: tuple[int, ...]) -> Tensor:
        """A tensor summed over some dimensions."""
        return x.sum(summed)

    def product_sum(self, x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
        """The product of two tensors of equally many dimensions, summed over some of them."""
        return (x * y).sum(summed) if summed else x * y

    def matrix_product(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        """The product of two matrices, or of two batches of them, in some memory."""
        return (torch.mm if x.dim() == 2 else torch.bmm)(x, y, out=out)

    def other_product(self, equation: str, operands: Sequence[Tensor]) -> Tensor:
        """An einsum that is none of the above."""
        return torch.einsum(equation, *operands)


# Carries out a product or a sum, in some memory if it is a matrix product.
Contraction = Callable[[Hardware, Sequence[Tensor], Memory | None], Tensor]

# Brings a tensor to another order of dimensions and another shape, by a copy where it must be.
View = Callable[[Hardware, Tensor, Purpose], Tensor]


@dataclass(frozen=True)
class Path:
    """The order in which the operands of an einsum are contracted, and what that costs.

    Attributes:
        steps: Each step takes the tensors at some positions out of a list, which begins as the
            operands, and appends their contraction by an equation.
        multiplications: Multiply-adds.
        moved: Elements of all intermediate results.
        largest: Elements of the largest intermediate result.
    """

    steps: tuple[tuple[tuple[int, ...], str], ...]
    multiplications: int
    moved: int
    largest: int

    def cost(self, prices: Prices) -> int:
        """One number to compare plans by, in multiply-adds."""
        return self.multiplications + prices.memory * self.moved + prices.call * len(self.steps)


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
        if _kind(of, sizes) == "elementwise"
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
    equation: str, shapes: Shapes, strides: Shapes | None = None
) -> tuple[tuple[tuple[int, ...], Contraction], ...]:
    """The contractions of an einsum, with the positions of the tensors that each takes.

    Tensors without data are contracted here, to know the strides of intermediate results. Without
    strides, contractions suit tensors with any: their views cost more calls.
    """
    if strides is None:
        stack = [torch.empty(shape, device="meta") for shape in shapes]
    else:
        pairs = zip(shapes, strides, strict=True)
        stack = [torch.empty_strided(shape, stride, device="meta") for shape, stride in pairs]
    found: list[tuple[tuple[int, ...], Contraction]] = []
    for positions, of in find_path(equation, shapes).steps:
        taken = [stack.pop(position) for position in positions]
        contraction = _contraction(of, taken, suits_any=strides is None)
        found.append((positions, contraction))
        stack.append(contraction(Hardware(), taken, None))
    return tuple(found)


def carry_out(
    hardware: Hardware, equation: str, operands: Sequence[Tensor], memory: Memory | None = None
) -> Tensor:
    """Carries out an einsum, in given memory if it is a matrix product."""
    shapes = tuple([x.shape for x in operands])
    strides = None if hardware.is_traced else tuple([x.stride() for x in operands])
    stack = list(operands)
    for positions, contract in find_contractions(equation, shapes, strides):
        taken = [stack.pop(position) for position in positions]
        stack.append(contract(hardware, taken, None if stack else memory))
    return stack[0]


def unused_labels(*equations: str) -> Iterator[str]:
    """Letters that stand in none of the equations, ``k`` and ``b`` aside."""
    used = set("kb").union(*equations)
    return (letter for letter in reversed(ascii_letters) if letter not in used)


def _kind(equation: str, sizes: Mapping[str, int]) -> _Kind:
    """How to carry out one contraction.

    Where one operand has no index of its own, a matrix product would have a single column. A
    product followed by a sum reads each operand once, and ``torch.einsum`` would permute both.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) == 1 and len(set(inputs)) == len(inputs):
        return "sum"
    if len(terms) == 2:
        own = [
            {x for x in labels if x not in others and sizes[x] != 1}
            for labels, others in (terms, terms[::-1])
        ]
        shared = set(terms[0]) & set(terms[1]) & set(output)
        if not all(own) and any(sizes[label] > 1 for label in shared):
            return "elementwise"
        if own[0] | own[1] <= set(output):
            return "matrices"
    return "other"


def _contraction(equation: str, operands: Sequence[Tensor], *, suits_any: bool) -> Contraction:
    """Makes the contraction of an equation, for operands with the shapes and strides of these.

    With ``suits_any``, it is for operands with these shapes and any strides.
    """
    sizes = sizes_of(equation, tuple([x.shape for x in operands]))
    kind = _kind(equation, sizes)
    if kind == "elementwise":
        return _elementwise(equation, operands, sizes, suits_any=suits_any)
    if kind == "matrices":
        return _matrices(equation, operands, sizes, suits_any=suits_any)
    if kind == "other":
        return lambda hardware, operands, _memory: hardware.other_product(equation, operands)
    summed, order = _sum(*equation.split("->"))
    if summed:
        return lambda hardware, operands, _memory: hardware.total(operands[0], summed).permute(
            order
        )
    return lambda _hardware, operands, _memory: operands[0].permute(order)


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    """The permutation of ``labels`` that gives ``wanted``."""
    return tuple(labels.index(label) for label in wanted)


def _sum(labels: str, output: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions that are summed over, and the order of the others in the output."""
    summed = tuple(dim for dim, label in enumerate(labels) if label not in output)
    return summed, _order("".join(x for x in labels if x in output), output)


def _view(
    tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...], *, suits_any: bool
) -> View:
    """Makes a function that brings tensors like this one to another order and shape."""
    if suits_any:
        return lambda _hardware, x, _purpose: x.permute(order).reshape(shape)
    strides = _strides_of_view(tensor, order, shape)
    if strides is None and not repeats(tensor):
        return lambda hardware, x, purpose: hardware.copy(x.permute(order), purpose).view(shape)
    if strides is None:  # patches of an image: copied before they are permuted, in long runs
        if _strides_of_view(torch.empty(tensor.shape, device="meta"), order, shape):
            return lambda hardware, x, purpose: hardware.copy(x, purpose).permute(order).view(shape)
        return lambda hardware, x, purpose: hardware.permuted_patches(x, order, purpose).view(shape)
    if tensor.shape == shape and tensor.stride() == strides:
        return lambda _hardware, x, _purpose: x
    return lambda _hardware, x, _purpose: x.as_strided(shape, strides)


def _strides_of_view(
    tensor: Tensor, order: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The strides of a view in another order and shape, or ``None`` where a copy is needed."""
    try:
        return tensor.permute(order).view(shape).stride()
    except (RuntimeError, ValueError):  # the second by a FakeTensorMode
        return None


def _elementwise(
    equation: str, operands: Sequence[Tensor], sizes: Mapping[str, int], *, suits_any: bool
) -> Contraction:
    """A broadcast product of two tensors and a sum, in the order of the larger."""
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    x, y = (prod(sizes[label] for label in labels) for labels in terms)
    product = "".join(dict.fromkeys("".join(terms if x >= y else terms[::-1])))
    first, second = (
        _view(
            tensor,
            _order(labels, "".join(label for label in product if label in labels)),
            tuple(sizes[label] if label in labels else 1 for label in product),
            suits_any=suits_any,
        )
        for tensor, labels in zip(operands, terms, strict=True)
    )
    summed, order = _sum(product, output)

    def contract(hardware: Hardware, operands: Sequence[Tensor], _memory: Memory | None) -> Tensor:
        """The product, summed."""
        x, y = first(hardware, operands[0], "first"), second(hardware, operands[1], "second")
        return hardware.product_sum(x, y, summed).permute(order)

    return contract


def _matrices(
    equation: str, operands: Sequence[Tensor], sizes: Mapping[str, int], *, suits_any: bool
) -> Contraction:
    """One matrix product of two tensors, or a batch of them.

    The rows of the product are the outer indices of the output, so that the result needs no copy.
    """
    inputs, output = equation.split("->")
    first, second = inputs.split(",")
    own = [x for x in output if (x in first) != (x in second) and sizes[x] > 1]
    is_swapped = bool(own) and own[0] in second
    if is_swapped:
        first, second = second, first
        operands = operands[::-1]
    batch = "".join(label for label in first if label in second and label in output)
    summed = "".join(label for label in first if label in second and label not in output)
    # Indices of size one may stand in one operand alone and not in the result.
    rows = "".join(label for label in first if label not in second)
    columns = "".join(label for label in second if label not in first)
    n, t, r, c = (prod(sizes[label] for label in of) for of in (batch, summed, rows, columns))
    stack = () if n == 1 else (n,)
    order = _order(first, batch + rows + summed), _order(second, batch + summed + columns)
    left = _view(operands[0], order[0], (*stack, r, t), suits_any=suits_any)
    right = _view(operands[1], order[1], (*stack, t, c), suits_any=suits_any)
    product = torch.empty((*stack, r, c), device="meta")
    kept = "".join(label for label in batch + rows + columns if label in output)
    unfolded, last = [sizes[label] for label in kept], _order(kept, output)
    result = product.view(unfolded).permute(last)
    shape, strides, shape_of_product = result.shape, result.stride(), product.shape
    is_same = shape == shape_of_product and strides == product.stride()

    def contract(hardware: Hardware, operands: Sequence[Tensor], memory: Memory | None) -> Tensor:
        """The product, as the output has it."""
        if is_swapped:
            operands = operands[::-1]
        x, y = left(hardware, operands[0], "first"), right(hardware, operands[1], "second")
        out = None if memory is None else memory(shape_of_product, x)
        found = hardware.matrix_product(x, y, out)
        if suits_any:
            return found.view(unfolded).permute(last)
        return found if is_same else found.as_strided(shape, strides)

    return contract


def repeats(tensor: Tensor) -> bool:
    """Whether a view reads some elements of its storage more than once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in pairs) + 1 < tensor.numel()
