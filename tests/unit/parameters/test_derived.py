"""Tensors computed from parameters alone: casts, views, lookups, parametrizations, and edits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from autogram import Engine, UnseenUseWarning, UnsupportedError
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SECOND,
    SEVERAL,
    ModelFactory,
    Objectives,
    assert_gramian_is_exact,
)
from tests.unit.engines import assert_exact
from tests.unit.networks import Call, call

OBJECTIVES = [PER_SAMPLE, SEVERAL, SECOND, COUPLED]
EXACT = pytest.mark.parametrize("objectives", OBJECTIVES, ids=repr)
Shape = tuple[int, ...]


class Updated(nn.Module):
    """A learned state that is changed in place, by what is computed from it and the samples."""

    def __init__(self, state: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.start, self.inner, self.gate = (
            nn.Parameter(torch.randn(4)),
            nn.Linear(4, 4),
            nn.Linear(3, 4),
        )
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        h = self.state(self.start, len(x))
        h.lerp_(self.inner(h.clone()).tanh(), self.gate(x).sigmoid())
        return h


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    "state",
    [
        lambda start, n: torch.stack([start] * n),
        lambda start, n: start.expand(n, -1).clone(),
        lambda start, n: start[None][torch.zeros(n, dtype=torch.long)],
    ],
    ids=["stack", "expand", "index"],
)
def test_changed_in_place_by_what_is_derived_from_it(
    state: Callable[[Tensor, int], Tensor], samples: int
) -> None:
    assert_gramian_is_exact(lambda: Updated(state), torch.randn(samples, 3))


class Stopped(torch.autograd.Function):
    """Returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        del ctx, g


@pytest.mark.parametrize("change", ["mask", "index", "stop"])
@pytest.mark.parametrize("normed", [False, True])
def test_a_use_of_a_derived_tensor_that_stays_out(change: str, normed: bool) -> None:
    """Behind a slice that hides its tap, or where no cotangent arrives."""
    layer, last, filled = nn.Linear(3, 6), nn.Linear(6, 2), nn.Parameter(torch.randn(3))
    model = nn.ParameterDict({"filled": filled})
    modules = nn.ModuleList([layer, last])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modules_, self.own = modules, model

        def forward(self, x: Tensor) -> Tensor:
            w = (
                layer.weight / layer.weight.norm(dim=1, keepdim=True)
                if normed
                else layer.weight * 2
            )
            h = F.linear(x, w)
            places = torch.tensor([True, False, True, False])
            if change == "mask":
                h[:, :3][places] = self.own["filled"]
            elif change == "index":
                h[:, :3][places.nonzero()[:, 0]] = self.own["filled"]
            else:
                stopped = Stopped.apply(F.linear(x.sin(), w))  # type: ignore[no-untyped-call]
                h = h + stopped + F.linear(x.cos(), layer.weight) * self.own["filled"][0]
            return last(h.tanh())

    whole = Model()
    engine = Engine(whole, verify="never")
    for _ in range(3):
        assert_exact(engine, whole(torch.randn(4, 3)).square().sum(1), whole)


# --- Casts ----------------------------------------------------------------------------------------

CASTS = [
    pytest.param(call(lambda x, w: F.linear(x, w.double()), (5, 4)), id="double() of double"),
    pytest.param(call(lambda x, w: F.linear(x, w.to(x)), (5, 4)), id="to(x)"),
    pytest.param(
        call(lambda x, w: F.linear(x, w.to(x.dtype, copy=True)), (5, 4)), id="to(copy=True)"
    ),
    pytest.param(call(lambda x, w: F.linear(x, w.clone()), (5, 4)), id="clone"),
    pytest.param(call(lambda x, w: F.linear(x, w.contiguous()), (5, 4)), id="contiguous"),
    pytest.param(
        call(lambda x, w: F.linear(x, w.T.contiguous()), (4, 5)), id="contiguous transpose"
    ),
    pytest.param(
        call(lambda x, w: F.linear(x, w + 0 * w.detach()), (5, 4)), id="sum with a constant"
    ),
]


@EXACT
@pytest.mark.parametrize("make_model", CASTS)
def test_cast(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)


