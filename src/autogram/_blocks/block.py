"""Blocks: one use's rows of the Jacobian for one tensor, kept as factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from autogram._blocks.kernels import Kernels
from autogram._blocks.kernels.paths import OperandShapes, sizes_of, unused_labels
from autogram._blocks.layout import Layout
from autogram.errors import ChangedTensorError


@dataclass(frozen=True)
class Adjoint:
    """Computes weighted sums of a block's rows, and perhaps the rows, faster than an einsum.

    PyTorch has such a kernel for convolutions: the gradient of the weight, without patches.
    """

    function: Callable[..., Tensor]
    """The gradient, from a cotangent ``(*output)`` and the saved tensors."""
    cotangent: Tensor
    """The cotangents ``(k, *output)``. The first dimension of outputs counts the samples."""
    saved: tuple[Tensor, ...]
    labels: str
    """The index of each dimension of the gradient, as in the equation of the block."""
    of_samples: Callable[..., Tensor] | None = None
    """The gradient of each sample, ``(b, *gradient)``, from the same tensors, or ``None``."""

    def rows(self, parameter: str, kernels: Kernels) -> Tensor:
        """The explicit rows, ``(k, b, *parameter)``."""
        assert self.of_samples is not None
        tensors = self.cotangent, *self.saved
        dtype = kernels.multiplied(*[x.dtype for x in tensors])
        cotangent, *saved = [x.to(dtype) for x in tensors]
        rows = joined([self.of_samples(each, *saved).unsqueeze(0) for each in cotangent])
        return _permuted(rows, f"KB{self.labels}", f"KB{parameter}")

    def __call__(self, weights: Tensor, parameter: str, kernels: Kernels) -> Tensor:
        """The sum of the rows with weights ``(k, b)``, in the order of some indices."""
        behind = (1,) * (self.cotangent.dim() - weights.dim())
        weighted = kernels.weighed(self.cotangent, weights.view(*weights.shape, *behind))
        total = weighted.squeeze(0) if len(weights) == 1 else weighted.sum(0)
        saved = [x.to(total.dtype) for x in self.saved]
        gradient = self.function(total, *saved).to(weights.dtype)
        return _permuted(gradient, self.labels, parameter)


def _permuted(tensor: Tensor, labels: str, wanted: str) -> Tensor:
    """A tensor with its dimensions in the order of some labels, summed over those left out."""
    left_out = [dim for dim, label in enumerate(labels) if label not in wanted]
    single = [dim for dim in left_out if tensor.shape[dim] == 1]  # `torch.einsum` would copy these
    kept = "".join([label for dim, label in enumerate(labels) if dim not in single])
    return torch.einsum(f"{kept}->{wanted}", tensor.squeeze(single) if single else tensor)


class Equation:
    """The indices of a block's einsum.

    Attributes:
        inputs: The indices of each operand.
        parameter: The indices of the tensor's dimensions.
        is_rows: Whether the block is explicit rows, with their dimensions in any order.
        is_in_order: Whether these are in the tensor's order.
        is_small: Whether rows are not larger than an operand, such as those of a bias or a scale.
        places: The first place of each dimension in the inputs, -1 for one of size one.
        order_of_factors: The tensor's dimensions in the order of the block's operands.
        positions: The indices of every operand that are summed over.
    """

    def __init__(self, text: str) -> None:
        inputs, output = text.split("->")
        self.inputs = tuple(inputs.split(","))
        self.parameter = output[2:]
        is_single = len(self.inputs) == 1
        self.is_rows = is_single and len(inputs) == len(output)
        self.is_in_order = inputs == output
        self.is_small = not self.is_rows and any(set(output) <= set(of) for of in self.inputs)
        self.places = [inputs.find(label) for label in self.parameter]
        self.order_of_factors = tuple(sorted(range(len(self.places)), key=self.places.__getitem__))
        common = set.intersection(*map(set, self.inputs))
        self.positions = "".join(sorted(common - set(output)))


parsed = lru_cache(maxsize=4096)(Equation)


@lru_cache(maxsize=4096)
def reordered(equation: str, order: tuple[int, ...]) -> str:
    """The equation with the tensor's dimensions in another order, and a sum over those left out."""
    inputs, output = equation.split("->")
    return f"{inputs}->kb{''.join(output[2 + dim] for dim in order)}"


