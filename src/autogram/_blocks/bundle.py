"""Bundles: columns of several parameters that are contracted together.

A contraction of tiny factors takes less time than the calls that start it. Tiny columns of equal
form are therefore stacked, and contracted like the columns of one parameter with one more
dimension. A layer's weight and bias share a factor, whose products with itself are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Literal

import torch
from torch import Tensor

from autogram._blocks.block import Block, rows_block
from autogram._blocks.columns import Columns
from autogram._blocks.kernels import Kernels
from autogram._blocks.kernels.paths import unused_labels
from autogram._blocks.layout import Subset
from autogram._blocks.products import gram_with_factor, products, share_factor, weighted_sum
from autogram._blocks.programs import (
    Program,
    are_plain,
    forms,
    is_writing,
    settings_now,
    written_down,
)
from autogram._blocks.region import Region, as_real, from_storage

# The most elements of a bundle, whose factors stay in memory until the bundle is contracted.
_FULL = 2**22


class Bundles:
    """Columns that wait for others of equal form, for a joint contraction."""

    def __init__(self) -> None:
        self._open: dict[Hashable, list[Columns]] = {}

    def add(self, *found: Columns) -> list[list[Columns]]:
        """Adds the columns of parameters that a call has read, those of a weight first.

        Returns:
            The bundles to contract now: columns that are not tiny, alone or with weight and
            bias of one layer together, and full bundles.
        """
        blocks = [columns.single for columns in found]
        if len(found) == 2:
            kernels, (outer, rows) = found[0].kernels, blocks
            is_large = outer is not None and outer.elements > kernels.tiny
            if outer and rows and is_large and share_factor(outer, rows, kernels):
                return [list(found)]
        ready: list[list[Columns]] = []
        for columns, block in zip(found, blocks, strict=True):
            kernels = columns.kernels
            if block is None or block.adjoint is not None or block.elements > kernels.tiny:
                ready.append([columns])  # the contraction takes longer than the calls
            elif bundle := self.put(columns, *form_in_bundle(columns, block)):
                ready.append(bundle)
        return ready

    def put(self, columns: Columns, form: Hashable, elements: int) -> list[Columns] | None:
        """Lets tiny columns wait for others of their form, or returns all if they are enough."""
        bundle = self._open.setdefault(form, [])
        bundle.append(columns)
        is_full = len(bundle) * elements > min(_FULL, columns.kernels.limit.elements)
        return self._open.pop(form) if is_full else None

    def rest(self) -> Iterator[list[Columns]]:
        while self._open:
            yield self._open.popitem()[1]


def form_in_bundle(columns: Columns, block: Block) -> tuple[Hashable, int]:
    """The form of columns with one block, and the number of elements they add to a bundle."""
    return block.form(""), block.elements + prod(columns.parameter.shape)


def bundled(found: Iterable[Columns]) -> Iterator[list[Columns]]:
    bundles = Bundles()
    for columns in found:
        yield from bundles.add(columns)
    yield from bundles.rest()


def gram_of_bundle(bundle: Sequence[Columns]) -> Tensor | None:
    """The sum of the Gramians of a bundle, as from :meth:`Columns.gram`."""
    if len(bundle) == 1:
        return bundle[0].gram()
    blocks = _only_blocks(bundle)
    if blocks[0].equation != blocks[1].equation:
        return gram_with_factor(blocks[0], bundle[0].kernels)
    return products("gram", [_stack(blocks)], (), bundle[0].kernels)


def weighted_sums(
    found: Mapping[Tensor, Columns], weights: Tensor, place: torch.device | None = None
) -> dict[Tensor, Tensor | None]:
    """J^T w of some parameters, for weights ``(k, b)`` or several, ``(s, k, b)``.

    Results own their memory, with autograd's strides. They are on the factors' device:
    in one place, or, if this is ``None``, each on the device of its parameter.
    """
    if isinstance(found, Rows):
        return found.weighted_sums(weights)
    # One new tensor for all parameters: kernels may compute something from it once. Its
    # strides are always the same, and so are the programs.
    weights = weights.contiguous()
    stack = weights.view(weights.shape) if weights.dim() == 3 else weights.unsqueeze(0)
    each, settings = list(found.values()), settings_now()
    devices = {columns: place or parameter.device for parameter, columns in found.items()}
    sums = _by_program(each, stack, settings, partial(_in_bundles, devices, stack, settings))
    totals = [x if x is None or weights.dim() == 3 else x[0] for x in sums]
    owned = _owned(totals, [columns.parameter for columns in each])
    return dict(zip(found, owned, strict=True))


def _in_bundles(
    devices: Mapping[Columns, torch.device], weights: Tensor, settings: Hashable
) -> list[Tensor | None]:
    """The weighted sums of some columns on their devices, bundle by bundle."""
    sums: dict[Columns, Tensor | None] = {}
    for bundle in bundled(devices):
        moved = weights.to(devices[bundle[0]])
        compute = partial(_sums_of, bundle, moved)
        alone = _by_program(bundle, moved, settings, compute) if len(bundle) == 1 else compute()
        sums.update(zip(bundle, alone, strict=True))
    return [sums[columns] for columns in devices]


def _by_program(
    each: Sequence[Columns],
    weights: Tensor,
    settings: Hashable,
    compute: Callable[[], Sequence[Tensor | None]],
) -> Sequence[Tensor | None]:
    """The weighted sums of some columns from a function, or from a program if there is one.

    A step that recurs has one program for all parameters. Other programs are for
    single parameters: layers of one form share them, and so do steps in which other layers differ.
    """
    if is_writing():
        return compute()
    parts = [columns.found() for columns in each]
    blocks = [block for found in parts for _, block in found]
    if not blocks or any(isinstance(x, Block) and x.adjoint is not None for x in blocks):
        return compute()
    kernels = each[0].kernels
    of_rows = {x.operands[0].dtype for x in blocks if isinstance(x, Block) and x.is_rows}
    given = [weights, *[x for dtype in of_rows for x in kernels.shared(weights, dtype)]]
    given += [x for block in blocks for x in block.operands]
    numbers: dict[int, int] = {}  # of tensors, by the `id`: several blocks may have one in common
    key: list[Hashable] = ["weighted sums", kernels.limit.elements, settings]
    key += [numbers.setdefault(id(x), len(numbers)) for x in given]
    for columns, found in zip(each, parts, strict=True):
        key += columns.parameter.numbers, *[(x.numbers, block.equation) for x, block in found]
    tensors = list({id(x): x for x in given}.values())
    known, programs = (*key, forms(tensors)), kernels.programs
    program: Program | Literal[False] | None = programs.get(known)
    if program:
        sums = iter(program(None, tensors))
        return [next(sums) if found else None for found in parts]
    is_due = program is None and are_plain(tensors)
    if not (is_due and programs.is_due(known, is_of_many=len(each) > 1)):
        return compute()
    totals, program = written_down(
        lambda *_: compute(), lambda found: [x for x in found if x is not None], None, tensors
    )
    programs.keep(known, program or False)
    return totals


def _sums_of(bundle: Sequence[Columns], weights: Tensor) -> Sequence[Tensor | None]:
    """The weighted sums of a bundle, with weights ``(s, k, b)``."""
    if len(bundle) == 1:
        return [bundle[0].weighted_sum(weights)]
    total = weighted_sum([_stack(_only_blocks(bundle))], weights, bundle[0].kernels)
    parts = [total.select(1, i).reshape(len(weights), -1) for i in range(len(bundle))]
    views = [from_storage(part, x.parameter) for part, x in zip(parts, bundle, strict=True)]
    # Copied here: with views of all bundles, all sums would exist twice at the end.
    pairs = zip(views, bundle, strict=True)
    copies = [x.new_empty_strided(x.shape, _strides(x, of.parameter)) for x, of in pairs]
    torch._foreach_copy_(copies, views)  # on a GPU, in one launch
    return copies


def _owned(
    totals: Sequence[Tensor | None], parameters: Sequence[Region]
) -> Sequence[Tensor | None]:
    """Weighted sums that are not views and own their memory, copied if necessary.

    Views share a counter of changes with all views of their base, cannot be detached in place, and
    are pickled with their whole storage.
    """
    owned: list[Tensor | None] = []
    copies: list[Tensor] = []
    originals: list[Tensor] = []
    taken: set[int] = set()  # storages that belong to a sum
    for total, parameter in zip(totals, parameters, strict=True):
        if total is None:
            owned.append(None)
            continue
        strides, storage = _strides(total, parameter), total.untyped_storage()
        is_shared = storage.nbytes() > total.nbytes or storage._cdata in taken
        # A tensor composed of others has an empty storage.
        is_shared |= type(total) is not Tensor and hasattr(total, "__tensor_flatten__")
        if is_shared or total.stride() != strides:
            originals.append(total)
            total = total.new_empty_strided(total.shape, strides)
            copies.append(total)
        else:
            taken.add(storage._cdata)
            if total._base is not None:
                total = total.data  # the same memory, and no view
        owned.append(total)
    if copies:
        torch._foreach_copy_(copies, originals)  # on a GPU, in one launch
    return owned


def _strides(total: Tensor, parameter: Region) -> tuple[int, ...]:
    """Autograd's strides of ``(*parameter)``, or of several gradients, ``(s, *parameter)``."""
    strides = (parameter if parameter.is_gapless else Region.contiguous(parameter.shape)).strides
    if total.dim() == len(strides):
        return strides
    return total.numel() // max(1, len(total)), *strides