class CastBackAndForth(nn.Module):
    """A weight in float64, used in float32: its columns keep the region of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.float(), self.weight.float()).double()
        return y + F.linear(x, self.weight)


def test_cast_to_lower_precision() -> None:
    """The reference rounds its gradients to float32, and the Gramian its factors.

    Half the integers up to 8 are exact in either, and so are their few sums and products.
    """
    model = CastBackAndForth()
    with torch.no_grad():
        model.weight.copy_(torch.randint(-8, 8, (5, 4)) / 2)
    engine = Engine(model)
    x = torch.randint(-8, 8, (3, 4)).double() / 2
    gramian = engine.compute_gramian(model(x).sum(1))
    rows = 2 * x  # of each of the five outputs
    assert torch.equal(gramian, 5 * rows @ rows.T)


# --- Slices and views -----------------------------------------------------------------------------


def chunked(x, w):
    """Three projections whose weights are parts of one."""
    return torch.cat([F.linear(x, part) * i for i, part in enumerate(w.chunk(3), 1)], -1)


def split_unevenly(x, w):
    return torch.cat([F.linear(x, part) for part in w.split([1, 4, 1])], -1)


def split_columns(x, w):
    left, right = w.split(2, 1)
    return F.linear(x[..., :2], left) * F.linear(x[..., 2:], right)


def overlapping(x, w):
    return F.linear(x, w[:4]) * F.linear(x, w[2:])


def disjoint(x, w):
    return F.linear(x, w[:3]) * F.linear(x, w[3:])


def slice_and_whole(x, w):
    return torch.cat([F.linear(x, w[1:3]), F.linear(x, w)], -1)


def equal_slices(x, w):
    return F.linear(x, w[1:3]) * F.linear(x.sin(), w[1:3])


def rows_and_columns(x, w):
    """A row and a column, which share one element."""
    return F.linear(x, w[1:2]) + F.linear(x, w[:4, :1].T)


def every_second(x, w):
    return F.linear(x, w[::2]) * F.linear(x, w[1::2])


def transposed_and_whole(x, w):
    return F.linear(x, w[:4]) + x @ w[:4].T + x @ w[:4]


def unbound(x, w):
    return sum(i * (x * row).sin() for i, row in enumerate(w.unbind(0), 1))


def indexed(x, w):
    return x * w[0] + w[1, 2] - w[-1, :1]


def with_ellipsis(x, w):
    return x * w[0, ...] + w[..., 1].sum() + w[None, 2, :]


def view_of_view(x, w):
    return F.linear(x, w.view(2, 3, 4)[1].view(12).view(3, 4))


def heads(x, w):
    return torch.einsum("bi,hoi->bho", x, w.unflatten(0, (2, 3)))


def diagonal(x, w):
    return x * w.diagonal()


def flipped(x, w):
    return F.linear(x, w.flip(0)) * F.linear(x, w)


def strided(x, w):
    return x * w.as_strided((4,), (5,), 1)


def moved(x, w):
    return F.linear(x, w.movedim(0, 1).permute(1, 0).unsqueeze(0).squeeze(0))


def narrowed(x, w):
    return F.linear(x, w.narrow(0, 2, 3)) + (x @ w.select(0, 1)).unsqueeze(-1)


def imaginary(x: Tensor, w: Tensor) -> Tensor:
    pairs = torch.view_as_complex(w)
    return F.linear(x, pairs.real).sin() + F.linear(x, pairs.imag)


def conjugated(x: Tensor, w: Tensor) -> Tensor:
    """A view that shares the memory of the parameter, and has the other sign."""
    view = torch.view_as_complex(w).conj().imag
    assert view.is_neg()
    return F.linear(x, view).sin() + F.linear(x, w[..., 1])


def expanded_view(x, w):
    """A row that is used by every output: its copies add up."""
    return F.linear(x, w[:1].expand(3, 4)) * F.linear(x, w[:3])


VIEWS = [
    pytest.param(call(chunked, (6, 4)), id="chunk"),
    pytest.param(call(split_unevenly, (6, 4)), id="split"),
    pytest.param(call(split_columns, (6, 4)), id="split of columns"),
    pytest.param(call(overlapping, (6, 4)), id="overlapping slices"),
    pytest.param(call(disjoint, (6, 4)), id="disjoint slices"),
    pytest.param(call(slice_and_whole, (6, 4)), id="slice and whole"),
    pytest.param(call(equal_slices, (6, 4)), id="equal slices"),
    pytest.param(call(rows_and_columns, (6, 4)), id="a row and a column"),
    pytest.param(call(every_second, (6, 4)), id="interleaved slices"),
    pytest.param(call(transposed_and_whole, (6, 4)), id="a slice and its transpose"),
    pytest.param(call(lambda x, w: F.linear(x, w.T), (4, 6)), id="T"),
    pytest.param(call(lambda x, w: F.linear(x, w.transpose(0, 1)), (4, 6)), id="transpose"),
    pytest.param(call(lambda x, w: F.linear(x, w.reshape(6, 4)), (24,)), id="reshape"),
    pytest.param(call(lambda x, w: F.linear(x, w.view(6, 4)), (3, 8)), id="view across rows"),
    pytest.param(
        call(lambda x, w: F.linear(x, w.T.reshape(6, 4)), (6, 4)), id="reshape that copies"
    ),
    pytest.param(call(lambda x, w: F.linear(x, w.flatten(1)), (6, 2, 2)), id="flatten"),
    pytest.param(call(unbound, (6, 4)), id="unbind"),
    pytest.param(call(indexed, (6, 4)), id="rows and elements"),
    pytest.param(call(with_ellipsis, (6, 4)), id="ellipsis and none"),
    pytest.param(call(view_of_view, (6, 4)), id="view of a view"),
    pytest.param(call(heads, (6, 4)), id="unflatten"),
    pytest.param(call(diagonal, (4, 4)), id="diagonal"),
    pytest.param(call(flipped, (6, 4)), id="flip"),
    pytest.param(call(strided, (6, 4)), id="as_strided"),
    pytest.param(call(moved, (6, 4)), id="movedim, permute, squeeze"),
    pytest.param(call(narrowed, (6, 4)), id="narrow and select"),
    pytest.param(call(expanded_view, (6, 4)), id="expanded row"),
    pytest.param(call(imaginary, (6, 4, 2)), id="real and imaginary part"),
    pytest.param(call(conjugated, (6, 4, 2)), id="imaginary part of the conjugate"),
]


@EXACT
@pytest.mark.parametrize("make_model", VIEWS)
def test_view(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)


@pytest.mark.parametrize("limit", [1, 50])
@pytest.mark.parametrize("make_model", VIEWS)
def test_view_with_a_memory_limit(make_model: ModelFactory, limit: int) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4), memory_limit_bytes=limit)


class PartOfAStorage(nn.Module):
    """Two parameters that are views of one buffer, not at its start."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.randn(30)
        self.first = nn.Parameter(storage[3:15].view(3, 4))
        self.second = nn.Parameter(storage[15:27].view(4, 3).T)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first) + F.linear(x, self.second) + F.linear(x, self.first[1:2])


