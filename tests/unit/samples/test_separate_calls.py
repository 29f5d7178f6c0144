"""Samples in separate calls: a loop over samples or groups of them, with a call of a layer each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SECOND,
    SEVERAL,
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
    features,
    irregular,
    trainable,
)
from tests.unit.engines import assert_exact, batch, mlp, per_sample

AS_SAMPLES = Objectives("(B,) given", PER_SAMPLE.of, batch_dim=0)
SEVERAL_GIVEN = Objectives("(B, K) given", SEVERAL.of, batch_dim=0)
EVERY_KIND = [AS_SAMPLES, PER_SAMPLE, SEVERAL_GIVEN, SECOND, COUPLED]


class Loop(nn.Module):
    """A function of a module and a sample, called for one sample after the other."""

    def __init__(
        self, module: nn.Module, call: Callable[[Any, Tensor], Tensor] = lambda f, x: f(x)
    ) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.call(self.module, sample).tanh() for sample in x])


class Functional(nn.Module):
    """Some parameters."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(irregular(*shape)))


def _attend(module: Any, x: Tensor) -> Tensor:
    return module(x, x, x)[0]


def _cell(module: Any, x: Tensor) -> Tensor:
    """A cell over the steps of one sequence."""
    state = None
    for step in x:
        state = module(step, state)
    return state[0] if isinstance(state, tuple) else state


def _twice(module: Any, x: Tensor) -> Tensor:
    return module(module(x).tanh())


def _outer(module: Any, x: Tensor) -> Tensor:
    """A number for each sample: its result has no dimension at all."""
    return (module.weight @ x + module.shift).sin() * module.scale


def _weight_norm(module: Any, x: Tensor) -> Tensor:
    """A tensor derived from parameters in each call anew."""
    return F.linear(x, module.direction * (module.size / module.direction.norm()))


def _row_and_column(module: Any, x: Tensor) -> Tensor:
    """Parts of one parameter."""
    return (module.weight[0] * x).sum() + (module.weight[:, 1] @ x[:3]) * x


def _prefix(module: Any, x: Tensor) -> Tensor:
    return torch.cat([module.first, x, module.last]).sin()


def _without_rule(module: Any, x: Tensor) -> Tensor:
    return torch.logaddexp(x, module.weight)


CALLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: Loop(nn.Linear(4, 3)), (4,)),
    "linear on positions": (lambda: Loop(nn.Linear(4, 3)), (6, 4)),
    "linear on many positions": (lambda: Loop(nn.Linear(2, 2)), (30, 2)),
    "network": (lambda: Loop(mlp(4, 3)), (4,)),
    "one layer twice": (lambda: Loop(nn.Linear(4, 4), _twice), (4,)),
    "conv1d": (lambda: Loop(nn.Conv1d(2, 3, 2)), (2, 5)),
    "conv2d": (lambda: Loop(nn.Conv2d(2, 4, 2, groups=2, padding=1)), (2, 4, 4)),
    "conv3d": (lambda: Loop(nn.Conv3d(1, 2, 2)), (1, 3, 3, 3)),
    "transposed": (lambda: Loop(nn.ConvTranspose2d(2, 3, 2, stride=2)), (2, 3, 3)),
    "convolution of a batch of one": (
        lambda: Loop(nn.Conv2d(2, 3, 2), lambda f, x: f(x[None])[0]),
        (2, 4, 4),
    ),
    "bilinear": (lambda: Loop(nn.Bilinear(4, 4, 3), lambda f, x: f(x, x.cos())), (4,)),
    "LSTM cell": (lambda: Loop(nn.LSTMCell(3, 4), _cell), (5, 3)),
    "GRU cell": (lambda: Loop(nn.GRUCell(3, 4), _cell), (5, 3)),
    "RNN cell": (lambda: Loop(nn.RNNCell(3, 4), _cell), (5, 3)),
    "LSTM": (lambda: Loop(nn.LSTM(3, 4, 2), lambda f, x: f(x)[0]), (5, 3)),
    "GRU, both directions": (
        lambda: Loop(nn.GRU(3, 4, bidirectional=True), lambda f, x: f(x)[1]),
        (5, 3),
    ),
    "attention": (lambda: Loop(nn.MultiheadAttention(4, 2), _attend), (5, 4)),
    "attention, batch first": (
        lambda: Loop(nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True), _attend),
        (5, 4),
    ),
    "encoder layer": (
        lambda: Loop(nn.TransformerEncoderLayer(4, 2, 5, dropout=0, batch_first=True)),
        (5, 4),
    ),
    "layer norm": (lambda: Loop(nn.LayerNorm(4)), (4,)),
    "layer norm of positions": (lambda: Loop(nn.LayerNorm(4)), (6, 4)),
    "RMS norm": (lambda: Loop(nn.RMSNorm((6, 4))), (6, 4)),
    "group norm": (lambda: Loop(nn.GroupNorm(2, 4), lambda f, x: f(x[None])[0]), (4, 5)),
    "instance norm": (lambda: Loop(nn.InstanceNorm1d(3, affine=True)), (3, 5)),
    "batch norm of one sample": (
        lambda: Loop(nn.BatchNorm1d(4), lambda f, x: f(x)),
        (6, 4),
    ),
    "PReLU": (lambda: Loop(nn.PReLU(3)), (5, 3)),
    "a number": (
        lambda: Loop(Functional(weight=(4,), shift=(), scale=()), _outer),
        (4,),
    ),
    "derived in each call": (
        lambda: Loop(Functional(direction=(3, 4), size=()), _weight_norm),
        (4,),
    ),
    "parts of a parameter": (lambda: Loop(Functional(weight=(3, 4)), _row_and_column), (4,)),
    "joined with parameters": (
        lambda: Loop(Functional(first=(2,), last=(1,)), _prefix),
        (4,),
    ),
    "without a rule": (lambda: Loop(Functional(weight=(5, 1)), _without_rule), (4,)),
}


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_one_call_for_each_sample(name: str, objectives: Objectives) -> None:
    model, shape = CALLS[name]
    assert_gramian_is_exact(model, batch(4, *shape), objectives=objectives)


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 33])
def test_numbers_of_samples(samples: int) -> None:
    """As many as features, divisors of them, and more than one code can tell apart."""
    assert_gramian_is_exact(lambda: Loop(mlp(4, 2)), batch(samples, 4), objectives=AS_SAMPLES)
    images = batch(samples, 2, 3, 3)
    assert_gramian_is_exact(lambda: Loop(nn.Conv2d(2, 2, 2)), images, objectives=AS_SAMPLES)


# --- Tables ---------------------------------------------------------------------------------------

TABLE_CALLS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: Loop(nn.Embedding(7, 3)),
    "embedding with padding": lambda: Loop(nn.Embedding(7, 3, padding_idx=2)),
    "bag": lambda: Loop(nn.EmbeddingBag(7, 3), lambda f, x: f(x[None])),
    "index": lambda: Loop(Functional(table=(7, 3)), lambda f, x: f.table[x]),
    "table of numbers": lambda: Loop(Functional(table=(7,)), lambda f, x: f.table[x]),
    "tied": lambda: Loop(nn.Embedding(7, 3), lambda f, x: f(x).tanh() @ f.weight.T),
}


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("name", TABLE_CALLS)
def test_sequences_in_separate_calls(name: str, objectives: Objectives) -> None:
    tokens = torch.randint(7, (4, 5))
    assert_gramian_is_exact(TABLE_CALLS[name], tokens, objectives=objectives)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
def test_sequences_of_several_lengths(objectives: Objectives) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(7, 3), nn.Linear(3, 3)

        def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
            parts = [self.layer(self.table(t[:n])) for t, n in zip(tokens, lengths, strict=True)]
            return torch.stack([F.linear(p.tanh(), self.table.weight).mean(0) for p in parts])

    tokens = torch.randint(7, (4, 6))
    assert_gramian_is_exact(Model, tokens, [3, 1, 6, 2], objectives=objectives)


