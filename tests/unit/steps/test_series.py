"""What decides where samples are changes between steps: right on the tenth step as on the first.

Each series begins with arguments that leave the samples in place.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.checks import irregular
from tests.unit.engines import mlp, per_sample
from tests.unit.series import (
    BATCH_DIMS,
    CALLS,
    MAY_BE_COUPLED,
    PLACES,
    Operator,
    assert_series_is_exact,
)

pytestmark = MAY_BE_COUPLED

ORDER, BACK, SWAPPED, TWICE = [0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3], [0, 0, 1, 1]


# Two forward passes with the same calls in one vector of losses.

TOGETHER: dict[str, tuple[Callable[[Tensor, Tensor, Any], Tensor], list[Any]]] = {
    "rolled": (lambda y, z, a: y * z.roll(a, 0), [0, 1, 2]),
    "rolled by tuples": (lambda y, z, a: y * z.roll(a, (0,)), [(0,), (1,)]),
    "flipped": (lambda y, z, a: y + 0.5 * y * z.flip(a), [1, 0]),
    "flipped by lists": (lambda y, z, a: y * z.flip(a), [[1], [0]]),
    "picked": (lambda y, z, a: y * z[torch.tensor(a)], [ORDER, BACK, TWICE]),
    "picked by a list": (lambda y, z, a: y * z[a], [ORDER, BACK]),
    "joined": (lambda y, z, a: y * torch.cat([z[a:], z[:a]]), [0, 1]),
    "stacked": (lambda y, z, a: y * torch.stack([z[i] for i in a]), [ORDER, SWAPPED]),
    "chosen": (lambda y, z, a: y * (z.flip(0) if a else z), [False, True]),
    "first moved": (lambda y, z, a: y.roll(a, 0) * z, [0, 1]),
    "both moved": (lambda y, z, a: y.roll(a, 0) * z.roll(-a, 0), [0, 1]),
    "averaged": (lambda y, z, a: y * (z + a * z.mean(0)), [0.0, 1.0]),
    "transposed": (lambda y, z, a: (y @ z.T).T if a else y @ z.T, [False, True]),
    "negatives": (lambda y, z, a: y @ z.roll(a, 0).T, [0, 1]),
    "exchanged": (lambda y, z, a: z.roll(1, 0) * y if a else y.roll(1, 0) * z, [False, True]),
}


@CALLS
@BATCH_DIMS
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("towers", [1, 2], ids=["one model", "two towers"])
def test_two_forward_passes(name: str, towers: int, batch_dim: Any, fused: bool) -> None:
    """One model twice, or two models, of which one is laid out otherwise."""
    combine, arguments = TOGETHER[name]
    modules = [mlp(3, 4) for _ in range(towers)]
    x, y = irregular(4, 3), irregular(5, 3)[1:].cos()

    def losses_of(argument: Any) -> Tensor:
        return combine(modules[0](x), modules[-1](y), argument).square().sum(1)

    assert_series_is_exact(losses_of, modules, arguments, batch_dim=batch_dim, fused=fused)


@CALLS
@BATCH_DIMS
@pytest.mark.parametrize("layout", ["first", "second", "folded"])
def test_two_layouts_of_one_model(layout: str, batch_dim: Any, fused: bool) -> None:
    """One model is called with samples first, and with samples elsewhere; the shapes agree."""
    model = mlp(3, 4)
    x, y = irregular(4, 4, 3), irregular(4, 4, 3).cos()

    def second(z: Tensor, is_moved: bool) -> Tensor:
        if not is_moved:
            return model(z)
        if layout == "second":
            return model(z.transpose(0, 1)).transpose(0, 1)
        return model(z.roll(1, 0)).roll(-1, 0) if layout == "first" else model(z.flip(0)).flip(0)

    def losses_of(is_moved: bool) -> Tensor:
        return (model(x) * second(y, is_moved) * (1 + is_moved)).sum((1, 2))

    assert_series_is_exact(losses_of, [model], [False, True], batch_dim=batch_dim, fused=fused)


@CALLS
@BATCH_DIMS
def test_passes_in_another_order(batch_dim: Any, fused: bool) -> None:
    """The same calls of two towers, one of which changes places with the other."""
    towers = [mlp(3, 4), mlp(3, 4)]
    x, y = irregular(4, 3), irregular(4, 3).cos()

    def losses_of(is_swapped: bool) -> Tensor:
        first, second = towers[::-1] if is_swapped else towers
        return per_sample(first(x).roll(1, 0) * second(y))

    assert_series_is_exact(losses_of, towers, [False, True], batch_dim=batch_dim, fused=fused)


@CALLS
@BATCH_DIMS
@pytest.mark.parametrize("flags", [(False, True), (True, False)])
def test_wired_otherwise(flags: tuple[bool, bool], batch_dim: Any, fused: bool) -> None:
    """The same calls with the same shapes, of which another result is read."""

    class Wired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, flag: bool) -> Tensor:
            h = self.first(x).tanh()
            z = h.roll(1, 0)
            return self.last(z if flag else h)

    model, x = Wired(), irregular(4, 3)
    assert_series_is_exact(
        lambda flag: per_sample(model(x, flag)), [model], flags, batch_dim=batch_dim, fused=fused
    )


@CALLS
@BATCH_DIMS
def test_shared_modules_in_another_order(batch_dim: Any, fused: bool) -> None:
    """Both orders have the same calls, in front of and behind what moves the samples."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([a, b])
    x = irregular(4, 4)

    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, is_swapped: bool) -> Tensor:
            first, last = (b, a) if is_swapped else (a, b)
            return last(first(x).tanh().roll(1, 0))

    ordered = Ordered()
    assert_series_is_exact(
        lambda is_swapped: per_sample(ordered(x, is_swapped)),
        [ordered],
        [False, True],
        batch_dim=batch_dim,
        fused=fused,
    )