class Rows(Mapping[Tensor, Columns]):
    """The columns of some parameters as views of one matrix, with their rows side by side.

    Products of all parameters are products of the matrix. Columns are made on request.

    Args:
        parameters: The parameters in the order of the matrix, and whether each has columns.
        matrix: ``(m, n)``. Entries of parameters without columns are zero.
        kernels: The kernels of its device.
    """

    def __init__(self, parameters: Mapping[Tensor, bool], matrix: Tensor, kernels: Kernels) -> None:
        self.dtype = matrix.dtype
        self._matrix, self._kernels = matrix, kernels
        self._sizes = [as_real(parameter).numel() for parameter in parameters]
        starts = accumulate(self._sizes, initial=0)
        each = zip(parameters.items(), starts, self._sizes, strict=False)
        self._places = {p: (start, size) for (p, has), start, size in each if has}
        self._columns: dict[Tensor, Columns] = {}

    def of(self, parameter: Tensor) -> Tensor:
        """The rows of a parameter in real numbers, ``(m, 1, *parameter)``."""
        rows = self._matrix.narrow(1, *self._places[parameter])
        return rows.view((len(rows), 1, *as_real(parameter).shape))

    def gramian(self) -> Tensor:
        """J Jᵀ, ``(m, m)``."""
        return self._kernels.gram(self._matrix)

    def weighted_sums(self, weights: Tensor) -> dict[Tensor, Tensor | None]:
        """J^T w of each parameter with columns, as from :func:`weighted_sums`."""
        sums = weights.squeeze(-1).to(self._matrix) @ self._matrix
        regions, totals = [], []
        for parameter, (start, size) in self._places.items():
            region = Region.of_parameter(parameter)
            regions.append(region)
            total = sums.narrow(-1, start, size)
            totals.append(total.view((*sums.shape[:-1], *region.shape)))
        return dict(zip(self._places, _owned(totals, regions), strict=True))

    def __getitem__(self, parameter: Tensor) -> Columns:
        columns = self._columns.get(parameter)
        if columns is None:
            rows, region = self.of(parameter), Region.of_parameter(parameter)
            columns = self._columns[parameter] = Columns(region, self._kernels)
            columns.add(region, rows_block(rows))
        return columns

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._places  # without columns

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _only_blocks(bundle: Sequence[Columns]) -> list[Block]:
    """The only block of each of some columns, checked."""
    blocks = []
    for columns in bundle:
        block = columns.single
        assert block is not None
        block.check()
        blocks.append(block)
    return blocks


