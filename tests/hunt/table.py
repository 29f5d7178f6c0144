"""Operators by hand: a harmless first argument, and later ones that move, pick or mix samples.

The hidden activations are ``(4, 4, 4)`` unless told otherwise, so that every order of dimensions
has one shape, and the samples can lie in dimension 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import rnn

from tests.hunt.pairs import Operator, Pair
from tests.unit.checks import irregular

CUBE = (4, 4, 4)
TOKENS = (12, 3)  # packed: the samples are one behind the other
EVEN = [3, 3, 3, 3]
RAGGED = [[2, 4, 3, 3], [5, 1, 4, 2]]


def pairs(only: str = "") -> list[Pair]:
    """All pairs of the operators whose names begin so.

    Where there are several later arguments, one more pair goes through all of them.
    """
    families = (moving, joining, indexing, scattering, writing, selecting, reducing, products)
    later = (constants, segments, attention, recurrent, spatial, control)
    found = [pair for family in (*families, *later) for pair in family()]
    return [
        pair
        for pair in found
        if pair.operator.startswith(only) or only.startswith(f"{pair.operator}:")
    ]


def _pairs(
    operator: str,
    apply: Operator,
    first: Any,
    *later: Any,
    shape: tuple[int, ...] = CUBE,
    base: Tensor | None = None,
) -> Iterator[Pair]:
    """The first argument with each later one, and with all of them."""
    for number, argument in enumerate(later):
        yield Pair(operator, str(number), apply, (first, argument), shape, base)
    if len(later) > 1:
        yield Pair(operator, "all", apply, (first, *later), shape, base)


def _index(*places: int) -> Tensor:
    return torch.tensor(places)


def _along(places: list[int], dim: int) -> Tensor:
    """An index of the whole shape that picks these places along a dimension."""
    shape = [1, 1, 1]
    shape[dim] = 4
    return torch.tensor(places).view(shape).expand(CUBE).contiguous()


ORDER, BACK, SWAPPED, TWICE = [0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3], [0, 0, 1, 1]
ORDERS = [_index(*each) for each in (ORDER, BACK, SWAPPED, TWICE)]


def moving() -> Iterator[Pair]:
    """What moves elements, by numbers."""
    yield from _pairs("roll", lambda h, a: h.roll(*a), (0, 0), (1, 0), (2, 0), (1, 1))
    yield from _pairs(
        "roll of tuples", lambda h, a: h.roll(*a), ((0,), (0,)), ((1,), (0,)), ((1,), (1,))
    )
    yield from _pairs(
        "roll of several", lambda h, a: torch.roll(h, *a), ([0, 0], [0, 1]), ([1, 0], [0, 1])
    )
    yield from _pairs(
        "roll by name",
        lambda h, a: torch.roll(h, **a),
        {"shifts": (0,), "dims": (0,)},
        {"shifts": (3,), "dims": (0,)},
    )
    yield from _pairs("roll of all", lambda h, a: h.roll(a), 0, 16, 4)
    yield from _pairs("flip", lambda h, a: h.flip(a), [2], [0], [1], [0, 1])
    yield from _pairs("flip of tuples", lambda h, a: h.flip(a), (2,), (0,), ())
    yield from _pairs("flip of numbers", lambda h, a: torch.flip(h, dims=a), (), (0, 2))
    yield from _pairs("permute", lambda h, a: h.permute(a), (0, 1, 2), (1, 0, 2), (2, 1, 0))
    yield from _pairs("permute of numbers", lambda h, a: h.permute(*a), (0, 1, 2), (1, 0, 2))
    yield from _pairs("transpose", lambda h, a: h.transpose(*a), (1, 1), (0, 1), (0, 2))
    yield from _pairs("swapaxes", lambda h, a: h.swapaxes(*a), (0, 0), (0, 1), (-3, -1))
    yield from _pairs("movedim", lambda h, a: h.movedim(*a), ((0, 1), (0, 1)), ((0, 1), (1, 0)))
    yield from _pairs("movedim of numbers", lambda h, a: h.movedim(*a), (0, 0), (0, 1), (2, 0))
    yield from _pairs("einsum", lambda h, a: torch.einsum(a, h), "abc->abc", "abc->bac", "abc->cab")
    yield from _pairs(
        "einsum with dots", lambda h, a: torch.einsum(a, h), "a...->a...", "ab...->ba..."
    )
    yield from _pairs(
        "rot90", lambda h, a: torch.rot90(h, *a), (0, (0, 1)), (1, (0, 1)), (2, (0, 1))
    )
    yield from _pairs("view", lambda h, a: h.view(a).sum(1), (4, 4, 4), (2, 2, 16), (8, 2, 4))
    yield from _pairs("reshape", lambda h, a: h.reshape(a).cos().sum(-1), (4, 16), (16, 4), (8, 8))
    yield from _pairs("flatten", lambda h, a: h.flatten(*a).unflatten(a[0], (4, 4)), (1, 2), (0, 1))
    yield from _pairs(
        "unflatten", lambda h, a: h.flatten(0, 1).unflatten(0, a).sum(2), (4, 4), (2, 8), (8, 2)
    )
    yield from _pairs("unfold", lambda h, a: h.unfold(*a).sum(-1), (0, 1, 1), (0, 2, 1), (1, 2, 1))
    yield from _pairs(
        "as_strided",
        lambda h, a: h.contiguous().as_strided((4, 4, 4), a),
        (16, 4, 1),
        (4, 16, 1),
        (1, 4, 16),
    )
    yield from _pairs(
        "as_strided with an offset",
        lambda h, a: h.contiguous().as_strided((3, 4, 4), (16, 4, 1), a),
        0,
        16,
        4,
    )
    yield from _pairs("narrow", lambda h, a: h.narrow(*a), (0, 0, 2), (0, 2, 2), (0, 1, 2))
    yield from _pairs("select", lambda h, a: h.select(*a), (1, 0), (0, 0), (1, 2))
    yield from _pairs("diagonal", lambda h, a: h.diagonal(*a), (0, 1, 2), (0, 0, 1), (0, 0, 2))
    yield from _pairs("squeeze", lambda h, a: h[:, None].movedim(1, a).squeeze(a), 1, 2)
    yield from _pairs("expand", lambda h, a: h.unsqueeze(a).expand(4, 4, 4, 4).sum(1), 1, 0)
    yield from _pairs("tile", lambda h, a: h.tile(a).sum(-1), (1, 1, 2), (1, 2, 1), (2, 1, 1))
    yield from _pairs("repeat", lambda h, a: h.repeat(*a).sum(-1), (1, 1, 2), (2, 1, 1))
    yield from _pairs(
        "repeat_interleave",
        lambda h, a: h.repeat_interleave(a, 0, output_size=4),
        _index(1, 1, 1, 1),
        _index(2, 0, 1, 1),
        _index(0, 2, 2, 0),
        _index(0, 1, 1, 2),
    )
    yield from _pairs(
        "repeat_interleave of numbers", lambda h, a: h.repeat_interleave(2, a).sum(2), 1, 0
    )
    yield from _pairs("pixel_shuffle", lambda h, a: F.pixel_shuffle(h, a), 1, 2, shape=(4, 4, 2, 2))
    yield from _pairs("channel_shuffle", lambda h, a: F.channel_shuffle(h, a), 1, 2)
    yield from _pairs("matrix_H", lambda h, a: h.mT if a else h, False, True)
    yield from _pairs("T", lambda h, a: h.T if a else h, False, True, shape=(4, 4))
    yield from _pairs(
        "clone",
        lambda h, a: h.clone(memory_format=a),
        torch.preserve_format,
        torch.contiguous_format,
    )
    yield from _pairs(
        "fold", lambda h, a: F.fold(h, (2, 2), a, padding=0), (2, 1), (1, 2), shape=(4, 4, 2)
    )


def joining() -> Iterator[Pair]:
    """What cuts and joins."""
    yield from _pairs("cat of slices", lambda h, a: torch.cat([h[a:], h[:a]]), 0, 1, 3)
    yield from _pairs("cat of rolled", lambda h, a: torch.cat([h[:, a:], h[:, :a]], 1), 0, 1)
    yield from _pairs("cat", lambda h, a: torch.cat([h, h.cos()], a).sum(-1), 2, 1, 0)
    yield from _pairs(
        "cat by order", lambda h, a: torch.cat([h[i : i + 1] for i in a]), ORDER, BACK, TWICE
    )
    yield from _pairs(
        "concat by name", lambda h, a: torch.concat(tensors=[h, h.cos()], dim=a), 2, 0
    )
    yield from _pairs("stack", lambda h, a: torch.stack([h[i] for i in a]), ORDER, BACK, SWAPPED)
    yield from _pairs(
        "stack of unbind",
        lambda h, a: torch.stack([h.unbind(0)[i] for i in a]),
        ORDER,
        BACK,
        SWAPPED,
        TWICE,
    )
    yield from _pairs(
        "stack of indexed", lambda h, a: torch.stack([h[i, :] for i in a]), ORDER, BACK
    )
    yield from _pairs("stack along", lambda h, a: torch.stack([h, h.cos()], a).sum(-1), 3, 1, 0)
    yield from _pairs("stack of other cuts", lambda h, a: torch.stack(h.unbind(a), a and 0), 0, 1)
    yield from _pairs(
        "hstack", lambda h, a: torch.hstack([h[:, i : i + 1] for i in a]), ORDER, BACK
    )
    yield from _pairs("vstack", lambda h, a: torch.vstack([h[i : i + 1] for i in a]), ORDER, BACK)
    yield from _pairs("dstack", lambda h, a: torch.dstack([h[i] for i in a]), ORDER, BACK)
    yield from _pairs(
        "pad", lambda h, a: F.pad(h, a), [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, -1], [0, 0, 1, -1]
    )
    yield from _pairs(
        "pad of tuples",
        lambda h, a: F.pad(h, a),
        (0, 0, 0, 0, 0, 0),
        (0, 0, 0, 0, -1, 1),
        (1, -1, 0, 0),
    )
    yield from _pairs("circular pad", lambda h, a: F.pad(h, a, mode="circular"), (0, 0), (1, -1))
    yield from _pairs(
        "constant_pad_nd",
        lambda h, a: torch.constant_pad_nd(h, a),
        (0, 0, 0, 0, 0, 0),
        (0, 0, 0, 0, 2, -2),
    )
    yield from _pairs(
        "split", lambda h, a: h.flatten(0, 1).split(a)[1], [4, 4, 8], [3, 4, 9], [8, 4, 4]
    )
    yield from _pairs(
        "split and sum",
        lambda h, a: torch.stack([y.sum(0) for y in h.flatten(0, 1).split(a)]),
        [4, 4, 4, 4],
        [2, 6, 3, 5],
        [1, 1, 1, 13],
    )
    yield from _pairs("split_with_sizes", lambda h, a: h.split_with_sizes(a)[0], [2, 2], [2, 1, 1])
    yield from _pairs(
        "tensor_split",
        lambda h, a: torch.stack([y.sum(0) for y in h.flatten(0, 1).tensor_split(a)]),
        (4, 8, 12),
        (2, 9, 12),
    )
    yield from _pairs(
        "tensor_split by a tensor",
        lambda h, a: torch.stack([y.sum(0) for y in h.flatten(0, 1).tensor_split(a)]),
        _index(4, 8, 12),
        _index(2, 9, 12),
    )
    yield from _pairs("chunk", lambda h, a: h.chunk(*a)[0], (2, 2), (2, 1), (2, 0))
    yield from _pairs(
        "chunks in order", lambda h, a: torch.cat([h.chunk(4)[i] for i in a]), ORDER, BACK, SWAPPED
    )
    yield from _pairs("unbind", lambda h, a: h.unbind(a)[1], 1, 0, 2)
    yield from _pairs(
        "pad_sequence",
        lambda h, a: rnn.pad_sequence(h.flatten(0, 1).split(a), batch_first=True).sum(1),
        [4, 4, 4, 4],
        [4, 2, 4, 6],
    )
    yield from _pairs("block_diag", lambda h, a: torch.block_diag(*[h[i] for i in a]), ORDER, BACK)
    yield from _pairs(
        "meshgrid", lambda h, a: torch.meshgrid(h[:, 0, 0], h[:, 1, 0], indexing=a)[0], "ij", "xy"
    )
    yield from _pairs(
        "tensordot",
        lambda h, a: torch.tensordot(h, irregular(4, 4), a),
        ([2], [0]),
        ([1], [0]),
        ([0], [0]),
    )


def indexing() -> Iterator[Pair]:
    """What picks by indices and masks."""
    take = ORDERS[0], *ORDERS[1:]
    yield from _pairs("index", lambda h, a: h[a], *take)
    yield from _pairs("index by a list", lambda h, a: h[a], ORDER, BACK, TWICE)
    yield from _pairs("index by a tuple", lambda h, a: h[(a, slice(None))], *take)
    yield from _pairs("index of the second", lambda h, a: h[:, a], *take)
    yield from _pairs("index behind dots", lambda h, a: h[..., a, :], *take)
    yield from _pairs(
        "index of both",
        lambda h, a: h[a[0], a[1]],
        (ORDERS[0], ORDERS[1]),
        (ORDERS[1], ORDERS[0]),
        (ORDERS[2], ORDERS[1]),
    )
    yield from _pairs(
        "index of both and a slice",
        lambda h, a: h[a[0], :, a[1]],
        (ORDERS[0], ORDERS[1]),
        (ORDERS[1], ORDERS[1]),
    )
    yield from _pairs("index broadcast", lambda h, a: h[a[:, None], ORDERS[0]], *take)
    yield from _pairs(
        "slice", lambda h, a: h[a], slice(0, 2), slice(2, 4), slice(0, 4, 2), slice(1, 3)
    )
    yield from _pairs(
        "slices",
        lambda h, a: h[a],
        (slice(None), slice(0, 2)),
        (slice(0, 2), slice(None)),
        (slice(None), slice(2, 4)),
    )
    yield from _pairs("number", lambda h, a: h[a], (slice(None), 0), (0,), (slice(None), 1), 2)
    yield from _pairs("dots", lambda h, a: h[a], (..., 0), (0, ...), (slice(None), 0, ...))
    yield from _pairs(
        "new dimension",
        lambda h, a: h[a].sum(0 if a[0] is None else 1),
        (None, slice(None)),
        (slice(None), None),
    )
    yield from _pairs(
        "mask of some",
        lambda h, a: h[a],
        *(torch.tensor(m) for m in ([1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1])),
    )
    masks = [torch.ones(4, 4), torch.ones(4, 4).tril(1), torch.eye(4) + torch.eye(4).flip(0)]
    yield from _pairs(
        "boolean mask",
        lambda h, a: h[a],
        *(torch.tensor(m, dtype=torch.bool) for m in ([1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1])),
    )
    half = [torch.zeros(4, 4, dtype=torch.bool) for _ in range(3)]
    half[0][:, :2], half[1][:2], half[2][:, ::2] = True, True, True
    half[2][0], half[2][1] = True, False
    yield from _pairs("mask of positions", lambda h, a: h[a].view(4, 2, 4), *half)
    yield from _pairs(
        "masked_select", lambda h, a: h.masked_select(a.unsqueeze(2)).view(4, 8), *half
    )
    yield from _pairs(
        "masked_select of the tail",
        lambda h, a: torch.masked_select(h.sum(2), a).view(4, 2).sum(1),
        *half,
    )
    yield from _pairs("nonzero", lambda h, a: h[a.nonzero(as_tuple=True)].view(4, 2, 4), *half)
    del masks
    yield from _pairs("index_select", lambda h, a: h.index_select(0, a), *take)
    yield from _pairs("index_select along", lambda h, a: h.index_select(a, ORDERS[2]), 2, 0, 1)
    yield from _pairs(
        "take",
        lambda h, a: h.take(a),
        torch.arange(64).view(4, 16),
        torch.arange(64).flip(0).view(4, 16),
        torch.arange(64).view(16, 4).T,
    )
    for dim in (0, 1):
        index = tuple(_along(each, dim) for each in (ORDER, BACK, SWAPPED, TWICE))
        yield from _pairs(f"gather {dim}", lambda h, a, dim=dim: h.gather(dim, a), *index)
        yield from _pairs(
            f"take_along_dim {dim}", lambda h, a, dim=dim: torch.take_along_dim(h, a, dim), *index
        )
    yield from _pairs(
        "gather of the last",
        lambda h, a: h.gather(*a),
        (2, _along(TWICE, 2)),
        (1, _along(TWICE, 2)),
        (0, _along(TWICE, 2)),
    )
    yield from _pairs("embedding", lambda h, a: F.embedding(a, h.flatten(1)), *take)
    yield from _pairs("argsort of an argument", lambda h, a: h[a.argsort()], *take)
    yield from _pairs(
        "embedding_bag offsets",
        lambda h, a: F.embedding_bag(torch.arange(16), h.flatten(0, 1), a, mode="sum"),
        _index(0, 4, 8, 12),
        _index(0, 2, 9, 12),
        _index(0, 1, 2, 3),
    )
    yield from _pairs(
        "embedding_bag",
        lambda h, a: F.embedding_bag(a, h.flatten(0, 1), mode="mean"),
        torch.arange(16).view(4, 4),
        torch.arange(16).view(4, 4).T.contiguous(),
        torch.arange(16).flip(0).view(4, 4),
    )


def scattering() -> Iterator[Pair]:
    """What adds or copies to places that an index gives."""
    zeros = lambda h: h.new_zeros(CUBE)  # noqa: E731
    index = tuple(ORDERS)
    for name in ("index_add", "index_copy"):
        yield from _pairs(
            name, lambda h, a, name=name: getattr(zeros(h), name)(0, a, h), *index[:3]
        )
        yield from _pairs(
            f"{name} of itself", lambda h, a, name=name: getattr(h, name)(0, a, h.cos()), *index[:3]
        )
        yield from _pairs(
            f"{name}_",
            lambda h, a, name=name: getattr(h.clone(), name + "_")(0, a, h.cos()),
            *index[:3],
        )
        yield from _pairs(
            f"{name} along", lambda h, a, name=name: getattr(h, name)(a, ORDERS[1], h.cos()), 2, 0
        )
    for mode in ("prod", "mean", "amax"):
        yield from _pairs(
            f"index_reduce {mode}",
            lambda h, a, mode=mode: h.index_reduce(0, a, h.cos(), mode),
            *index,
        )
    along = tuple(_along(each, 0) for each in (ORDER, BACK, SWAPPED, TWICE))
    yield from _pairs("scatter", lambda h, a: h.scatter(0, a, h.cos()), *along[:3])
    yield from _pairs("scatter along", lambda h, a: h.scatter(a, along[1], h.cos()), 2, 0)
    yield from _pairs("scatter_", lambda h, a: h.clone().scatter_(0, a, h.cos()), *along[:3])
    yield from _pairs("scatter_add", lambda h, a: zeros(h).scatter_add(0, a, h), *along)
    yield from _pairs(
        "scatter_add by name", lambda h, a: zeros(h).scatter_add(dim=0, index=a, src=h), *along
    )
    for mode in ("sum", "mean", "amax"):
        yield from _pairs(
            f"scatter_reduce {mode}",
            lambda h, a, mode=mode: zeros(h).scatter_reduce(0, a, h, mode, include_self=False),
            *along,
        )
    yield from _pairs("index_put", lambda h, a: zeros(h).index_put((a,), h), *index[:3])
    yield from _pairs(
        "index_put added", lambda h, a: zeros(h).index_put((a,), h, accumulate=True), *index
    )
    yield from _pairs("index_put_", lambda h, a: h.clone().index_put_((a,), h.cos()), *index[:3])
    yield from _pairs(
        "put",
        lambda h, a: zeros(h).put(a, h),
        torch.arange(64).view(CUBE),
        torch.arange(64).flip(0).view(CUBE),
    )
    yield from _pairs(
        "select_scatter", lambda h, a: h.select_scatter(h[:, 0].cos(), *a), (1, 0), (0, 0), (1, 2)
    )
    yield from _pairs(
        "slice_scatter", lambda h, a: h.slice_scatter(h[:2].cos(), 0, a, a + 2), 0, 2, 1
    )
    yield from _pairs(
        "diagonal_scatter",
        lambda h, a: h.diagonal_scatter(h.diagonal(0, 1, 2).cos(), *a),
        (0, 1, 2),
        (0, 0, 1),
    )
    mask = torch.zeros(CUBE, dtype=torch.bool)
    first, second = mask.clone(), mask.clone()
    first[:, 0], second[0] = True, True
    yield from _pairs(
        "masked_scatter", lambda h, a: h.masked_scatter(a, h.cos()), ~mask, second, first
    )


def writing() -> Iterator[Pair]:
    """Assignments in place."""

    def assign(h: Tensor, a: Any) -> Tensor:
        y = h.clone()
        y[a[0]] = h[a[1]].cos()
        return y

    def add(h: Tensor, a: Any) -> Tensor:
        y = h * 1
        y[a[0]] += h[a[1]].cos()
        return y

    def fill(h: Tensor, a: Any) -> Tensor:
        y = h.new_zeros(CUBE)
        y[a] = h
        return y

    def copy(h: Tensor, a: Any) -> Tensor:
        y = h.clone()
        y[a[0]].copy_(h[a[1]].cos())
        return y

    low, high, middle = slice(0, 2), slice(2, 4), slice(1, 3)
    for name, write in (("assign", assign), ("add", add), ("copy", copy)):
        yield from _pairs(f"{name} in place", write, (low, low), (high, low), (low, middle))
        yield from _pairs(f"{name} one in place", write, (0, 0), (0, 1), (3, 0))
        yield from _pairs(
            f"{name} columns in place",
            write,
            ((slice(None), low), (slice(None), low)),
            ((low, slice(None)), (high, slice(None))),
        )
    yield from _pairs(
        "assign by an index",
        assign,
        (ORDERS[0], ORDERS[0]),
        (ORDERS[1], ORDERS[0]),
        (ORDERS[0], ORDERS[2]),
    )
    yield from _pairs("fill by an index", fill, *ORDERS[:3])
    yield from _pairs("fill by a list", fill, ORDER, BACK, SWAPPED)
    yield from _pairs("fill by a step", fill, slice(None), (slice(None), ORDERS[1]), ORDERS[1])
    rows = [torch.tensor(m, dtype=torch.bool) for m in ([0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1])]
    first_row = lambda h: h[:1].cos()  # noqa: E731

    def masked(h: Tensor, a: Any) -> Tensor:
        y = h.clone()
        y[a] = first_row(h).expand(int(a.sum()), 4, 4)
        return y

    yield from _pairs("assign by a mask", masked, *rows)
    yield from _pairs("swap in place", _swapped, (0, 0), (0, 1), (2, 3))
    yield from _pairs("transpose_", lambda h, a: h.clone().transpose_(*a), (1, 1), (0, 1), (0, 2))
    yield from _pairs("squeeze_", lambda h, a: h.clone().unsqueeze_(a).sum(a and 1), 0, 1)
    yield from _pairs("copy_", lambda h, a: torch.empty_like(h).copy_(h.roll(a, 0)), 0, 1)
    yield from _pairs("out of a list", lambda h, a: _listed(h, a), ORDER, BACK, SWAPPED)


def _swapped(h: Tensor, a: tuple[int, int]) -> Tensor:
    y = h.clone()
    first, second = h[a[0]].clone(), h[a[1]].clone()
    y[a[0]], y[a[1]] = second, first
    return y


def _listed(h: Tensor, order: list[int]) -> Tensor:
    y = h.new_zeros(CUBE)
    for place, sample in enumerate(order):
        y[place] = h[sample]
    return y


SORTED = torch.tensor([4.0, 3.0, 2.0, 1.0]).view(4, 1, 1) * 3


def selecting() -> Iterator[Pair]:
    """What selects by values: a constant puts the samples in an order, and then in another."""
    orders = tuple(SORTED[i] for i in (ORDER, BACK, SWAPPED))
    along = tuple(SORTED.transpose(0, 1) + 0 * SORTED[i] for i in (ORDER, BACK))
    selections: dict[str, Operator] = {
        "sort": lambda h, d: h.sort(d, descending=True)[0],
        "stable sort": lambda h, d: torch.sort(h, dim=d, descending=True, stable=True).values,
        "msort": lambda h, d: torch.msort(h) if d == 0 else h.sort(d)[0],
        "topk": lambda h, d: h.topk(2, d)[0],
        "smallest topk": lambda h, d: h.topk(2, d, largest=False)[0],
        "max": lambda h, d: h.max(d)[0],
        "min": lambda h, d: h.min(d).values,
        "amax": lambda h, d: h.amax(d),
        "amin": lambda h, d: h.amin(d),
        "aminmax": lambda h, d: torch.aminmax(h, dim=d)[1],
        "median": lambda h, d: h.median(d)[0],
        "nanmedian": lambda h, d: h.nanmedian(d)[0],
        "mode": lambda h, d: h.mode(d)[0],
        "kthvalue": lambda h, d: h.kthvalue(2, d)[0],
        "quantile": lambda h, d: h.quantile(0.4, d),
        "cummax": lambda h, d: h.cummax(d)[0],
        "cummin": lambda h, d: h.cummin(d)[0],
        "argsort": lambda h, d: h.take_along_dim(h.argsort(d), d),
        "argmax": lambda h, d: h.take_along_dim(h.argmax(d, keepdim=True), d),
        "argsort of one": lambda h, d: h[h[:, 0, 0].argsort()] if d == 0 else h,
        "logcumsumexp": lambda h, d: h.logcumsumexp(d),
        "logsumexp": lambda h, d: h.logsumexp(d),
        "maximum of neighbours": lambda h, d: torch.maximum(h, h.roll(1, d)),
        "minimum of neighbours": lambda h, d: torch.minimum(h, h.roll(1, d)),
        "where larger": lambda h, d: torch.where(h > h.roll(1, d), h, h.roll(1, d)),
        "clamp by neighbours": lambda h, d: h.clamp(min=h.roll(1, d)),
        "relu of a distance": lambda h, d: (h - h.roll(1, d)).relu() + h.square(),
        "selected by a mask": lambda h, d: h[h[:, 0, 0].detach() > 7] if d == 0 else h,
    }
    for name, select in selections.items():
        yield from _pairs(name, lambda h, a, select=select: select(h + a, 0), *orders)
        yield from _pairs(
            f"{name} of the second", lambda h, a, select=select: select(h + a, 1), *along
        )
        yield from _pairs(f"{name} along", lambda h, a, select=select: select(h, a), 2, 0, 1)
    losses = torch.tensor([9.0, 6.0, 3.0, 0.0])
    mined: dict[str, Operator] = {
        "hard examples": lambda h, _: h.topk(2)[0],
        "trimmed losses": lambda h, _: h.sort()[0][1:3],
        "worst of all": lambda h, _: h.max().expand(2),
        "value at risk": lambda h, _: h[h >= h.detach().quantile(0.6)],
        "sorted losses": lambda h, _: h.sort(descending=True)[0],
        "ranked losses": lambda h, _: h[h.argsort(descending=True)],
        "top of places": lambda h, _: h[h.topk(2).indices],
        "selected losses": lambda h, _: h.masked_select(h > h.detach().median()),
    }
    for name, mine in mined.items():
        constants = [losses[i] for i in (ORDER, BACK, SWAPPED)]
        yield from _pairs(name, lambda h, a, mine=mine: mine(h.sum((1, 2)) + a, a), *constants)


def reducing() -> Iterator[Pair]:
    """What reduces over dimensions that are arguments."""
    dims = ((2,), (1,), (0,), (0, 1), (1, 2))
    for name in ("sum", "mean", "std", "var", "amax", "logsumexp", "norm", "nansum"):

        def reduce(h: Tensor, a: Any, name: str = name) -> Tensor:
            if name == "norm":
                return torch.linalg.vector_norm(h, dim=a)
            return getattr(h, name)(a)

        yield from _pairs(f"{name} of tuples", reduce, *dims)
        yield from _pairs(f"{name} of lists", reduce, *[list(each) for each in dims])
    for name in (
        "sum",
        "mean",
        "prod",
        "cumsum",
        "cumprod",
        "softmax",
        "log_softmax",
        "logcumsumexp",
        "std",
        "var",
        "argsort",
    ):

        def along(h: Tensor, a: Any, name: str = name) -> Tensor:
            y = getattr(h, name)(a)
            return y if y.is_floating_point() else h.take_along_dim(y, a)

        yield from _pairs(f"{name} of numbers", along, 2, 1, 0)
    yield from _pairs(
        "mean by name",
        lambda h, a: torch.mean(h, **a),
        {"dim": (2,)},
        {"dim": (0,)},
        {"dim": [1], "keepdim": False},
    )
    yield from _pairs("normalize", lambda h, a: F.normalize(h, dim=a), 2, 1, 0)
    yield from _pairs(
        "layer_norm", lambda h, a: F.layer_norm(h.permute(a), (4,)), (0, 1, 2), (1, 2, 0)
    )
    yield from _pairs("group_norm", lambda h, a: F.group_norm(h, a), 1, 2, 4)
    yield from _pairs(
        "batch_norm",
        lambda h, a: F.batch_norm(h, torch.zeros(4), torch.ones(4), training=a),
        False,
        True,
    )
    yield from _pairs("instance_norm", lambda h, a: F.instance_norm(h.transpose(0, a)), 0, 1)
    yield from _pairs("unique places", lambda h, a: h - h.mean(a, keepdim=True), (2,), (0,), (1,))
    yield from _pairs("glu", lambda h, a: F.glu(h, a).sum(-1), 2, 1, 0)
    yield from _pairs("diff", lambda h, a: h.diff(dim=a), 2, 0, 1)
    yield from _pairs(
        "cross", lambda h, a: torch.linalg.cross(h[:3, :3, :3], h[:3, :3, :3].cos(), dim=a), 2, 0, 1
    )
    yield from _pairs(
        "cosine_similarity", lambda h, a: F.cosine_similarity(h, h.cos().roll(1, 2), dim=a), 2, 0, 1
    )
    yield from _pairs("fft", lambda h, a: torch.fft.fft(h, dim=a), 2, 0, 1)
    yield from _pairs("fftn", lambda h, a: torch.fft.fftn(h, dim=a), (1, 2), (0, 2))
    yield from _pairs("fftshift", lambda h, a: torch.fft.fftshift(h, dim=a), (2,), (0,), (1,))
    yield from _pairs(
        "trace", lambda h, a: h.diagonal(dim1=a[0], dim2=a[1]).sum(-1), (1, 2), (0, 2)
    )


def products() -> Iterator[Pair]:
    """Products with itself and with constants, by equations and dimensions."""
    yield from _pairs(
        "einsum of two",
        lambda h, a: torch.einsum(a, h, h.cos()),
        "abc,abc->abc",
        "abc,bac->abc",
        "abc,dbc->adb",
        "abc,abd->acd",
    )
    yield from _pairs("matmul of itself", lambda h, a: h @ h.cos().transpose(*a), (1, 2), (0, 1))
    yield from _pairs("bmm", lambda h, a: torch.bmm(h, h.cos().permute(a)), (0, 1, 2), (1, 0, 2))
    yield from _pairs(
        "add of moved", lambda h, a: h + h.cos().permute(a), (0, 1, 2), (1, 0, 2), (0, 2, 1)
    )
    yield from _pairs(
        "product with rolled",
        lambda h, a: h * h.cos().roll(*a),
        ((0,), (0,)),
        ((1,), (0,)),
        ((1,), (1,)),
    )
    yield from _pairs("outer", lambda h, a: h[:, :, None] * h.cos().unsqueeze(a), 2, 1, 0)
    yield from _pairs("lerp", lambda h, a: h.lerp(h.roll(1, 0).cos(), a), 0.0, 0.5, 1.0)
    yield from _pairs(
        "add with a factor", lambda h, a: torch.add(h, h.roll(1, 0).cos(), alpha=a), 0, 1, 2.0
    )
    yield from _pairs("addcmul", lambda h, a: h.addcmul(h.cos(), h.roll(1, 0), value=a), 0, 1, 0.3)
    yield from _pairs(
        "addmm", lambda h, a: torch.addmm(h, irregular(4, 4), h.cos(), alpha=a), 0, 1, shape=(4, 4)
    )
    yield from _pairs("baddbmm", lambda h, a: torch.baddbmm(h, h.cos(), h.sin(), beta=a), 1, 0)
    yield from _pairs("cdist", lambda h, a: torch.cdist(h, h.cos(), p=a), 2.0, 1.0)
    yield from _pairs("times a flag", lambda h, a: h + a * h.mean(0), False, True)
    yield from _pairs("times a number", lambda h, a: a * h + (1 - a) * h.mean(0), 1.0, 0.5, 0.25)
    yield from _pairs("masked mean", lambda h, a: a * h + (1 - a) * h.mean(1, True), 1.0, 0.5)


def _one_hot(places: Any, count: int = 4) -> Tensor:
    return F.one_hot(torch.as_tensor(places), count).to(torch.get_default_dtype())


def constants() -> Iterator[Pair]:
    """What multiplies, masks or chooses by constants that are tensors."""
    one_hots = [_one_hot(each) for each in (ORDER, BACK, SWAPPED, TWICE)]
    mixed = torch.full((4, 4), 0.25)
    yield from _pairs(
        "matmul on the left", lambda h, a: torch.einsum("st,tbc->sbc", a, h), *one_hots, mixed
    )
    yield from _pairs("product on the left", lambda h, a: a @ h, *one_hots, mixed)
    yield from _pairs("mm on the left", lambda h, a: a.mm(h), *one_hots, mixed, shape=(4, 4))
    yield from _pairs(
        "addmm on the left", lambda h, a: torch.addmm(h.cos(), a, h), *one_hots, mixed, shape=(4, 4)
    )
    yield from _pairs(
        "bmm on the left", lambda h, a: a.expand(4, 4, 4).bmm(h.transpose(0, 1)), *one_hots, mixed
    )
    yield from _pairs(
        "sparse.mm", lambda h, a: torch.sparse.mm(a.to_sparse(), h), *one_hots, mixed, shape=(4, 4)
    )
    yield from _pairs("one_hot", lambda h, a: _one_hot(a).T @ h.flatten(1), *ORDERS)
    yield from _pairs("one_hot of losses", lambda h, a: _one_hot(a).T @ h.sum((1, 2)), *ORDERS)
    yield from _pairs(
        "groups of losses",
        lambda h, a: _one_hot(a, 2).T @ h.flatten(0, 1),
        torch.arange(16) // 8,
        torch.arange(16) % 2,
    )
    yes, no = torch.ones(4, dtype=torch.bool), torch.tensor([True, False, True, False])
    column = lambda m: m.view(4, 1, 1)  # noqa: E731
    full, some = column(yes), column(no)
    yield from _pairs(
        "where", lambda h, a: torch.where(a, h, h.roll(1, 0)), full, some, ~some, ~full
    )
    yield from _pairs(
        "where of positions", lambda h, a: torch.where(a.view(1, 4, 1), h, h.roll(1, 1)), full, some
    )
    yield from _pairs("where method", lambda h, a: h.where(a, h.flip([0])), full, some)
    yield from _pairs(
        "masked_fill",
        lambda h, a: h.masked_fill(~a, 0) + (h.roll(1, 0)).masked_fill(a, 0),
        full,
        some,
        ~full,
    )
    yield from _pairs(
        "masked_fill_", lambda h, a: h.clone().masked_fill_(~a, 0).cumsum(0), some, full
    )
    yield from _pairs("times a mask", lambda h, a: h * a + h.mean(0) * ~a, full, some)
    yield from _pairs(
        "times a weight",
        lambda h, a: a * h + (1 - a) * h.mean(0),
        torch.tensor(1.0),
        torch.tensor(0.5),
    )
    yield from _pairs(
        "lerp by a tensor",
        lambda h, a: h.lerp(h.mean(0, keepdim=True).expand(CUBE), a),
        torch.zeros(4, 1, 1),
        torch.full((4, 1, 1), 0.5),
    )
    yield from _pairs(
        "mixup",
        lambda h, a: a[0] * h + (1 - a[0]) * h[a[1]],
        (torch.tensor(1.0), ORDERS[0]),
        (torch.tensor(0.7), ORDERS[1]),
    )
    own = torch.arange(16).view(4, 4) // 4 == torch.arange(4)[:, None]
    shuffled = torch.tensor([0, 1, 1, 0, 2, 3, 3, 2, 1, 0, 2, 3, 3, 2, 0, 1])
    pool = lambda h, a: torch.stack(  # noqa: E731
        [torch.where((a == i).unsqueeze(1), h.flatten(0, 1), 0).sum(0) for i in range(4)]
    )
    del own
    ids = torch.arange(16) // 4, shuffled, torch.tensor([0] * 7 + [1] * 2 + [2] * 3 + [3] * 4)
    yield from _pairs("pooled by where", pool, *ids)
    yield from _pairs(
        "pooled by masked_fill",
        lambda h, a: torch.stack(
            [h.flatten(0, 1).masked_fill((a != i).unsqueeze(1), 0).mean(0) for i in range(4)]
        ),
        *ids,
    )
    yield from _pairs(
        "pooled by a product",
        lambda h, a: (_one_hot(a).T / _one_hot(a).sum(0).unsqueeze(1)) @ h.flatten(0, 1),
        *ids,
    )
    yield from _pairs(
        "pooled by einsum",
        lambda h, a: torch.einsum("nb,nd->bd", _one_hot(a), h.flatten(0, 1)),
        *ids,
    )
    yield from _pairs(
        "pooled by sparse.mm",
        lambda h, a: torch.sparse.mm(_one_hot(a).T.to_sparse(), h.flatten(0, 1)),
        *ids,
    )
    yield from _pairs(
        "pooled by index_add", lambda h, a: h.new_zeros(4, 4).index_add(0, a, h.flatten(0, 1)), *ids
    )
    yield from _pairs(
        "pooled by scatter",
        lambda h, a: h.new_zeros(4, 4).scatter_add(
            0, a.unsqueeze(1).expand(16, 4), h.flatten(0, 1)
        ),
        *ids,
    )
    yield from _pairs(
        "pooled by maximum",
        lambda h, a: h.new_zeros(4, 4).scatter_reduce(
            0, a.unsqueeze(1).expand(16, 4), h.flatten(0, 1), "amax", include_self=False
        ),
        *ids,
    )
    yield from _pairs("dropout", lambda h, a: F.dropout(h, a) + h, 0.0, 0.5)
    yield from _pairs(
        "dropout mask",
        lambda h, a: h * a + h.roll(1, 0) * (1 - a),
        torch.ones(4, 1, 1),
        torch.tensor([1.0, 0, 0, 1]).view(4, 1, 1),
    )


def segments() -> Iterator[Pair]:
    """Packed samples of equal lengths first, and of other lengths later."""
    lengths = [torch.tensor(each) for each in (EVEN, *RAGGED)]
    numbers = [torch.arange(4).repeat_interleave(each) for each in lengths]
    for mode in ("sum", "mean", "max", "min"):
        yield from _pairs(
            f"segment_reduce {mode}",
            lambda h, a, mode=mode: torch.segment_reduce(h, mode, lengths=a, axis=0),
            *lengths,
            shape=TOKENS,
        )
    offsets = [F.pad(each.cumsum(0), (1, 0)) for each in lengths]
    yield from _pairs(
        "segment_reduce by offsets",
        lambda h, a: torch.segment_reduce(h, "sum", offsets=a, axis=0),
        *offsets,
        shape=TOKENS,
    )
    yield from _pairs(
        "split of packed",
        lambda h, a: torch.stack([y.sum(0) for y in h.split(a)]),
        EVEN,
        *RAGGED,
        shape=TOKENS,
    )
    yield from _pairs("slices of packed", _pooled_slices, EVEN, *RAGGED, shape=TOKENS)
    yield from _pairs("padded from packed", _padded, EVEN, *RAGGED, shape=TOKENS)
    yield from _pairs(
        "differences of sums",
        lambda h, a: F.pad(h.cumsum(0), (0, 0, 1, 0))[a].diff(dim=0),
        *offsets,
        shape=TOKENS,
    )
    yield from _pairs("last of packed", lambda h, a: h[a.cumsum(0) - 1], *lengths, shape=TOKENS)
    yield from _pairs(
        "bags of packed",
        lambda h, a: F.embedding_bag(torch.arange(12), h, a[:-1], mode="sum"),
        *offsets,
        shape=TOKENS,
    )
    yield from _pairs("one_hot of packed", lambda h, a: _one_hot(a).T @ h, *numbers, shape=TOKENS)
    yield from _pairs(
        "index_add of packed",
        lambda h, a: h.new_zeros(4, 3).index_add(0, a, h),
        *numbers,
        shape=TOKENS,
    )
    yield from _pairs(
        "mean of packed",
        lambda h, a: h.new_zeros(4, 3).index_reduce(0, a, h, "mean", include_self=False),
        *numbers,
        shape=TOKENS,
    )
    yield from _pairs("softmax in segments", _segment_softmax, *numbers, shape=TOKENS)
    yield from _pairs(
        "repeated to packed",
        lambda h, a: h[:4].repeat_interleave(a, 0, output_size=12) * h,
        *lengths,
        shape=TOKENS,
    )


def _pooled_slices(h: Tensor, lengths: list[int]) -> Tensor:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return torch.stack([h[e - n : e].mean(0) for n, e in zip(lengths, ends, strict=True)])


def _padded(h: Tensor, lengths: list[int]) -> Tensor:
    y, start = h.new_zeros(4, 5, 3), 0
    for sample, length in enumerate(lengths):
        y[sample, :length] = h[start : start + length]
        start += length
    return y


def _segment_softmax(h: Tensor, numbers: Tensor) -> Tensor:
    score = h[:, 0].exp()
    total = h.new_zeros(4).index_add(0, numbers, score)
    return h.new_zeros(4, 3).index_add(0, numbers, h * (score / total[numbers]).unsqueeze(1))


def attention() -> Iterator[Pair]:
    """Attention under masks: of documents in packed tokens, of padding, and over the samples."""
    lengths = [torch.tensor(each) for each in (EVEN, *RAGGED)]
    numbers = [torch.arange(4).repeat_interleave(each) for each in lengths]
    masks = [n.unsqueeze(0) == n.unsqueeze(1) for n in numbers]

    def attend(h: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(h[None], h.cos()[None], h[None], attn_mask=mask)[0]

    def by_hand(h: Tensor, mask: Tensor) -> Tensor:
        return (h @ h.cos().T).masked_fill(~mask, -torch.inf).softmax(1) @ h

    def added(h: Tensor, mask: Tensor) -> Tensor:
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        return (h @ h.cos().T + bias).softmax(1) @ h

    for name, function in (("sdpa", attend), ("eager", by_hand), ("added", added)):
        yield from _pairs(
            f"{name} of documents",
            lambda h, a, f=function: torch.stack([y.sum(0) for y in f(h, a).split(EVEN)]),
            *masks,
            shape=TOKENS,
        )
        yield from _pairs(
            f"{name} of documents, pooled alike",
            lambda h, a, f=function: _one_hot(a).T @ f(h, a[:, None] == a),
            *numbers,
            shape=TOKENS,
        )
        yield from _pairs(
            f"{name} of documents by lengths",
            lambda h, a, f=function: torch.stack([y.mean(0) for y in f(h, _documents(a)).split(a)]),
            EVEN,
            *RAGGED,
            shape=TOKENS,
        )
    eye, causal = torch.eye(4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool).tril()
    everywhere = torch.ones(4, 4, dtype=torch.bool)
    yield from _pairs(
        "sdpa over samples", lambda h, a: attend(h.flatten(1), a), eye, causal, everywhere
    )
    yield from _pairs(
        "eager over samples", lambda h, a: by_hand(h.flatten(1), a), eye, causal, everywhere
    )
    yield from _pairs(
        "sdpa over positions",
        lambda h, a: F.scaled_dot_product_attention(h, h.cos(), h, attn_mask=a),
        everywhere,
        causal,
        eye,
    )
    yield from _pairs(
        "causal sdpa",
        lambda h, a: F.scaled_dot_product_attention(h, h.cos(), h, is_causal=a),
        False,
        True,
    )
    yield from _pairs(
        "sdpa of moved",
        lambda h, a: F.scaled_dot_product_attention(*[h.permute(a)] * 3),
        (0, 1, 2),
        (1, 0, 2),
    )
    padded = [torch.arange(4) < torch.tensor(n)[:, None] for n in ([4, 4, 4, 4], [4, 2, 1, 3])]
    yield from _pairs(
        "padded sdpa",
        lambda h, a: F.scaled_dot_product_attention(h, h.cos(), h, attn_mask=a[:, None]),
        *padded,
    )
    yield from _pairs(
        "mean of what is not padded",
        lambda h, a: (h * a.unsqueeze(2)).sum(1) / a.sum(1, True),
        *padded,
    )
    yield from _pairs(
        "mean of what is not padded, moved", lambda h, a: (h * a.unsqueeze(2)).sum(0) / 4, *padded
    )


def _documents(lengths: list[int]) -> Tensor:
    numbers = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    return numbers[:, None] == numbers


def recurrent() -> Iterator[Pair]:
    """Packed sequences, and recurrences over other dimensions."""
    full, ragged, sorted_ = [4, 4, 4, 4], [2, 4, 1, 3], [4, 3, 2, 1]

    def pack(h: Tensor, lengths: Any) -> Any:
        return rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)

    yield from _pairs(
        "pack and pad",
        lambda h, a: rnn.pad_packed_sequence(pack(h, a), True, total_length=4)[0],
        full,
        ragged,
        sorted_,
    )
    yield from _pairs(
        "pack, data only", lambda h, a: pack(h, a).data[:8], full, ragged, [3, 3, 3, 3]
    )
    yield from _pairs(
        "pack by a tensor",
        lambda h, a: rnn.pad_packed_sequence(pack(h, a), True, total_length=4)[0],
        *(torch.tensor(each) for each in (full, ragged, sorted_)),
    )
    yield from _pairs(
        "unpack",
        lambda h, a: torch.stack([y.sum(0) for y in rnn.unpack_sequence(pack(h, a))]),
        full,
        ragged,
        sorted_,
    )
    yield from _pairs("running sum", _running, 1, 0)
    yield from _pairs("recurrence by hand", _recurrence, (0, 1, 2), (1, 0, 2))


def _running(h: Tensor, dim: int) -> Tensor:
    state, states = torch.zeros(()), []
    for part in h.unbind(dim):
        state = (state + part).tanh()
        states.append(state)
    return torch.stack(states, dim)


def _recurrence(h: Tensor, order: tuple[int, ...]) -> Tensor:
    weight = irregular(4, 4)
    state = h.new_zeros(4, 4)
    for part in h.permute(order).unbind(1):
        state = (state @ weight + part).tanh()
    return state


def spatial() -> Iterator[Pair]:
    """Pooling, interpolation and convolution over the samples."""
    yield from _pairs(
        "max_pool1d", lambda h, a: F.max_pool1d(h.permute(a), 2), (0, 1, 2), (1, 2, 0)
    )
    yield from _pairs(
        "max_pool2d", lambda h, a: F.max_pool2d(h[None], a)[0].sum(-1), (1, 1), (2, 1)
    )
    yield from _pairs(
        "max_pool2d over samples",
        lambda h, a: F.max_pool2d(h.permute(2, 0, 1)[None], a, stride=1)[0],
        (1, 2),
        (2, 1),
        (2, 2),
    )
    yield from _pairs(
        "avg_pool2d over samples",
        lambda h, a: F.avg_pool2d(h.permute(2, 0, 1)[None], a, stride=1)[0],
        (1, 2),
        (2, 1),
    )
    yield from _pairs(
        "max_pool2d with padding",
        lambda h, a: F.max_pool2d(h.permute(2, 0, 1)[None], (3, 1), (1, 1), a)[0],
        (1, 0),
        (0, 0),
    )
    yield from _pairs(
        "adaptive_avg_pool2d",
        lambda h, a: F.adaptive_avg_pool2d(h.permute(2, 0, 1)[None], a)[0],
        (4, 2),
        (2, 4),
    )
    yield from _pairs(
        "interpolate",
        lambda h, a: F.interpolate(h.permute(2, 0, 1)[None], a, mode="nearest")[0],
        (4, 2),
        (2, 4),
    )
    yield from _pairs(
        "conv over samples",
        lambda h, a: F.conv1d(h.permute(1, 2, 0), irregular(4, 4, a), padding=a // 2),
        1,
        3,
    )
    yield from _pairs(
        "constant kernel",
        lambda h, a: F.conv1d(h.permute(1, 2, 0), a.expand(4, 4, 3), padding=1),
        torch.tensor([0.0, 1, 0]),
        torch.tensor([1.0, 0, 0]),
        torch.tensor([1.0, 1, 1]),
    )
    yield from _pairs(
        "dilated kernel",
        lambda h, a: F.conv1d(h.permute(a), irregular(4, 4, 3), padding=1),
        (0, 1, 2),
        (1, 2, 0),
    )
    identity = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    yield from _pairs(
        "grid_sample",
        lambda h, a: F.grid_sample(
            h.permute(2, 0, 1)[None],
            F.affine_grid(a[None], (1, 4, 4, 4), align_corners=True),
            align_corners=True,
        )[0],
        identity,
        identity * torch.tensor([[1.0], [-1.0]]),
        identity.flip(0),
    )
    yield from _pairs("im2col", lambda h, a: F.unfold(h[:, None], a), (4, 1), (1, 4))


def control() -> Iterator[Pair]:
    """The same calls, wired or ordered otherwise."""
    yield from _pairs(
        "which of two", lambda h, a: (h.roll(1, 0) if a else h).cos() + 0 * h, False, True
    )
    yield from _pairs("wired otherwise", _wired, 0, 1, 2)
    yield from _pairs("other halves", lambda h, a: h[:2] * 2 if a else h[2:] * 2, False, True)
    yield from _pairs("which is added", lambda h, a: _pair_of(h, a), (0, 0), (1, 0), (1, 1))
    yield from _pairs("order of calls", _in_order, (0, 1), (1, 0))
    yield from _pairs(
        "a loop over samples",
        lambda h, a: torch.stack([h[i].tanh() for i in a]),
        ORDER,
        BACK,
        TWICE,
    )
    yield from _pairs(
        "a dictionary",
        lambda h, a: torch.stack([{k: h[k] for k in range(4)}[i] for i in a]),
        ORDER,
        BACK,
    )
    yield from _pairs(
        "checkpointed",
        lambda h, a: torch.utils.checkpoint.checkpoint(
            lambda y: y.roll(a, 0).cos(), h, use_reentrant=False
        ),
        (0,),
        (1,),
    )
    yield from _pairs("vmap", lambda h, a: torch.func.vmap(lambda y: y.cos(), a)(h), 0, 1)
    yield from _pairs("vmap out", lambda h, a: torch.func.vmap(lambda y: y.cos(), 0, a)(h), 0, 1)
    yield from _pairs("a custom function", lambda h, a: _Moved.apply(h, a), 0, 1)
    yield from _pairs(
        "a custom function by an index", lambda h, a: _Picked.apply(h, a), *ORDERS[:3]
    )
    yield from _pairs("a custom function by a dimension", lambda h, a: _Summed.apply(h, a), 1, 0)


class _Moved(torch.autograd.Function):
    """Moves samples by a number that only the context holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: int) -> Tensor:
        ctx.shift = shift
        return x.roll(shift, 0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.roll(-ctx.shift, 0), None


class _Picked(torch.autograd.Function):
    """Picks samples by a tensor that is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x[index]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(g).index_add(0, *ctx.saved_tensors, g), None


class _Summed(torch.autograd.Function):
    """Takes the running sum along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x.cumsum(dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim), None


def _wired(h: Tensor, number: int) -> Tensor:
    moved = h.roll(1, 0)
    results = [h.cos(), moved.sin()]
    return [results[0] + 0 * results[1], results[1], results[0] + results[1]][number]


def _pair_of(h: Tensor, a: tuple[int, int]) -> Tensor:
    options = [h.sin(), h.roll(1, 0).cos()]
    return options[a[0]] * options[a[1]]


def _in_order(h: Tensor, order: tuple[int, int]) -> Tensor:
    for number in order:
        h = h.roll(1, 0) * irregular(4, 1, 1) if number else h.cumsum(1)
    return h