# Arguments inside of containers.

CONTAINERS: dict[str, tuple[Operator, list[Any]]] = {
    "roll": (lambda h, k: h.roll((k,), (0,)), [0, 1, 3]),
    "roll of lists": (lambda h, k: torch.roll(h, [k, 1], [0, 1]), [0, 1]),
    "roll by name": (lambda h, k: torch.roll(h, shifts=(k,), dims=(0,)), [0, 2]),
    "dimension of roll": (lambda h, d: h.roll((1,), (d,)), [1, 0]),
    "flip": (lambda h, d: h.flip([d]), [2, 0, 1]),
    "flip of tuples": (lambda h, d: h.flip((d,)), [1, 0]),
    "flip of nothing": (lambda h, d: h.flip(d), [(), (0,)]),
    "permute": (lambda h, d: h.permute(d), [(0, 1, 2), (1, 0, 2), (2, 1, 0)]),
    "permute by a list": (lambda h, d: torch.permute(h, d), [[0, 2, 1], [1, 2, 0]]),
    "movedim": (lambda h, d: h.movedim((0, 1), d), [(0, 1), (1, 0)]),
    "moveaxis": (lambda h, d: h.moveaxis([0, 2], d), [[0, 2], [2, 0]]),
    "einsum": (lambda h, s: torch.einsum(s, h), ["abc->abc", "abc->bac"]),
    "einsum of two": (lambda h, s: torch.einsum(s, h, h.cos()), ["abc,abc->abc", "abc,bac->bac"]),
    "mean": (lambda h, d: h.mean(d), [(2,), (1,), (0,)]),
    "mean of lists": (lambda h, d: h.mean([d]), [1, 0]),
    "mean by name": (lambda h, d: torch.mean(h, dim=(d,)), [2, 0]),
    "sum": (lambda h, d: h.sum(d), [(1,), (0,)]),
    "largest": (lambda h, d: h.amax(d), [(1,), (0,)]),
    "standardised": (lambda h, d: h - h.mean(d, keepdim=True), [(2,), (0,), (0, 1)]),
    "norm": (lambda h, d: torch.linalg.vector_norm(h, dim=d), [(2,), (0,)]),
    "cat": (lambda h, k: torch.cat([h[k:], h[:k]]), [0, 1, 2]),
    "cat of tuples": (lambda h, k: torch.cat((h[:, k:], h[:, :k]), 1), [0, 1]),
    "cat by order": (lambda h, o: torch.cat([h[i : i + 1] for i in o]), [ORDER, BACK]),
    "stack": (lambda h, o: torch.stack([h[i, :] for i in o]), [ORDER, BACK, SWAPPED]),
    "stack of dots": (lambda h, o: torch.stack([h[i, ...] for i in o]), [ORDER, SWAPPED]),
    "stack of selected": (lambda h, o: torch.stack([h.select(0, i) for i in o]), [ORDER, BACK]),
    "stack of unbound": (lambda h, o: torch.stack([h.unbind()[i] for i in o]), [ORDER, TWICE]),
    "pad": (lambda h, p: F.pad(h, p), [[0] * 6, [0, 0, 0, 0, 1, -1], [0, 0, 1, -1, 0, 0]]),
    "pad of tuples": (lambda h, p: F.pad(h, p), [(0,) * 6, (0, 0, 0, 0, -1, 1)]),
    "pad in a circle": (
        lambda h, p: F.pad(h.transpose(0, 2), p, mode="circular").transpose(0, 2),
        [(0, 0), (1, -1)],
    ),
    "split": (
        lambda h, s: torch.stack([y.sum(0) for y in h.flatten(0, 1).split(s)]),
        [[4, 4, 4, 4], [2, 3, 4, 7], [7, 4, 3, 2]],
    ),
    "unflatten": (lambda h, s: h.flatten(0, 1).unflatten(0, s).sum(1), [(4, 4), (2, 8)]),
    "view": (lambda h, s: h.reshape(s).cos().sum(-1), [(4, 16), (8, 8), (16, 4)]),
    "slices": (lambda h, i: h[i], [(slice(None), slice(0, 2)), (slice(0, 2), slice(None))]),
    "slice": (lambda h, i: h[i], [slice(0, 2), slice(2, 4), slice(1, 3)]),
    "step": (lambda h, i: h[i], [slice(0, 2), slice(0, 4, 2)]),
    "dots": (lambda h, i: h[i], [(slice(None), 0), (0, ...)]),
    "new dimension": (lambda h, i: h[i].expand(4, 4, 4, 4).sum(2), [(slice(None), None), (None,)]),
    "written": (lambda h, i: _written(h, i), [slice(0, 1), slice(1, 2), slice(3, 4)]),
    "written by a list": (lambda h, i: _written(h, i), [[0, 1], [1, 0]]),
    "softmax by name": (lambda h, d: torch.softmax(h, **d), [{"dim": 2}, {"dim": 0}]),
    "tensordot": (lambda h, d: torch.tensordot(h, irregular(4, 4), d), [([2], [0]), ([0], [0])]),
    "fftshift": (lambda h, d: torch.fft.fftshift(h, dim=d), [(2,), (0,)]),
    "rot90": (lambda h, k: torch.rot90(h, k, (0, 1)), [0, 1]),
    "kernel": (
        lambda h, k: F.max_pool2d(h.permute(2, 0, 1)[None], k, 1)[0].permute(1, 2, 0),
        [(1, 2), (2, 1)],
    ),
}