class Kept(ABC):
    """Keeps tensors, and notices changes in place."""

    _versions: list[int] | None = None
    """Those of the tensors at the first check."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept."""

    def check(self) -> None:
        """Raises ``ChangedTensorError`` if a tensor was changed in place since the first check."""
        versions = [x._version for x in self.tensors]
        if self._versions is None:
            self._versions = versions
        elif self._versions != versions:
            raise ChangedTensorError(
                "A tensor that the Jacobian is made of was changed in place since it was computed. "
                "Call the Jacobian's methods before an optimizer's step or an in-place operation, "
                "or compute the losses and the Jacobian again. If a custom autograd Function or a "
                "hook changed its incoming gradient, return a new tensor there: `g * 2`, not "
                "`g.mul_(2)`."
            )


@dataclass(eq=False)
class Block(Kept):
    """Rows of J for one tensor, as an einsum that may never be computed.

    The output indices are ``k`` (objective of a sample), ``b`` (sample) and then the dimensions of
    the tensor. Every other index is summed over: positions such as tokens or pixels.
    """

    equation: str
    operands: tuple[Tensor, ...]
    adjoint: Adjoint | None = None
    """A faster way to all rows and their weighted sums, or ``None``, as for slices."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return parsed(self.equation).inputs

    @property
    def parameter(self) -> str:
        """The indices of the tensor's dimensions."""
        return parsed(self.equation).parameter

    @property
    def is_rows(self) -> bool:
        """Whether these are explicit rows, with their dimensions in any order."""
        return parsed(self.equation).is_rows

    @property
    def shapes(self) -> OperandShapes:
        return tuple([operand.shape for operand in self.operands])

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every index."""
        return sizes_of(self.equation, self.shapes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operands, and the tensors saved by the adjoint."""
        return self.operands if self.adjoint is None else self.operands + self.adjoint.saved

    @property
    def elements(self) -> int:
        return sum([operand.numel() for operand in self.operands])

    @property
    def elements_of_rows(self) -> int:
        sizes = self.sizes
        return prod([sizes[label] for label in "kb" + self.parameter])

    def has_fast_adjoint(self, kernels: Kernels) -> bool:
        """Whether the adjoint gives the rows of all samples at once faster than an einsum."""
        if self.adjoint is None or self.adjoint.of_samples is None:
            return False
        patches, dtypes = max([x.numel() for x in self.operands]), [x.dtype for x in self.operands]
        if (rows := self.elements_of_rows) > kernels.most_elements(dtypes[0]):
            return False
        return kernels.prefers_adjoint(patches, rows, self.sizes["i"], *dtypes)

    def form(self, differing: str) -> Hashable:
        """A key that is equal for blocks that differ only in the sizes of some indices."""
        sizes: Hashable = self.shapes
        if differing:
            sizes = tuple([n for label, n in self.sizes.items() if label not in differing])
        return self.equation, sizes, tuple([(x.dtype, x.device) for x in self.operands])

    def map(self, label: str, function: Callable[[Tensor, int], Tensor]) -> Block:
        """The block with ``function(operand, dim)`` for every operand that has index ``label``."""
        pairs = zip(self.inputs, self.operands, strict=True)
        operands = [function(x, of.index(label)) if label in of else x for of, x in pairs]
        return Block(self.equation, tuple(operands))

    def narrow(self, label: str, start: int, length: int) -> Block:
        return self.map(label, lambda x, dim: x.narrow(dim, start, length))

    def chunks(self, label: str, count: int) -> Iterator[Block]:
        """The block cut into ``count`` ranges of one index (fewer if they would be empty)."""
        if count == 1:
            yield self
            return
        size = self.sizes[label]
        step = -(-size // count)
        for start in range(0, size, step):
            yield self.narrow(label, start, min(step, size - start))

    def select(self, label: str, chosen: Tensor) -> Block:
        return self.map(label, lambda x, dim: x.index_select(dim, chosen))

    def at(self, samples: Tensor) -> Block:
        return self.select("b", samples)

    def reorder(self, order: tuple[int, ...]) -> Block:
        """The block with the tensor's dimensions in another order; it sums over those left out."""
        equation = reordered(self.equation, order)
        if equation == self.equation:
            return self
        return Block(equation, self.operands, self.adjoint)


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors, without a copy if there is only one."""
    return torch.cat(list(tensors), dim) if len(tensors) > 1 else tensors[0]


def rows_block(rows: Tensor) -> Block:
    """Explicit rows ``(k, b, *tensor)`` as a block."""
    labels = "kb" + "acdefghijlmnopqrstuvwxyz"[: rows.dim() - 2]
    return Block(f"{labels}->{labels}", (rows,))


def block_of_equation(
    equation: str, dims: str, layout: Layout | None, cotangent: Tensor, *factors: Tensor
) -> Block:
    """The block of a use, from an equation that does not know where the samples are.

    Args:
        equation: Indices of the cotangent and the factors, and after the arrow those of the
            tensor's dimensions, as in ``"to,ti->oi"``, without ``k`` and ``b``.
        dims: The index of each dimension of the use's output that may hold the samples.
        layout: Where the samples are, or ``None`` if all positions belong to one sample.
        cotangent: The cotangent, with a leading dimension for the objectives.
        factors: The tensors saved by the rule.

    Returns:
        The block, with ``B = 1`` if ``layout`` is ``None``.
    """
    if layout is None:
        terms, out = equation.split("->")
        return Block(f"kb{terms}->kb{out}", (cotangent.unsqueeze(1), *factors))
    labels = dims[layout.dim : layout.dim + layout.depth]
    terms, found, diagonal = _split_equation(equation, labels, layout.has_before, layout.has_after)
    if not (layout.has_before or layout.has_after or diagonal):
        return Block(terms, (cotangent, *factors))
    pairs = list(zip((cotangent, *factors), found, strict=True))
    operands = [x if dim is None else layout.split(x, dim) for x, dim in pairs]
    if diagonal:
        size = next(x.shape[dim] for x, dim in pairs if dim is not None)
        eye = torch.eye(size, dtype=cotangent.dtype, device=cotangent.device)
        operands.append(layout.split(eye, 0))
    return Block(terms, tuple(operands))


@lru_cache(maxsize=4096)
def _split_equation(
    equation: str, labels: str, has_before: bool, has_after: bool
) -> tuple[str, list[int | None], bool]:
    """Splits ``b`` out of an index, or out of several adjacent ``labels`` of operands.

    Returns the new equation, the first dimension of these in each operand, and whether an identity
    matrix must be added as a factor. A tensor that is itself indexed by the samples needs it: each
    sample's row has entries only at the sample's own index.
    """
    terms, out = equation.split("->")
    inputs = ["k" + terms.split(",")[0], *terms.split(",")[1:]]
    unused = unused_labels(equation)
    split = (next(unused) if has_before else "") + "b" + (next(unused) if has_after else "")
    found = [of.index(labels) if labels in of else None for of in inputs]
    split_inputs = [of.replace(labels, split) for of in inputs]
    diagonal = labels in out
    if diagonal:
        split_inputs.append(split + labels)
    return f"{','.join(split_inputs)}->kb{out}", found, diagonal


@lru_cache(maxsize=4096)
def cross_equation(first: str, second: str, *, is_diagonal: bool = False) -> str:
    """The equation of inner products of the rows of two blocks: all pairs, or equal k and b."""
    first_inputs, first_output = first.split("->")
    second_inputs, second_output = second.split("->")
    unused = unused_labels(first, second)
    start = 0 if is_diagonal else 2
    renamed = dict(zip(second_output[start:], first_output[start:], strict=True))
    for label in second_inputs.replace(",", ""):
        if label not in renamed:
            renamed[label] = next(unused)
    moved = "".join(renamed.get(label, label) for label in second_inputs)
    product = "kb" if is_diagonal else f"kb{renamed['k']}{renamed['b']}"
    return f"{first_inputs},{moved}->{product}"
