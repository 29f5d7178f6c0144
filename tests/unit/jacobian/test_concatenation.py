"""Jacobians of several batches as one, against the rows of all batches under one another."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from autogram import Engine, InvalidOperandError, Jacobian, concatenate
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, irregular, trainable
from tests.unit.jacobian.test_jacobian import Language, Norms, TwoLookups, Unused
from tests.unit.jacobians import assert_gradients_are_close, assert_operator_is


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss for each sample."""
    return model(x).flatten(1).square().sum(1)


def assert_is_concatenation(model: nn.Module, batches: list[Tensor], **options: object) -> Jacobian:
    """Assert that all products are those of the rows of all batches, and return the operator."""
    twin = copy.deepcopy(model)
    engine = Engine(model, **options)
    jacobian = concatenate([engine.jacobian(losses_of(model, x)) for x in batches])
    rows = [reference_jacobian(losses_of(twin, x), trainable(twin)) for x in batches]
    assert_operator_is(jacobian, torch.cat(rows))
    weights = irregular(len(jacobian.gramian())).to(rows[0])
    jacobian.accumulate_grad(weights)
    for x, w in zip(batches, weights.split([len(x) for x in batches]), strict=True):
        losses_of(twin, x).backward(w)
    assert_gradients_are_close(model, twin)
    norms = jacobian.row_norms(layer)
    clipped = {name: (0.1 / of).clamp(max=1) for name, of in norms.items()}
    jacobian.accumulate_grad(clipped, layer)
    named = dict(twin.named_parameters())
    start = 0
    for x in batches:
        losses, stop = losses_of(twin, x), start + len(x)
        for name, w in clipped.items():
            some = [named[of] for of in jacobian.names if layer(of) == name]
            losses.backward(w[start:stop], inputs=some, retain_graph=True)
        start = stop
    assert_gradients_are_close(model, twin)
    return jacobian


def layer(name: str) -> str:
    """The module of a parameter."""
    return name.rpartition(".")[0]


def tokens(*sizes: tuple[int, int]) -> list[Tensor]:
    return [torch.randint(0, 6, size) for size in sizes]


@pytest.mark.parametrize("make_model", [Language, lambda: Language(is_tied=False), TwoLookups])
def test_lookups_of_batches_of_other_sizes(make_model) -> None:
    assert_is_concatenation(make_model(), tokens((3, 5), (1, 5), (4, 2)))


class Bags(nn.Module):
    """A table whose rows are added up in bags of three, but where ids are those of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.EmbeddingBag(6, 4, mode="sum"), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        is_there = x > 0
        counts = is_there.sum(1)
        return self.last(self.table(x[is_there], counts.cumsum(0) - counts)).sin()


@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_whose_bags_are_all_empty(place: int) -> None:
    """Beside a batch with another number of objectives for each sample."""
    model, batches = Bags(), tokens((2, 3), (3, 3))
    batches[place].zero_()
    engine = Engine(model)
    losses = [model(batches[0]).square().sum(1), model(batches[1])]
    first, second = (reference_jacobian(each, trainable(model)) for each in losses)
    jacobians = [engine.jacobian(each) for each in losses]
    assert_close_to_reference(jacobians[0].cross_gramian(jacobians[1]), first @ second.T)
    assert_operator_is(concatenate(jacobians), torch.cat([first, second]))


@pytest.mark.parametrize("limit", [2**29, 200])
@pytest.mark.parametrize(
    "make_model",
    [
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 30)),
        Unused,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    ],
)
def test_dense_layers(make_model, limit: int) -> None:
    batches = [torch.randn(n, 4) for n in (3, 2, 1)]
    assert_is_concatenation(make_model(), batches, memory_limit_bytes=limit)


def test_convolutions_of_images_of_other_sizes() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))
    images = [torch.randn(n, 2, size, size) for n, size in ((2, 5), (3, 4), (1, 5))]
    assert_is_concatenation(model, images)


def test_norms_and_groups() -> None:
    assert_is_concatenation(Norms(), [torch.randn(n, 4, 4) for n in (2, 3)])


class Some(nn.Module):
    """Layers of which each call reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.head = nn.Linear(3, 2)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.head(self.layers[self.number % 2](x).tanh())


def test_a_parameter_that_one_batch_does_not_reach() -> None:
    model = Some()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    batches = [torch.randn(n, 4) for n in (3, 2)]
    jacobian = concatenate([engine.jacobian(losses_of(model, x)) for x in batches])
    rows = [reference_jacobian(losses_of(twin, x), trainable(twin)) for x in batches]
    assert_operator_is(jacobian, torch.cat(rows))