def _written(h: Tensor, place: Any) -> Tensor:
    y = h.clone()
    y[place] = h[:2].cos() if isinstance(place, list) else h[:1].cos()
    return y


@CALLS
@BATCH_DIMS
@PLACES
@pytest.mark.parametrize("name", CONTAINERS)
def test_arguments_in_containers(name: str, place: Any, batch_dim: Any, fused: bool) -> None:
    """Tuples, lists, slices, strings, ``None`` and ``...``, at any depth."""
    operator, arguments = CONTAINERS[name]
    modules, losses_of = place(operator, arguments[0])
    assert_series_is_exact(losses_of, modules, arguments, batch_dim=batch_dim, fused=fused)


# Selection by value.

OFFSETS = torch.tensor([9.0, 6.0, 3.0, 0.0])
SELECTIONS: dict[str, Operator] = {
    "topk": lambda h, d: h.topk(2, d)[0],
    "smallest": lambda h, d: h.topk(2, d, largest=False)[0],
    "sort": lambda h, d: h.sort(d, descending=True)[0],
    "stable sort": lambda h, d: h.sort(dim=d, descending=True, stable=True)[0],
    "max": lambda h, d: h.max(d)[0].expand(2, *h.shape[1:]),
    "min": lambda h, d: h.min(d)[0].expand(2, *h.shape[1:]),
    "amax": lambda h, d: h.amax(d).expand(2, *h.shape[1:]),
    "aminmax": lambda h, d: torch.stack(torch.aminmax(h, dim=d)),
    "median": lambda h, d: h.median(d)[0].expand(2, *h.shape[1:]),
    "kthvalue": lambda h, d: h.kthvalue(2, d)[0].expand(2, *h.shape[1:]),
    "quantile": lambda h, d: h.quantile(0.4, d).expand(2, *h.shape[1:]),
    "cummax": lambda h, d: h.cummax(d)[0],
    "gather": lambda h, d: h.gather(d, h.argsort(d, descending=True)),
    "take_along_dim": lambda h, d: h.take_along_dim(h.argsort(d, descending=True), d),
    "index": lambda h, _: h[_scores(h).argsort(descending=True)],
    "index_select": lambda h, _: h.index_select(0, _scores(h).topk(2).indices),
    "masked_select": lambda h, _: h.masked_select(h > h.detach().flatten().median()),
    "mask": lambda h, _: h[_scores(h) > _scores(h).median()],
    "where": lambda h, _: torch.where(h > h.roll(1, 0), h, h.roll(1, 0)),
    "maximum": lambda h, _: torch.maximum(h, h.roll(1, 0)),
}