# --- Groups, and samples of different sizes -------------------------------------------------------


class Groups(nn.Module):
    """Calls for groups of samples, some of one sample, and some calls for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.norm = nn.Linear(4, 6), nn.Linear(6, 3), nn.GroupNorm(3, 6)
        self.conv = nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor, groups: list[list[int]]) -> Tensor:
        x = self.first(x)  # of all samples at once
        parts: dict[int, Tensor] = {}
        for group in groups:
            own = self.norm(x[group]) if len(group) > 1 else x[group[0]]
            y = self.layer(own.tanh()).view(len(group), -1)
            z = self.conv(own.view(-1, 1, 6) if len(group) > 1 else own[None])
            y = y + z.reshape(len(group), 2, -1).sum((1, 2)).unsqueeze(1)
            parts |= dict(zip(group, y, strict=True))
        return self.layer(x) + torch.stack([parts[i] for i in range(len(x))]).sin()


GROUPS = [
    [[0, 1], [2], [3, 4, 5]],
    [[0, 1, 2, 3, 4], [5]],
    [[5, 0], [2], [1], [4, 3]],
    [[0, 1, 2], [3, 4, 5]],
]


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_groups(groups: list[list[int]], objectives: Objectives) -> None:
    assert_gramian_is_exact(Groups, batch(6, 4), groups, objectives=objectives)


def test_groups_that_change_from_step_to_step() -> None:
    model = Groups()
    engine = Engine(model, batch_dim=0)
    for groups in [*GROUPS, GROUPS[0]]:
        order = torch.randperm(6)
        renamed = [[int(order[i]) for i in group] for group in groups]
        assert_exact(engine, per_sample(model(batch(6, 4), renamed)), model)


class Graphs(nn.Module):
    """A message-passing network on graphs of different sizes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(3, 4), nn.GRUCell(4, 3)
        self.norm, self.read = nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, graphs: list[tuple[Tensor, Tensor]]) -> Tensor:
        found = []
        for nodes, edges in graphs:
            h = nodes
            for _ in range(2):
                sent = torch.zeros(len(h), 4).index_add(0, edges[1], self.message(h[edges[0]]))
                h = self.norm(self.update(sent, h))
            found.append(self.read(h).tanh().mean(0))
        return torch.stack(found)


def _graph(nodes: int) -> tuple[Tensor, Tensor]:
    return batch(nodes, 3), torch.randint(nodes, (2, 2 * nodes))


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
def test_graphs_of_different_sizes(objectives: Objectives) -> None:
    graphs = [_graph(n) for n in (3, 1, 6, 2, 3)]
    assert_gramian_is_exact(Graphs, graphs, objectives=objectives)