def test_numbers_of_objectives_that_differ() -> None:
    """Several losses of each sample, one, and losses of the whole batch, which are no samples'."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    twin = copy.deepcopy(model)
    engine = Engine(model)

    def parts(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        x = [torch.randn(n, 4) for n in (3, 2, 4, 2)]
        coupled = F.softmax(module(x[2]), 0).square().sum(0)
        return [module(x[0]), module(x[1])[:, 0].exp(), coupled, module(x[3]).sin()]

    with pytest.warns(UserWarning, match="whole batch|not per-sample|samples"):
        jacobian = concatenate([engine.jacobian(losses) for losses in parts(model)])
    expected = torch.cat([reference_jacobian(x, trainable(twin)) for x in parts(twin)])
    assert_operator_is(jacobian, expected)
    other = engine.jacobian(losses_of(model, torch.ones(2, 4)))
    rows = reference_jacobian(losses_of(twin, torch.ones(2, 4)), trainable(twin))
    assert_close_to_reference(jacobian.cross_gramian(other), expected @ rows.T)
    assert_close_to_reference(other.cross_gramian(jacobian), rows @ expected.T)
    both = concatenate([jacobian, other])
    assert_operator_is(both, torch.cat([expected, rows]))


def test_losses_of_no_sample_are_left_out() -> None:
    model = nn.Linear(4, 1)
    engine = Engine(model)
    empty = engine.jacobian(losses_of(model, torch.randn(0, 4)))
    some = engine.jacobian(losses_of(model, torch.randn(3, 4)))
    assert concatenate([empty, some, empty]).gramian().shape == (3, 3)
    assert concatenate([empty, empty]).gramian().shape == (0, 0)


def test_least_squares_of_all_batches() -> None:
    model = nn.Linear(4, 2)
    engine = Engine(model)
    x = torch.randn(5, 4)
    whole = engine.jacobian(losses_of(model, x))
    parts = concatenate([engine.jacobian(losses_of(model, part)) for part in x.split(3)])
    residuals = torch.randn(5)
    for name, step in whole.least_squares(residuals, damping=0.1).items():
        found = parts.least_squares(residuals, damping=0.1)[name]
        assert_close_to_reference(found, step)


def test_rows_are_formed_once() -> None:
    """Products of n batches cost no more than those of one batch of all samples."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    engine = Engine(model)
    x = torch.randn(12, 30, 8)
    batches = [x] * 1, list(x.split(3))
    counts = []
    for some in batches:
        jacobians = [engine.jacobian(losses_of(model, x), keep="factors") for x in some]
        with FlopCounterMode(display=False) as counter:
            concatenate(jacobians).gramian()
        counts.append(counter.get_total_flops())
    assert 0 < counts[1] <= counts[0]


def test_what_cannot_be_concatenated() -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    jacobian = Engine(model).jacobian(losses_of(model, torch.randn(3, 4)))
    stranger = Engine(other).jacobian(losses_of(other, torch.randn(3, 4)))
    with pytest.raises(InvalidOperandError, match="no Jacobian to concatenate"):
        concatenate([])
    with pytest.raises(InvalidOperandError, match="A Tensor was given where a Jacobian is needed"):
        concatenate([jacobian, jacobian.gramian()])
    with pytest.raises(InvalidOperandError, match="no parameter in common"):
        concatenate([jacobian, stranger])
    shared = nn.Linear(4, 2)
    shared.weight = model.weight
    third = Engine(shared).jacobian(losses_of(shared, torch.randn(3, 4)))
    with pytest.raises(InvalidOperandError, match="different parameters of the name `bias`"):
        concatenate([jacobian, third])
    with pytest.raises(InvalidOperandError, match="vector of shape"):
        concatenate([jacobian, jacobian]).vjp(torch.ones(5))


def test_losses_that_are_single_numbers() -> None:
    """Each number is a part of its own, of shape `()`."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    engine = Engine(model, batch_dim=None)
    batches = [torch.randn(n, 4) for n in (3, 2, 4)]
    jacobian = concatenate([engine.jacobian(losses_of(model, x).sum()) for x in batches])
    rows = [reference_jacobian(losses_of(model, x).sum(), trainable(model)) for x in batches]
    assert_operator_is(jacobian, torch.cat(rows))


@pytest.mark.parametrize("keep", ["factors", "rows"])
def test_memory_formats_that_change(keep: str) -> None:
    """Elements of a parameter are the same elements, wherever they are in memory."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten(2))
    model.append(nn.Linear(4, 3))
    engine = Engine(model)
    batches = [torch.randn(n, 2, 5, 5) for n in (2, 3, 2, 1)]
    rows = [reference_jacobian(losses_of(model, x), trainable(model)) for x in batches]
    jacobians = [engine.jacobian(losses_of(model, batches[0]), keep=keep)]
    model.to(memory_format=torch.channels_last)
    jacobians.append(engine.jacobian(losses_of(model, batches[1]), keep=keep))
    model.to(memory_format=torch.contiguous_format)
    buffer = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(buffer, model.parameters())
    jacobians.append(engine.jacobian(losses_of(model, batches[2]), keep=keep))
    model[-1].weight.data = model[-1].weight.data.t().contiguous().t()
    jacobians.append(engine.jacobian(losses_of(model, batches[3]), keep=keep))
    assert_operator_is(concatenate(jacobians), torch.cat(rows))
    found = jacobians[1].cross_gramian(jacobians[0])
    assert_close_to_reference(found, rows[1] @ rows[0].T)


class Overlapping(nn.Module):
    """Two slices of one parameter that have elements in common."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight[:3].T).tanh() @ self.weight[1:4]


def test_a_batch_whose_rows_are_zero() -> None:
    """A batch reaches the parameter, and no cotangent does."""
    model = Overlapping()
    engine = Engine(model)
    x, y = torch.randn(3, 4), torch.randn(2, 4)
    some, none = losses_of(model, x), losses_of(model, y) * 0
    first, second = engine.jacobian(some), engine.jacobian(none)
    rows = reference_jacobian(some, trainable(model))
    assert_operator_is(concatenate([first, second]), torch.cat([rows, rows.new_zeros(2, 20)]))
    assert_close_to_reference(first.gramian(), rows @ rows.T)
    assert torch.equal(first.cross_gramian(second), torch.zeros(3, 2))
    assert torch.equal(second.cross_gramian(first), torch.zeros(2, 3))