@EXACT
def test_parameters_inside_a_storage(objectives: Objectives) -> None:
    assert_gramian_is_exact(PartOfAStorage, torch.randn(3, 4), objectives=objectives)


# --- Lookups without a batch ----------------------------------------------------------------------


class Positions(nn.Module):
    """An embedding of positions, added to the tokens of every sample."""

    def __init__(self, *, expanded: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.expanded = expanded

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        if self.expanded:
            places = places.expand(x.shape[0], -1)
        return x.sin() + self.table(places)


class RelativePositions(nn.Module):
    """A bias for each distance between two tokens, read from a table of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 2))
        places = torch.arange(5)
        self.register_buffer("index", (places[:, None] - places + 4))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[self.index.view(-1)].view(5, 5, 2).permute(2, 0, 1)
        scores = (x @ x.mT).unsqueeze(1) + bias
        return scores.softmax(-1) @ x.unsqueeze(1)


LOOKUPS = [
    pytest.param(Positions, id="positions"),
    pytest.param(lambda: Positions(expanded=True), id="positions expanded along the batch"),
    pytest.param(RelativePositions, id="relative positions"),
    pytest.param(call(lambda x, t: x + t[:5], (6, 4)), id="first rows of a table"),
    pytest.param(call(lambda x, t: x + t[torch.arange(5)], (6, 4)), id="table[arange]"),
    pytest.param(call(lambda x, t: x + t[torch.tensor([0, 2, 2, 0, 1])], (6, 4)), id="rows twice"),
    pytest.param(
        call(lambda x, t: x * t[t > 0].sum(), (6, 4)), id="a mask that the table computes"
    ),
    pytest.param(
        call(lambda x, t: x + t[torch.arange(5)].unsqueeze(0).repeat(3, 1, 1), (6, 4)),
        id="rows repeated along the batch",
    ),
    pytest.param(
        call(lambda x, t: x + t.gather(0, torch.arange(20).view(5, 4) % 6), (6, 4)), id="gather"
    ),
]


@EXACT
@pytest.mark.parametrize("make_model", LOOKUPS)
def test_lookup(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 5, 4), objectives=objectives)


# --- Parametrizations -----------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


class Squared(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.square() + 0.1


class FromTwo(nn.Module):
    """A weight from two originals of different shapes."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w[:, :2].contiguous(), w[:2].contiguous()  # with the strides of their copies


def parametrized(module: nn.Module, *transforms: nn.Module) -> nn.Module:
    for transform in transforms:
        parametrize.register_parametrization(module, "weight", transform)
    return module


def low_rank(x, w, a, b):
    """A frozen weight with a learned update of low rank."""
    return F.linear(x, w.detach() + 0.5 * (b @ a))


def hyper(x, w, v):
    """A weight that another layer computes, from a learned code."""
    return F.linear(x, F.linear(v, w).view(5, 4).tanh())


def shared_chain(x, w):
    """One derived tensor is used twice, and the parameter once more."""
    v = w / w.norm(dim=1, keepdim=True)
    return F.linear(F.linear(x, v).sin(), v) + F.linear(x, w)


def gate(x, p):
    s = torch.sigmoid(p)
    return s * x + (1 - s) * x.sin()


PARAMETRIZATIONS = [
    pytest.param(lambda: parametrizations.weight_norm(nn.Linear(4, 5)), id="weight_norm"),
    pytest.param(
        lambda: parametrizations.weight_norm(nn.Linear(4, 5), dim=None), id="weight_norm, one"
    ),
    pytest.param(lambda: parametrizations.spectral_norm(nn.Linear(4, 5)), id="spectral_norm"),
    pytest.param(
        lambda: parametrizations.spectral_norm(nn.Linear(4, 5)).eval(),
        id="spectral_norm, evaluation",
    ),
    pytest.param(lambda: parametrizations.orthogonal(nn.Linear(4, 4)), id="orthogonal"),
    pytest.param(lambda: parametrized(nn.Linear(4, 4), Symmetric()), id="symmetric"),
    pytest.param(
        lambda: parametrized(nn.Linear(4, 4), Symmetric(), Squared()), id="two, in a chain"
    ),
    pytest.param(lambda: parametrized(nn.Linear(4, 4), FromTwo()), id="two originals"),
    pytest.param(call(low_rank, (5, 4), (2, 4), (5, 2)), id="low-rank update"),
    pytest.param(call(hyper, (20, 3), (3,)), id="weight from another layer"),
    pytest.param(call(shared_chain, (4, 4)), id="derived and original"),
    pytest.param(call(gate, (4,)), id="gate"),
    pytest.param(call(lambda x, p, q: x * (p * q), (4,), (4,)), id="product of two"),
    pytest.param(call(lambda x, p: x * p.exp().cumsum(0), (4,)), id="chain"),
    pytest.param(
        call(lambda x, p: x * torch.outer(p, p).sum(0), (4,)), id="outer product with itself"
    ),
    pytest.param(call(lambda x, p: F.linear(x, torch.block_diag(p, p)), (3, 2)), id="block_diag"),
    pytest.param(call(lambda x, p: F.linear(x, torch.stack([p, p.sin()])), (4,)), id="stack"),
    pytest.param(call(lambda x, p: F.linear(x, torch.cat([p, p[:1] * 2])), (3, 4)), id="cat"),
    pytest.param(
        call(lambda x, p: F.dropout(x, 0.3) * F.dropout(p, 0.5), (4,)), id="dropout of it"
    ),
    pytest.param(call(lambda x, p: x * p.sort().values + p.max(), (4,)), id="sort and max"),
]


@pytest.mark.filterwarnings("ignore:.*expm:UserWarning")
@EXACT
@pytest.mark.parametrize("make_model", PARAMETRIZATIONS)
def test_parametrization(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)


@EXACT
def test_parametrization_cached_over_several_calls(objectives: Objectives) -> None:
    """The weight is computed once, before the module is called, and used twice."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                return self.layer(self.layer(x).tanh())

    assert_gramian_is_exact(Cached, torch.randn(3, 4), objectives=objectives)


@EXACT
def test_functional_call_with_another_weight(objectives: Objectives) -> None:
    """A module is called with a weight that is computed from its own and another."""

    class Updated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.update = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            weights = {"weight": self.layer.weight + self.update}
            return torch.func.functional_call(self.layer, weights, (self.layer(x).sin(),))

    assert_gramian_is_exact(Updated, torch.randn(3, 4), objectives=objectives)


# --- Expanded along the batch ---------------------------------------------------------------------


class ClassToken(nn.Module):
    def __init__(self, *, repeated: bool = False) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 6, 4))
        self.repeated = repeated

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        token = self.token.repeat(b, 1, 1) if self.repeated else self.token.expand(b, -1, -1)
        x = torch.cat([token, x], 1) + self.positions
        return (x @ x.mT).softmax(-1) @ x


class LearnedQueries(nn.Module):
    """Attention from learned queries, the same for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.norm(self.queries).unsqueeze(0).expand(x.shape[0], -1, -1)
        return (queries @ x.mT).softmax(-1) @ x


class FirstState(nn.Module):
    """A recurrent state that starts from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.randn(4))
        self.cell = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.state.repeat(x.shape[0], 1)
        for step in x.unbind(1):
            state = self.cell(torch.cat([state, step], 1)).tanh()
        return state


class ProcessedToken(nn.Module):
    """Expanded rows go through a layer alone, before the samples meet them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        token = self.layer(self.token.expand(x.shape[0], 1, 4)).tanh()
        return self.layer(torch.cat([token, x], 1))


EXPANDED = [
    pytest.param(ClassToken, id="class token, expand"),
    pytest.param(lambda: ClassToken(repeated=True), id="class token, repeat"),
    pytest.param(LearnedQueries, id="learned queries"),
    pytest.param(FirstState, id="first state of a loop"),
    pytest.param(ProcessedToken, id="token through a layer"),
    pytest.param(call(lambda x, p: x * p.expand(3, 5, 4), (4,)), id="expand"),
    pytest.param(call(lambda x, p: x * p.broadcast_to(3, 5, 4), (1, 4)), id="broadcast_to"),
    pytest.param(call(lambda x, p: x * p.repeat(3, 1, 1), (5, 4)), id="repeat"),
    pytest.param(call(lambda x, p: x * torch.tile(p, (3, 1, 1)), (5, 4)), id="tile"),
    pytest.param(
        call(lambda x, p: x * p.repeat_interleave(3, 0), (1, 5, 4)), id="repeat_interleave"
    ),
    pytest.param(
        call(lambda x, p: x * p.expand(3, 5, 4).contiguous(), (4,)), id="expand, contiguous"
    ),
    pytest.param(call(lambda x, p: x * p.expand(3, 5, 4).sin(), (4,)), id="function of expanded"),
    pytest.param(call(lambda x, p: x * torch.stack([p, p, p]), (5, 4)), id="stack of copies"),
    pytest.param(call(lambda x, p: x * p, (3, 5, 4)), id="one row for each sample"),
    pytest.param(call(lambda x, p: x * p.sin(), (3, 5, 4)), id="one derived row for each sample"),
    pytest.param(
        call(lambda x, p: (x.transpose(0, 1) * p.expand(5, 3, 4)).transpose(0, 1), (4,)),
        id="sequence first",
    ),
    pytest.param(
        call(lambda x, p: x * p.expand_as(x[:1]), (4,)), id="expand_as one of the samples"
    ),
]


@EXACT
@pytest.mark.parametrize("make_model", EXPANDED)
def test_expanded(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 5, 4), objectives=objectives)