def _stack(blocks: Sequence[Block]) -> Block:
    """Blocks of equal form as one."""
    equation, dim = _stacked_equation(blocks[0].equation)
    operands = zip(*[block.operands for block in blocks], strict=True)
    return Block(equation, tuple([torch.stack(x, dim) for x in operands]))


@lru_cache(maxsize=4096)
def _stacked_equation(equation: str) -> tuple[str, int]:
    """The equation of a stack, and the stacked dimension of every factor.

    Explicit rows are stacked after the dimensions of the objectives, which needs no copy.
    """
    inputs, output = equation.split("->")
    label = next(unused_labels(equation))
    stacked = f"kb{label}{output[2:]}"
    if inputs[:2] == "kb" and len(inputs) == len(output):
        return f"kb{label}{inputs[2:]}->{stacked}", 2
    return f"{','.join(label + term for term in inputs.split(','))}->{stacked}", 0


def side_by_side(parts: Sequence[tuple[Columns, Subset]]) -> Columns:
    """Joins the columns of one parameter for several sets of samples.

    Factors are copied. All sets have the same number of objectives per sample.
    """
    first = parts[0][0]
    total = Columns(first.parameter, first.kernels)
    for columns, subset in parts:
        for region, block in in_places(columns, first.parameter).found():
            total.add(region, block, subset)
    return total


def in_places(columns: Columns, parameter: Region) -> Columns:
    """Columns as rows for a parameter that has moved in memory; otherwise the same columns.

    Between two passes, its memory format may change, or it may move into a buffer.
    """
    if columns.parameter == parameter:
        return columns
    moved = Columns(parameter, columns.kernels)
    if (rows := columns.rows()) is not None:
        moved.add(parameter, rows_block(rows))
    return moved