if torch.aminmax(torch.ones(2, requires_grad=True))[0].grad_fn.name().endswith("NotImplemented"):
    del SELECTIONS["aminmax"]  # 2.11 has no derivative of it


def _scores(h: Tensor) -> Tensor:
    """One number for each sample."""
    return h.detach().reshape(len(h), -1).sum(1)


# What puts the samples in one order after the other.
ORDERS = [OFFSETS[order] for order in (ORDER, BACK, SWAPPED, [2, 0, 3, 1])]


@CALLS
@BATCH_DIMS
@PLACES
@pytest.mark.parametrize("name", SELECTIONS)
def test_selected_by_value(name: str, place: Any, batch_dim: Any, fused: bool) -> None:
    """Along the dimension in which the samples lie, in the order of the samples first."""
    select = SELECTIONS[name]

    def operator(h: Tensor, offsets: Tensor) -> Tensor:
        return select(h + offsets.view(4, 1, 1), 0)

    modules, losses_of = place(operator, ORDERS[0])
    assert_series_is_exact(losses_of, modules, ORDERS, batch_dim=batch_dim, fused=fused)


@CALLS
@BATCH_DIMS
@pytest.mark.parametrize("name", SELECTIONS)
def test_losses_selected_by_value(name: str, batch_dim: Any, fused: bool) -> None:
    """Hard examples are mined, the tail of the losses is averaged, and outliers are left out."""
    select = SELECTIONS[name]
    model, x = mlp(3, 4), irregular(4, 3)

    def losses_of(offsets: Tensor) -> Tensor:
        return select(per_sample(model(x)) + offsets, 0).flatten()

    assert_series_is_exact(losses_of, [model], ORDERS, batch_dim=batch_dim, fused=fused)


# Regular first, ragged later, of the same total length.

EVEN, RAGGED, OTHER = [3, 3, 3, 3], [2, 4, 3, 3], [1, 5, 4, 2]
LENGTHS = [EVEN, RAGGED, OTHER]


def numbers(lengths: Any) -> Tensor:
    """Which sample each token belongs to."""
    return torch.arange(4).repeat_interleave(torch.as_tensor(lengths), output_size=12)


def one_hot(lengths: Any) -> Tensor:
    """The same, ``(tokens, samples)``."""
    return F.one_hot(numbers(lengths), 4).to(torch.get_default_dtype())


def documents(lengths: Any) -> Tensor:
    """Which tokens are in one document."""
    return numbers(lengths)[:, None] == numbers(lengths)


def pooled(h: Tensor, lengths: Any) -> Tensor:
    """The sum of each document's tokens."""
    return h.new_zeros(4, h.shape[1]).index_add(0, numbers(lengths), h)


def _attended(h: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h[None], h[None], h.cos()[None], attn_mask=mask)[0]


def _attended_by_hand(h: Tensor, mask: Tensor) -> Tensor:
    return (h @ h.T).masked_fill(~mask, -torch.inf).softmax(1) @ h.cos()


PACKED: dict[str, Operator] = {
    "where": lambda h, n: torch.stack(
        [torch.where((numbers(n) == i)[:, None], h, 0).sum(0) for i in range(4)]
    ),
    "masked_fill": lambda h, n: torch.stack(
        [h.masked_fill((numbers(n) != i)[:, None], 0).mean(0) for i in range(4)]
    ),
    "times a mask": lambda h, n: torch.stack(
        [(h * (numbers(n) == i)[:, None]).sum(0) for i in range(4)]
    ),
    "one_hot": lambda h, n: one_hot(n).T @ h,
    "one_hot by einsum": lambda h, n: torch.einsum("tb,td->bd", one_hot(n), h),
    "mean by one_hot": lambda h, n: (one_hot(n).T @ h) / one_hot(n).sum(0)[:, None],
    "sparse.mm": lambda h, n: torch.sparse.mm(one_hot(n).T.to_sparse(), h),
    "segment_reduce": lambda h, n: torch.segment_reduce(h, "sum", lengths=torch.as_tensor(n)),
    "segment_reduce of means": lambda h, n: torch.segment_reduce(
        h, "mean", lengths=torch.as_tensor(n)
    ),
    "segment_reduce by offsets": lambda h, n: torch.segment_reduce(
        h, "max", offsets=F.pad(torch.as_tensor(n).cumsum(0), (1, 0))
    ),
    "split": lambda h, n: torch.stack([y.sum(0) for y in h.split(torch.as_tensor(n).tolist())]),
    "index_add": pooled,
    "scatter_add": lambda h, n: h.new_zeros(4, h.shape[1]).scatter_add(
        0, numbers(n)[:, None].expand(h.shape), h
    ),
    "embedding_bag": lambda h, n: F.embedding_bag(
        torch.arange(12), h, F.pad(torch.as_tensor(n).cumsum(0), (1, 0))[:4], mode="sum"
    ),
    "differences of sums": lambda h, n: F.pad(h.cumsum(0), (0, 0, 1, 0))[
        F.pad(torch.as_tensor(n).cumsum(0), (1, 0))
    ].diff(dim=0),
    "last tokens": lambda h, n: h[torch.as_tensor(n).cumsum(0) - 1],
    "attention": lambda h, n: pooled(_attended(h, documents(n)), n),
    "attention by hand": lambda h, n: pooled(_attended_by_hand(h, documents(n)), n),
    "attention, one_hot": lambda h, n: one_hot(n).T @ _attended(h, documents(n)),
    "attention by hand, one_hot": lambda h, n: one_hot(n).T @ _attended_by_hand(h, documents(n)),
    "attention alone": lambda h, n: pooled(_attended(h, documents(n)), EVEN),
}
GIVEN = pytest.mark.parametrize("given", [False, True], ids=["made in the pass", "given"])