class SomeRows(nn.Module):
    """The first rows of a parameter meet the samples, in each step as many as it is told."""

    def __init__(self, function: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rows = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x: Tensor, n: int) -> Tensor:
        return self.function(self.layer(x), self.rows[:n], n)


SOME = {
    "prompts": lambda x, p, _: torch.cat([p.unsqueeze(0).repeat(len(x), 1, 1), x], 1),
    "outputs": lambda x, p, _: torch.cat([x, x @ p.exp().T], 2),
    "inputs": lambda x, p, n: x + x[:, :, :n] @ p.exp(),
}


@pytest.mark.parametrize("name", SOME)
def test_no_rows_of_a_parameter_at_some_steps(name: str) -> None:
    """A derived tensor without elements gives its parameter no rows."""
    model = SomeRows(SOME[name])
    engine = Engine(model, batch_dim=0)
    for n in (2, 0, 1, 0, 3):
        losses = model(torch.randn(3, 5, 4), n).square().sum((1, 2))
        assert_exact(engine, losses, model)
        engine.backward(losses, lambda gramian: gramian.diagonal())


# --- In-place edits -------------------------------------------------------------------------------


def edited_clone(x, p):
    w = p.clone()
    w[0] = 0
    return F.linear(x, w)


def edited_view_of_clone(x, p):
    w = p.clone()
    w.view(-1)[3] *= 2
    return F.linear(x, w)


