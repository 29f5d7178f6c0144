"""Contractions: einsums as lists of products of one or two tensors, found once.

A contraction knows all that follows from its equation and from the shapes and strides of its
operands: which product, which views, which copies. Carrying it out is a short list of calls.
``torch.einsum`` reads its equation at each call, which takes longer than a small contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from autogram._blocks.kernels.paths import OperandShapes, find_path, kind_of_path, sizes_of
from autogram._blocks.kernels.workspace import Memory, Purpose


class Hardware:
    """The operations that contractions are made of, here as plain calls of PyTorch.

    Attributes:
        is_traced: Whether a compiler takes the operations, and may choose other strides.
        has_workspace: Whether scratch memory is used again, which is faster than fresh memory.
    """

    is_traced = False
    has_workspace = False

    def scratch(self, shape: Sequence[int], like: Tensor, purpose: Purpose = "rows") -> Tensor:
        """A contiguous tensor, valid until memory for the same purpose is asked for again."""
        del purpose
        return like.new_empty(shape)

    def copy(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """A contiguous copy in scratch memory."""
        return self.scratch(tensor.shape, tensor, purpose).copy_(tensor)

    def at_once(self, elements: int, like: Tensor) -> int:
        """How many elements to write before they are read, of so many that are read once."""
        del like
        return elements

    def permuted_patches(self, patches: Tensor, order: tuple[int, ...], purpose: Purpose) -> Tensor:
        """A contiguous copy of the patches of an image, with their dimensions in another order."""
        return self.copy(patches.permute(order), purpose)

    def total(self, x: Tensor, summed: tuple[int, ...]) -> Tensor:
        """A tensor summed over some dimensions."""
        return x.sum(summed)

    def product_sum(self, x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
        """The product of two tensors of equally many dimensions, summed over some of them."""
        return (x * y).sum(summed) if summed else x * y

    def matrix_product(self, x: Tensor, y: Tensor, out: Tensor | None) -> Tensor:
        """The product of two matrices, or of two batches of them, in some memory."""
        return (torch.mm if x.dim() == 2 else torch.bmm)(x, y, out=out)

    def other_product(self, equation: str, operands: Sequence[Tensor]) -> Tensor:
        """An einsum that is none of the above."""
        return torch.einsum(equation, *operands)


# Carries out a product or a sum, in some memory if it is a matrix product.
Contraction = Callable[[Hardware, Sequence[Tensor], Memory | None], Tensor]

# Brings a tensor to another order of dimensions and another shape, by a copy where it must be.
View = Callable[[Hardware, Tensor, Purpose], Tensor]


@lru_cache(maxsize=4096)
def find_contractions(
    equation: str, shapes: OperandShapes, strides: OperandShapes | None
) -> tuple[tuple[tuple[int, ...], Contraction, tuple[int, ...]], ...]:
    """The contractions of an einsum, with the positions of the tensors that each takes.

    The strides of results come last. Without strides of the operands, contractions suit tensors
    with any: their views cost more calls.
    """
    if strides is None:
        stack = [torch.empty(shape, device="meta") for shape in shapes]
    else:
        pairs = zip(shapes, strides, strict=True)
        stack = [torch.empty_strided(shape, stride, device="meta") for shape, stride in pairs]
    found: list[tuple[tuple[int, ...], Contraction, tuple[int, ...]]] = []
    for positions, of in find_path(equation, shapes).steps:
        taken = [stack.pop(position) for position in positions]
        contraction, result = _contraction(of, taken, suits_any=strides is None)
        stack.append(result)
        found.append((positions, contraction, result.stride()))
    return tuple(found)


def carry_out(
    hardware: Hardware, equation: str, operands: Sequence[Tensor], memory: Memory | None
) -> Tensor:
    """Carries out an einsum, in given memory if it is a matrix product."""
    shapes = tuple([x.shape for x in operands])
    strides = None if hardware.is_traced else tuple([x.stride() for x in operands])
    contractions = find_contractions(equation, shapes, strides)
    if len(operands) < 3:
        ((_, contract, _),) = contractions
        return contract(hardware, operands, memory)
    stack = list(operands)
    for positions, contract, expected in contractions:
        taken = [stack.pop(position) for position in positions]
        found = contract(hardware, taken, None if stack else memory)
        is_viewed = stack and strides is not None  # by a later one, as planned
        if is_viewed and found.stride() != expected:
            found = found.new_empty_strided(found.shape, expected).copy_(found)
        stack.append(found)
    return stack[0]


def _contraction(
    equation: str, operands: Sequence[Tensor], *, suits_any: bool
) -> tuple[Contraction, Tensor]:
    """Makes the contraction of an equation, for operands with the shapes and strides of these.

    With ``suits_any``, it is for operands with these shapes and any strides. The operands are
    without data, and so is the result, which comes last. It is not computed: the first product of
    tensors without data imports PyTorch's compiler.
    """
    sizes = sizes_of(equation, tuple([x.shape for x in operands]))
    kind = kind_of_path(equation, sizes)
    if kind == "elementwise":
        return _elementwise(equation, operands, sizes, suits_any=suits_any)
    if kind == "matrices":
        return _matrices(equation, operands, sizes, suits_any=suits_any)
    if kind == "other":
        result = torch.einsum(equation, *operands)
        return lambda hardware, given, _memory: hardware.other_product(equation, given), result
    summed, order = _sum(*equation.split("->"))
    is_in_order = order == tuple(range(len(order)))

    def contract(hardware: Hardware, operands: Sequence[Tensor], _memory: Memory | None) -> Tensor:
        """The sum, in the order of the output."""
        found = hardware.total(operands[0], summed) if summed else operands[0]
        return found if is_in_order else found.permute(order)

    return contract, (operands[0].sum(summed) if summed else operands[0]).permute(order)


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
) -> tuple[Contraction, Tensor]:
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
    is_in_order = order == tuple(range(len(order)))

    def contract(hardware: Hardware, operands: Sequence[Tensor], _memory: Memory | None) -> Tensor:
        """The product, summed."""
        x, y = first(hardware, operands[0], "first"), second(hardware, operands[1], "second")
        found = hardware.product_sum(x, y, summed)
        return found if is_in_order else found.permute(order)

    kept = [sizes[label] for label in product if label in output]
    return contract, torch.empty(kept, device="meta").permute(order)


def _matrices(
    equation: str, operands: Sequence[Tensor], sizes: Mapping[str, int], *, suits_any: bool
) -> tuple[Contraction, Tensor]:
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
    views = (
        (operands[0], _order(first, batch + rows + summed), (*stack, r, t)),
        (operands[1], _order(second, batch + summed + columns), (*stack, t, c)),
    )
    left, right = (_view(*of, suits_any=suits_any) for of in views)
    copies = [of[0].numel() for of in views if not suits_any and _strides_of_view(*of) is None]
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

    return _in_ranges(contract, equation, result, sum(copies)), result


def _in_ranges(whole: Contraction, equation: str, result: Tensor, copied: int) -> Contraction:
    """A batch of matrix products, in ranges of the batch where their operands must be copied.

    The hardware says how much of what is copied to copy at once. Mostly, one range is the whole
    batch.
    """
    inputs, output = equation.split("->")
    strides, sizes, elements = result.stride(), result.shape, result.numel()
    outer = max((dim for dim, n in enumerate(sizes) if n > 1), key=strides.__getitem__, default=-1)
    dims = [labels.find(output[outer : outer + 1] or "-") for labels in inputs.split(",")]
    if not copied or -1 in dims:  # or what is outermost in memory is no index of a batch
        return whole

    def contract(hardware: Hardware, operands: Sequence[Tensor], memory: Memory | None) -> Tensor:
        """The products, each range in its part of the memory."""
        step = max(1, sizes[outer] * hardware.at_once(copied, operands[0]) // copied)
        if step >= sizes[outer]:
            return whole(hardware, operands, memory)
        like = operands[0]
        if memory is None:
            dtype = torch.promote_types(like.dtype, torch.float32)
            rest = found = like.new_empty(elements, dtype=dtype)
        else:
            rest = found = memory((elements,), like)

        def next_part(shape: Sequence[int], _like: Tensor) -> Tensor:
            nonlocal rest
            part, rest = rest[: prod(shape)], rest[prod(shape) :]
            return part.view(tuple(shape))

        ranges = [x.split(step, dim) for x, dim in zip(operands, dims, strict=True)]
        for parts in zip(*ranges, strict=True):
            carry_out(hardware, equation, parts, next_part)
        return found.as_strided(sizes, strides)

    return contract


def repeats(tensor: Tensor) -> bool:
    """Whether a view reads some elements of its storage more than once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in pairs) + 1 < tensor.numel()