def test_images_of_different_sizes() -> None:
    """With two dimensions of positions, of which neither is equal."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(0))
    engine = Engine(model, batch_dim=0)
    for sizes in ([(2, 9), (5, 3), (4, 4)], [(3, 3), (2, 2), (7, 2), (2, 7)]):
        found = torch.stack([model(batch(2, *size)) for size in sizes])
        assert_exact(engine, per_sample(found), model)


@pytest.mark.parametrize("count", [40, 3])
def test_one_sample_with_many_more_calls(count: int) -> None:
    """A loop as long as the sample wants it to be."""
    layer = nn.Linear(4, 4)
    engine = Engine(layer, batch_dim=0)
    ends = []
    for sample, n in zip(batch(5, 4), [1, count, 1, 2, 1], strict=True):
        h = sample
        for _ in range(n):
            h = layer(h).tanh() + 0.5 * h
        ends.append(h)
    assert_exact(engine, per_sample(torch.stack(ends)), layer)


# --- Whole models, series of steps, and what the engine offers ------------------------------------


def _image_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def _loop(model: nn.Module, x: Tensor) -> Tensor:
    """A model called once for each sample, as a batch of one."""
    return torch.cat([model(sample[None]) for sample in x])


def test_whole_models_with_another_number_of_samples_at_each_step() -> None:
    model = _image_model()
    engine = Engine(model, batch_dim=0)
    for samples in (4, 4, 2, 7, 1, 4, 3, 4, 4):
        assert_exact(engine, per_sample(_loop(model, batch(samples, 2, 4, 4))), model)


def test_samples_in_another_order_at_each_step() -> None:
    """Nothing but the order in which samples are called changes, as far as shapes tell."""
    model = Loop(mlp(4, 3))
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(7):
        order = torch.randperm(4)
        by_order = features(model(batch(4, 4)[order]), 1).squeeze(1)
        assert_exact(engine, torch.zeros(4).index_add(0, order, by_order), model)


def test_order_in_which_whole_models_are_called() -> None:
    model = mlp(4, 3)
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(7):
        x, found = batch(4, 4), {}
        for i in torch.randperm(4).tolist():
            found[i] = model(x[i])
        assert_exact(engine, per_sample(torch.stack([found[i] for i in range(4)])), model)


def test_calls_that_become_a_batch_and_back() -> None:
    model = mlp(4, 3)
    engine = Engine(model, batch_dim=0)
    for is_loop in (True, False, True, True, False, False):
        x = batch(3, 4)
        output = torch.stack([model(sample) for sample in x]) if is_loop else model(x)
        assert_exact(engine, per_sample(output), model)


def test_units_that_die_and_come_back() -> None:
    """What has no cotangent at first may have one later, of the sample that the call is for."""
    model = nn.Linear(4, 2)
    engine = Engine(model, batch_dim=0, verify="never")
    masks = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]]
    for mask in masks:
        kept = torch.tensor(mask).view(2, 2)
        outputs = torch.stack([model(sample) for sample in batch(2, 4)])
        assert_exact(engine, per_sample(outputs * kept), model)


def test_training() -> None:
    """The fused step, with the gradients of an ordinary one."""
    model = Loop(_image_model(), lambda f, x: f(x[None])[0])
    engine = Engine(model, batch_dim=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for samples in (4, 4, 3, 4):
        losses = per_sample(model(batch(samples, 2, 4, 4)))
        jacobian = reference_jacobian(losses, model.parameters())
        weights, gramian = engine.backward(
            losses, lambda g: g.diagonal().rsqrt(), return_gramian=True
        )
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert_close_to_reference(found, weights @ jacobian)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("keep", ["auto", "factors", "rows"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["network", "conv2d", "LSTM", "derived in each call"])
def test_products_with_the_jacobian(name: str, several: bool, keep: Any) -> None:
    make, shape = CALLS[name]
    model = make()
    engine = Engine(model, batch_dim=0)
    losses = features(model(batch(4, *shape)), 2 if several else 1)
    losses = losses if several else losses.squeeze(1)
    expected = reference_jacobian(losses, trainable(model))
    jacobian = engine.jacobian(losses, keep=keep)
    m, n = expected.shape
    u, v = batch(m), batch(n)
    sizes = [p.numel() for p in trainable(model)]
    direction = [x.view_as(p) for x, p in zip(v.split(sizes), trainable(model), strict=True)]
    assert_close_to_reference(jacobian.dense(), expected)
    assert_close_to_reference(jacobian.gramian(), expected @ expected.T)
    assert_close_to_reference(jacobian.row_norms(), expected.norm(dim=1))
    assert_close_to_reference(jacobian.jvp(direction), expected @ v)
    weighted = torch.cat([x.flatten() for x in jacobian.vjp(u).values()])
    assert_close_to_reference(weighted, u @ expected)
    some = torch.cat([x.reshape(2, -1) for x in jacobian.rows([m - 1, 0]).values()], 1)
    assert_close_to_reference(some, expected[[m - 1, 0]])
    assert_close_to_reference(jacobian.cross_gramian(jacobian), expected @ expected.T)


def test_cross_gramian_of_a_loop_and_a_batch() -> None:
    model = mlp(4, 3)
    engine = Engine(model, batch_dim=0)
    losses = [per_sample(model(batch(3, 4)))]
    losses.append(per_sample(torch.stack([model(sample) for sample in batch(5, 4)])))
    first, second = (reference_jacobian(of, trainable(model)) for of in losses)
    a, b = (engine.jacobian(of) for of in losses)
    assert_close_to_reference(a.cross_gramian(b), first @ second.T)


def test_report() -> None:
    model = Loop(nn.Sequential(nn.Embedding(7, 4), mlp(4, 3)))
    engine = Engine(model, batch_dim=0)
    engine.compute_gramian(per_sample(model(torch.randint(7, (4, 2)))))
    found = {of.name: of for of in engine.report().parameters}
    weight = found["module.1.0.weight"]
    assert [use.layout for use in weight.uses] == ["one of 4 samples"] * 4
    assert found["module.0.weight"].plan == "lookup"
    assert "4 x one of 4 samples" in str(engine)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_verification_agrees(groups: list[list[int]]) -> None:
    model = Groups()
    engine = Engine(model, batch_dim=0, verify="always")
    for _ in range(2):
        engine.verify(per_sample(model(batch(6, 4), groups)))


@pytest.mark.cpu
def test_samples_that_read_each_other_are_mixed() -> None:
    """A loop in which the state of one sample goes on to the next."""
    cell = nn.GRUCell(3, 4)
    engine = Engine(cell, batch_dim=0)
    h, found = torch.zeros(4), []
    for sample in batch(4, 3):
        h = cell(sample, h)
        found.append(h)
    with pytest.raises(MixedSamplesError, match="`linear` with `weight_ih`, `bias_ih`"):
        engine.compute_gramian(per_sample(torch.stack(found)))


def test_unbatched_call_for_all_samples_is_mixed() -> None:
    conv, layer = nn.Conv1d(2, 3, 2), nn.Linear(3, 3)
    engine = Engine(nn.ModuleList([conv, layer]))
    shared = conv(batch(2, 4)).mean(1)
    losses = per_sample(layer(batch(5, 3)) * shared)
    with pytest.warns(CoupledObjectivesWarning, match="conv1d"):
        gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, [*conv.parameters(), *layer.parameters()])
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


@pytest.mark.parametrize("bad", [[2], [0, 3]])
def test_losses_that_are_not_finite(bad: list[int]) -> None:
    """They hide their places. One alone has all that nobody else has, and of two, both have it."""
    model = mlp(4, 3)
    engine = Engine(model, batch_dim=0, verify="never")
    x = batch(4, 4)
    good = [i for i in range(4) if i not in bad]
    outputs = torch.stack([model(sample) for sample in x])
    losses = per_sample(outputs)
    infinite = torch.ones(4)
    infinite[bad] = torch.inf
    losses = losses * infinite
    gramian = engine.compute_gramian(losses)
    alone = per_sample(model(x[good]))
    jacobian = reference_jacobian(alone, trainable(model))
    assert_close_to_reference(gramian[good][:, good], jacobian @ jacobian.T)
    assert not gramian[bad].isfinite().any()


class Elements(TorchDispatchMode):
    """Adds up the elements of what floating-point operators compute."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and not function.is_view:
            self.total += result.numel()
        return result


def test_cost_does_not_grow_with_the_square() -> None:
    """Each call adds rows of its own sample alone, and the factors of all become one block."""
    width, found = 400, []
    for samples in (8, 16):
        model = nn.Linear(width, width, bias=False)
        engine = Engine(model, batch_dim=0, verify="never")
        for _ in range(2):  # in the second step, the samples' places are known
            losses = per_sample(torch.stack([model(x) for x in batch(samples, width)]))
            with Elements() as elements:
                engine.compute_gramian(losses)
        found.append(elements.total)
    assert found[1] < 2.2 * found[0]