def edited_after_a_view(x, p):
    """A view is taken before the edit and used after it."""
    w = p.clone()
    row = w[1]
    w.mul_(torch.arange(1.0, 5.0))
    return F.linear(x, w) + x * row


def edited_between_uses(x, p):
    w = p.clone()
    y = F.linear(x, w * 1)
    w += 1
    w[1] = w[0]
    return y + F.linear(x.sin(), w)


def edited_by_another(x, p, q):
    w = p.clone()
    w[:, 1] = q
    w.add_(q.sum())
    return F.linear(x, w)


def filled_buffer(x, p):
    buffer = torch.zeros(5, 4)
    buffer[:, 0] = p
    buffer[2, 1:] = p[:3]
    return F.linear(x, buffer)


def filled_for_each_sample(x, p):
    y = torch.zeros(x.shape[0], 2, 4)
    y[:, 0] = p
    y[:, 1] = x
    return y.cumsum(1).sin()


def filled_from_samples_first(x, p):
    y = torch.zeros(x.shape[0], 2, 4)
    y[:, 1] = x
    y[:, 0] = p
    return y.cumsum(1).sin()


def filled_through_a_view(x, p):
    y = torch.zeros(x.shape[0], 2, 4)
    first = y[:, 0]
    first.copy_(p)
    y[:, 1] += x
    return y.cumsum(1).sin()