@CALLS
@BATCH_DIMS
@GIVEN
@pytest.mark.parametrize("is_tail", [False, True], ids=["model", "tail"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_samples(name: str, is_tail: bool, given: bool, batch_dim: Any, fused: bool) -> None:
    """Samples one behind the other in one tensor, of equal lengths first."""
    operator = PACKED[name]

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, lengths: Any) -> Tensor:
            h = self.first(x).tanh()
            return self.last(h if is_tail else operator(h, lengths))

    model, x = Packed(), irregular(12, 3)
    arguments = [torch.tensor(n) for n in LENGTHS] if given else LENGTHS

    def losses_of(lengths: Any) -> Tensor:
        y = model(x, lengths)
        return per_sample(operator(y, lengths) if is_tail else y)

    assert_series_is_exact(losses_of, [model], arguments, batch_dim=batch_dim, fused=fused)


FULL, SOME, FEW = [True] * 4, [True, False, True, False], [False, False, True, True]
MASKED: dict[str, Operator] = {
    "where": lambda h, m: torch.where(_column(m), h, h.roll(1, 0)),
    "masked_fill": lambda h, m: (
        h.masked_fill(~_column(m), 0) + h.roll(1, 0).masked_fill(_column(m), 0)
    ),
    "times": lambda h, m: h * _column(m) + h.mean(0) * ~_column(m),
    "lerp": lambda h, m: torch.lerp(h.mean(0).expand_as(h), h, _column(m).to(h)),
    "masked_scatter": lambda h, m: h.masked_scatter(
        ~_column(m).expand(h.shape), h.cos().roll(1, 0)
    ),
    "attention over samples": lambda h, m: _attended(
        h.flatten(1), torch.eye(4, dtype=torch.bool) | ~_column(m)[:, :, 0]
    ),
    "permutation matrix": lambda h, m: torch.eye(4)[ORDER if _is_full(m) else BACK] @ h.flatten(1),
    "permutation by einsum": lambda h, m: torch.einsum(
        "st,tbc->sbc", torch.eye(4)[ORDER if _is_full(m) else BACK], h
    ),
    "permutation by bmm": lambda h, m: (
        torch.eye(4)[ORDER if _is_full(m) else BACK]
        .expand(4, 4, 4)
        .bmm(h.transpose(0, 1))
        .transpose(0, 1)
    ),
}


def _column(mask: Any) -> Tensor:
    return torch.as_tensor(mask).view(4, 1, 1)


def _is_full(mask: Any) -> bool:
    return bool(torch.as_tensor(mask).all())


@CALLS
@BATCH_DIMS
@GIVEN
@PLACES
@pytest.mark.parametrize("name", MASKED)
def test_masks_that_switch_samples(
    name: str, place: Any, given: bool, batch_dim: Any, fused: bool
) -> None:
    """A full mask keeps the samples apart, and later ones let them read each other."""
    operator = MASKED[name]
    masks = [FULL, SOME, FEW]
    arguments = [torch.tensor(mask) for mask in masks] if given else masks
    if name.startswith("permutation"):
        arguments = arguments[:2]
    modules, losses_of = place(operator, arguments[0])
    assert_series_is_exact(losses_of, modules, arguments, batch_dim=batch_dim, fused=fused)