def scattered(x, p):
    w = torch.zeros(5, 4).index_put((torch.tensor([0, 2, 0]), torch.tensor([1, 3, 1])), p, True)
    return F.linear(x, w)


def masked(x, p):
    w = p.clone()
    w.masked_fill_(w.detach() < 0, 0.5)
    return F.linear(x, w)


def filled_with_no_grad(x, p):
    w = p.clone()
    with torch.no_grad():
        w[0] = 7
    return F.linear(x, w)


EDITS = [
    pytest.param(call(edited_clone, (5, 4)), id="clone"),
    pytest.param(call(edited_view_of_clone, (5, 4)), id="view of a clone"),
    pytest.param(call(edited_after_a_view, (4, 4)), id="clone behind its view"),
    pytest.param(call(edited_between_uses, (4, 4)), id="clone between its uses"),
    pytest.param(call(edited_by_another, (5, 4), (5,)), id="clone with another parameter"),
    pytest.param(call(filled_buffer, (5,)), id="buffer"),
    pytest.param(call(filled_for_each_sample, (4,)), id="buffer with samples"),
    pytest.param(call(filled_from_samples_first, (4,)), id="buffer with samples, before"),
    pytest.param(call(filled_through_a_view, (4,)), id="buffer with samples, by views"),
    pytest.param(call(scattered, (3,)), id="index_put"),
    pytest.param(call(masked, (5, 4)), id="masked_fill_"),
    pytest.param(call(filled_with_no_grad, (5, 4)), id="clone under no_grad"),
]


@EXACT
@pytest.mark.parametrize("make_model", EDITS)
def test_edit(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)


HOOKED: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda w: hooked(w.view(4, 4)),
    "slice": lambda w: hooked(w[:]),
    "cast": lambda w: hooked(w.to(torch.float32)).to(torch.float64),
    "view of it": lambda w: hooked(w.T).T,
    "cast of it": lambda w: hooked(w[:]).to(torch.float64, copy=True),
    "both": lambda w: hooked(hooked(w.T).T),
    "complex": lambda w: hooked(torch.view_as_complex(w.view(8, 2)).view(2, 4)).real.repeat(2, 1),
}


def hooked(derived: Tensor) -> Tensor:
    """A tensor with a hook that masks its gradient."""
    derived.register_hook(lambda g: g * (torch.arange(4, device=g.device) > 1))
    return derived


@pytest.mark.parametrize("name", HOOKED)
def test_hook_on_what_is_derived(name: str) -> None:
    """A hook that changes gradients does so at some steps, before or behind calls."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.mode = "plain"

        def forward(self, x: Tensor) -> Tensor:
            if self.mode == "plain":
                return F.linear(x, self.weight).tanh()
            if self.mode == "before":
                return F.linear(x, HOOKED[name](self.weight)).tanh()
            view = self.weight.T
            used = F.linear(x, view)
            hooked(view)
            return (used @ view).tanh()

    model = Masked()
    engine = Engine(model, verify="never")
    for step in range(6):
        model.mode = ("plain", "before", "behind")[step % 3]
        losses = PER_SAMPLE.of(model(torch.randn(5, 4)))
        assert_exact(engine, losses, model)


# --- What the recorder cannot see -----------------------------------------------------------------


class Scale(torch.autograd.Function):
    """A product, as a custom function."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum(0)


class Cube(torch.autograd.Function):
    """A function of a parameter alone."""

    @staticmethod
    def forward(ctx, p):
        ctx.save_for_backward(p)
        return p**3

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return 3 * p**2 * g


CUSTOM = [
    pytest.param(call(lambda x, p: Scale.apply(x, p).sin(), (4,)), id="of input and parameter"),
    pytest.param(call(lambda x, p: Scale.apply(x * p, p).sin(), (4,)), id="behind another use"),
    pytest.param(
        call(lambda x, p: Scale.apply(Scale.apply(x, p).sin(), p).sin(), (4,)), id="twice"
    ),
    pytest.param(
        call(lambda x, p: Scale.apply(Scale.apply(x, p), p).sin(), (4,)), id="twice, directly"
    ),
    pytest.param(call(lambda x, p: Scale.apply(x, p.exp()).sin(), (4,)), id="of a derived tensor"),
    pytest.param(call(lambda x, p: x * Cube.apply(p), (4,)), id="of a parameter alone"),
    pytest.param(call(lambda x, w: F.linear(x, Cube.apply(w)), (5, 4)), id="of a weight alone"),
    pytest.param(
        call(lambda x, p: Scale.apply(x.clone(), p) + Scale.apply(x, p), (4,)), id="sum of two"
    ),
    pytest.param(call(Scale.apply, (4,)), id="the output of the model"),
]


@EXACT
@pytest.mark.parametrize("make_model", CUSTOM)
def test_custom_function(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)


# --- Parameters that the model returns ------------------------------------------------------------


class ReturnsParameter(nn.Module):
    """A model that hands out a parameter, or a tensor derived from it, beside its output."""

    def __init__(self, function=lambda p: p) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.rand(4) + 0.5)
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.function(self.temperature)


RETURNED = [
    pytest.param(lambda p: p, id="itself"),
    pytest.param(lambda p: p.exp(), id="derived"),
    pytest.param(lambda p: p[:1], id="slice"),
    pytest.param(lambda p: p.expand(3, 4), id="expanded along the batch"),
    pytest.param(lambda p: p.expand(3, 4).sin(), id="derived, expanded along the batch"),
]


@pytest.mark.parametrize("function", RETURNED)
def test_returned_parameter_in_coupled_losses(function) -> None:
    objectives = Objectives("", lambda out: COUPLED.of(out[0] / out[1]), batch_dim=None)
    make_model = lambda: ReturnsParameter(function)  # noqa: E731
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)


@pytest.mark.parametrize("function", RETURNED[3:])
def test_returned_rows_of_samples(function) -> None:
    objectives = Objectives("", lambda out: SEVERAL.of(out[0] / (out[1] + 2)))
    make_model = lambda: ReturnsParameter(function)  # noqa: E731
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)


@pytest.mark.parametrize("function", RETURNED[:3])
@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.filterwarnings("error::autogram.CoupledObjectivesWarning")
def test_returned_parameter_is_used_by_each_sample(function) -> None:
    """As the scale of a policy is by its log-likelihoods, in a series of steps.

    It has no place for samples, and is left as it is: the losses show where they read it.
    """
    model = ReturnsParameter(function)
    engine = Engine(model)
    for size in (3, 5, 3, 4):
        output, temperature = model(torch.randn(size, 4))
        assert_exact(engine, (output / (temperature + 2)).square().sum(1), model)


def test_returned_parameter_is_the_parameter() -> None:
    model = ReturnsParameter()
    Engine(model)
    assert model(torch.randn(3, 4))[1] is model.temperature


class RunAgain(torch.autograd.Function):
    """Runs a network in its backward pass, for the gradients of parameters that it was given."""

    @staticmethod
    def forward(ctx: Any, network: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.network = network
        ctx.save_for_backward(x, *parameters)
        return network(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.network(x)
        return None, *torch.autograd.grad(output, (x, *parameters), gradient)


def test_returned_parameters_are_those_of_the_network() -> None:
    """A flow returns an object with its parameters, whose likelihood an adjoint solver computes."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.network = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            return self.first(x), [*self.network.parameters()]

    model = Flow()
    engine = Engine(model)

    h, parameters = model(torch.randn(5, 4))
    losses = RunAgain.apply(model.network, h, *parameters).square().sum(1)
    with pytest.warns(UnseenUseWarning, match=r"`network\.weight`"):
        assert_exact(engine, losses, model)


def test_frozen_source_of_a_derived_tensor() -> None:
    """Only what requires a gradient has columns."""

    def make_model() -> nn.Module:
        model = Call(lambda x, p, q: F.linear(x, p * q), (5, 4), (5, 4))
        model.parameters_[1].requires_grad_(False)
        return model

    assert_gramian_is_exact(make_model, torch.randn(3, 4))


class WrappedConstant(nn.Module):
    """A constant made a parameter of its own in the forward pass, as peft does with a frozen one.

    Autograd sees a graph behind what is computed from it, and yet nothing of the engine's.
    """

    def __init__(self, is_detached: bool) -> None:
        super().__init__()
        self.is_detached = is_detached
        self.magnitude = nn.Parameter(torch.rand(5) + 1)
        self.weight = nn.Parameter(torch.randn(5, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wrapped = nn.Parameter(self.weight.T)
        norms = (wrapped + 0.1).square().sum(0)
        norms = norms.detach() if self.is_detached else norms
        return F.linear(x, self.weight) * (self.magnitude / norms)


@pytest.mark.parametrize("is_detached", [True, False])
def test_constant_that_requires_a_gradient(is_detached: bool) -> None:
    """It is no batched tensor: the samples are found, also where there are as many as features."""
    objectives = Objectives("(B,)", PER_SAMPLE.of, batch_dim=0)
    make_model = lambda: WrappedConstant(is_detached)  # noqa: E731
    assert_gramian_is_exact(make_model, torch.randn(3, 4), objectives=objectives)
    assert_gramian_is_exact(make_model, torch.randn(5, 4), objectives=objectives)


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def into_a_buffer(model: nn.Module) -> None:
    buffer = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(buffer, model.parameters())


@pytest.mark.parametrize("move", [to_channels_last, into_a_buffer])
def test_a_parameter_that_is_moved_behind_the_forward_pass(move: Callable) -> None:
    """What is known of its elements is where they were, and is of no use any more."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten())
    engine = Engine(model, verify="never")
    x = torch.randn(3, 2, 4, 4)
    losses = model(x).square().sum(1)
    move(model)
    for product in (engine.compute_gramian, engine.jacobian):
        with pytest.raises(UnsupportedError, match="weight` was moved in memory after the forward"):
            product(losses)
    assert_exact(engine, model(x).square().sum(1), model)
