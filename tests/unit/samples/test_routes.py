"""Samples in places that values decide anew in each step: found once, and computed from then on."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError
from tests.unit.engines import assert_exact, batch, counted_passes, per_sample

WIDTH, SAMPLES, STEPS = 4, 5, 8
Losses = Callable[..., Tensor]


class Layers(nn.Module):
    """Layers for the cases below, which are called in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(batch(WIDTH))

    def forward(self, x: Tensor, call: Losses, step: int | Tensor) -> Tensor:
        return call(self, x, step)

    def of_each(self, x: Tensor) -> Tensor:
        """All layers, one behind the other."""
        return self.third(self.second(self.first(x).tanh()).sin() * self.scale)


def counts_of(step: int) -> Tensor:
    """How many places each sample has: others in each step, which are never equal."""
    return (torch.arange(SAMPLES) * 3 + 2 * step) % 5 + 2 + (torch.arange(SAMPLES) == step % 3)


def owners_of(step: int) -> Tensor:
    return torch.arange(SAMPLES).repeat_interleave(counts_of(step))


def edges_of(step: int, across: bool = False) -> tuple[Tensor, Tensor]:
    """Edges in graphs of several sizes: between all pairs of nodes, and one to another graph."""
    owners = owners_of(step)
    source, target = (owners.unsqueeze(1) == owners).nonzero(as_tuple=True)
    if across:
        source[0] = len(owners) - 1
    return source, target


def graphs(model: Layers, x: Tensor, step: int, across: bool = False) -> Tensor:
    owners, (source, target) = owners_of(step), edges_of(step, across)
    x = model.first(x).tanh()
    messages = model.second(x)[source] * model.scale
    x = x + torch.zeros_like(x).index_add_(0, target, messages)
    pooled = torch.zeros(SAMPLES, WIDTH).index_add(0, owners, x.sin())
    return per_sample(model.third(pooled / counts_of(step).unsqueeze(1)))


def attention(model: Layers, x: Tensor, step: int) -> Tensor:
    """Weights of edges by a softmax over the edges that lead to a node."""
    source, target = edges_of(step)
    x = model.first(x)
    scores = (model.second(torch.cat([x[source]]) + x[target]).tanh() @ model.scale).exp()
    total = torch.zeros(len(x)).scatter_add(0, target, scores)
    messages = (scores / total[target]).unsqueeze(1) * x[source]
    columns = target.unsqueeze(1).expand(-1, WIDTH)
    x = torch.zeros_like(x).scatter_add(0, columns, messages)
    lengths = counts_of(step).tolist()
    return per_sample(model.third(torch.stack([some.mean(0) for some in x.split(lengths)])))


def are_chosen(step: int) -> Tensor:
    """Some words of each sentence."""
    found = (torch.arange(6) + (step + 1) * torch.arange(SAMPLES).unsqueeze(1)) % 4 == 0
    found[:, 0] = True
    return found


def chosen(model: Layers, x: Tensor, step: int) -> Tensor:
    """A head for words that are masked, some in each sentence."""
    is_masked, hidden = are_chosen(step), model.first(x).tanh()
    of_words = F.cross_entropy(
        model.of_each(hidden[is_masked]),
        torch.arange(int(is_masked.sum())) % WIDTH,
        reduction="none",
    )
    return torch.zeros(SAMPLES).index_add(0, is_masked.nonzero()[:, 0], of_words)


def splines(model: Layers, x: Tensor, step: int) -> Tensor:
    """Values inside of an interval get a spline, whose knots are changed at the ends in place."""
    is_inside = (torch.arange(6) + (step + 1) * torch.arange(SAMPLES).unsqueeze(1)) % 4 != 1
    hidden = model.first(x).tanh()
    knots = F.pad(model.second(hidden[is_inside]).softmax(1).cumsum(1), (1, 0))
    knots[..., 0] = -1.0
    knots[..., -1] += model.scale[0]
    values = torch.zeros(SAMPLES, 6)
    values[is_inside] = (knots[..., 1:] - knots[..., :-1]).square() @ model.scale
    return per_sample(model.third(values[:, :WIDTH]) * hidden.sum(1))


def packed(model: Layers, x: Tensor, step: int) -> Tensor:
    """Sequences one behind the other, put into a padded tensor."""
    is_there = torch.arange(8) < counts_of(step).unsqueeze(1)
    words = model.second(model.first(x).tanh())
    padded = torch.zeros(SAMPLES, 8, WIDTH)
    padded[is_there] = words * model.scale
    return per_sample(model.third(padded).sin())


def scattered(model: Layers, x: Tensor, step: int) -> Tensor:
    """Some words of each sentence are replaced, in order."""
    is_replaced, hidden = are_chosen(step), model.first(x).tanh()
    words = model.second(hidden[is_replaced].sin() * model.scale)
    return per_sample(model.third(hidden.masked_scatter(is_replaced.unsqueeze(2), words)))


def picked(model: Layers, x: Tensor, step: int) -> Tensor:
    """Some words are taken from one sentence after the other."""
    hidden = model.first(x).tanh()
    means = [hidden[number][some].mean(0) for number, some in enumerate(are_chosen(step))]
    firsts = [some[int(number)] for some, number in zip(hidden, counts_of(step) % 6, strict=True)]
    return per_sample(model.second(torch.stack(means)) * model.third(torch.stack(firsts)))


def leaving(model: Layers, x: Tensor, step: int) -> Tensor:
    """Fewer samples go on: at first those in between, so that a regular layout fits."""
    left, hidden = (torch.arange(4) + step) % SAMPLES, model.first(x).tanh()
    places = torch.tensor([[1, 2], [3, 0], [0, 2]][step % 3])
    last = model.third(model.second(hidden[left]).sin()[places]) * model.scale
    return per_sample(hidden.index_add(0, left[places], last))


def split(model: Layers, x: Tensor, step: int) -> Tensor:
    words = model.of_each(x)
    return torch.stack([some.square().mean() for some in words.split(counts_of(step).tolist())])


def one_by_one(model: Layers, x: Tensor, step: int) -> Tensor:
    sizes = counts_of(step).tolist()
    return torch.stack([model.of_each(some).square().mean() for some in x.split(sizes)])


def unbound(model: Layers, x: Tensor, step: int) -> Tensor:  # noqa: ARG001 - no size changes
    return torch.stack([(model.second(some).sin() * model.scale).sum() for some in model.first(x)])


def experts(model: Layers, x: Tensor, step: int) -> Tensor:
    """Tokens in pieces, one for each expert, in an order sorted by expert."""
    tokens = model.first(x).flatten(0, 1)
    chosen = (torch.arange(len(tokens)) * (step + 2)) % 7 % 2
    order = chosen.argsort(stable=True)
    pieces = tokens[order].split(torch.bincount(chosen, minlength=2).tolist())
    outputs = [layer(x) for layer, x in zip((model.second, model.third), pieces, strict=True)]
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    return per_sample(torch.cat(outputs)[back].sin().view(SAMPLES, 6, WIDTH))


def forces(model: Layers, x: Tensor, step: int) -> Tensor:
    """Energies of graphs, and their slopes: each node gets those of its edges and of its bonds."""
    x = x.clone().requires_grad_()
    owners, (source, target) = owners_of(step), edges_of(step)
    is_bound = F.pad(owners[1:] == owners[:-1], (1, 0))
    bonds = (x - F.pad(x[:-1], (0, 0, 1, 0)))[is_bound]
    messages = model.of_each(x[source] * (x[target] - x[source]).square())
    per_node = torch.zeros_like(x).index_add(0, target, messages).sin() + model.first(x).tanh()
    energies = torch.zeros(SAMPLES).index_add(0, owners, per_node.sum(1))
    energies = energies.index_add(0, owners[is_bound], model.second(bonds).cos().sum(1))
    (slopes,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
    return energies + torch.zeros(SAMPLES).index_add(0, owners, slopes.square().sum(1))


def neighbours(model: Layers, x: Tensor, step: int) -> Tensor:
    """A row behind all nodes stands for the neighbours that nodes at the end of a graph lack."""
    owners = owners_of(step)
    following = torch.arange(1, len(owners) + 1)
    following[:-1][owners[1:] != owners[:-1]] = len(owners)
    rows = F.pad(model.first(x).tanh(), (0, 0, 0, 1))
    per_node = model.second(rows[:-1]) * rows[following] + model.scale
    return torch.zeros(SAMPLES).index_add(0, owners, model.third(per_node).sin().sum(1))


def nodes(step: int) -> Tensor:
    return batch(len(owners_of(step)), WIDTH)


def sentences(step: int) -> Tensor:  # noqa: ARG001 - of one length
    return batch(SAMPLES, 6, WIDTH)


# What makes the data of a step, and the losses.
CASES: dict[str, tuple[Callable[[int], Tensor], Losses]] = {
    "graphs": (nodes, graphs),
    "attention in graphs": (nodes, attention),
    "words that are chosen": (sentences, chosen),
    "splines inside of an interval": (sentences, splines),
    "packed sequences": (nodes, packed),
    "words that are replaced": (sentences, scattered),
    "words of one sentence after the other": (sentences, picked),
    "samples that leave": (lambda _: batch(SAMPLES, WIDTH), leaving),
    "pieces": (nodes, split),
    "forces in graphs": (nodes, forces),
    "neighbours that are missing": (nodes, neighbours),
    "samples one by one": (nodes, one_by_one),
    "samples that are unbound": (lambda _: batch(SAMPLES, WIDTH), unbound),
    "experts": (sentences, experts),
}


@pytest.mark.parametrize(("data", "losses"), CASES.values(), ids=CASES)
def test_places_are_computed_in_each_step(data: Callable[[int], Tensor], losses: Losses) -> None:
    model = Layers()
    engine = Engine(model, verify="never")
    passes = []
    for step in range(STEPS):
        found = model(data(step), losses, step)
        with counted_passes(found) as counted:
            engine.compute_gramian(found)
        passes.append(len(counted))
        assert_exact(engine, model(data(step + 1), losses, step + 1), model)
    assert passes == [1] * STEPS


@pytest.mark.parametrize(("data", "losses"), CASES.values(), ids=CASES)
def test_several_objectives_and_whole_steps(data: Callable[[int], Tensor], losses: Losses) -> None:
    """Two objectives a sample, and gradients of weighted losses from the factors that are kept."""
    model = Layers()
    engine = Engine(model)
    for step in range(4):
        one = model(data(step), losses, step)
        assert_exact(engine, torch.stack([one, one.exp()], 1), model)
        weights, twice = torch.arange(1.0, SAMPLES + 1), model(data(step), losses, step)
        (weights @ twice).backward(retain_graph=True)
        expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        engine.backward(twice, lambda _, weights=weights: weights)
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
        model.zero_grad()


def contexts(model: Layers, x: Tensor, step: int, across: bool = False) -> Tensor:
    """Each sample has a context, in a regular place, that its nodes read."""
    owners = owners_of(step)
    read = owners.clone()
    if across:
        read[0] = SAMPLES - 1
    context = model.first(torch.zeros(SAMPLES, WIDTH).index_add(0, owners, x)).tanh()
    of_nodes = model.second(x) * context[read]
    return torch.zeros(SAMPLES).index_add(0, owners, of_nodes.sin().sum(1))


@pytest.mark.parametrize("batch_dim", [0, "auto"])
@pytest.mark.parametrize("call", [graphs, contexts])
def test_samples_that_meet_in_a_later_step(call: Losses, batch_dim: int | str) -> None:
    """An edge leads from one graph to another, or to a place that is regular."""
    model = Layers()
    engine = Engine(model, batch_dim=batch_dim, verify="never")
    for step in range(3):
        assert_exact(engine, model(nodes(step), call, step), model)
    losses = model(nodes(3), partial(call, across=True), 3)
    if batch_dim == 0:
        with pytest.raises(MixedSamplesError):
            engine.compute_gramian(losses)
    else:
        with pytest.warns(CoupledObjectivesWarning):
            assert_exact(engine, losses, model)
    assert_exact(engine, model(nodes(4), call, 4), model)


def test_a_matrix_for_as_many_places_as_it_has_rows() -> None:
    """It is put in each place, not a row in each. At first, all places are of one sample."""

    def losses(model: Layers, x: Tensor, step: int) -> Tensor:
        owners = torch.arange(2).repeat_interleave(torch.tensor([4 + step, 3 + step % 2]))
        places = torch.tensor([0, 1, 2, len(owners) - 1 if step == 3 else 3])
        rows = torch.zeros(len(owners), WIDTH, WIDTH).index_put((places,), model.first(x).tanh())
        return torch.zeros(2).index_add(0, owners, per_sample(model.second(rows)))

    model = Layers()
    engine = Engine(model, batch_dim=0, verify="never")
    for step in range(3):
        assert_exact(engine, model(batch(WIDTH, WIDTH), losses, step), model)
    with pytest.raises(MixedSamplesError):
        engine.compute_gramian(model(batch(WIDTH, WIDTH), losses, 3))


def pooled(model: Layers, x: Tensor, owners: Tensor) -> Tensor:
    """Words of a vector of samples, added up for each sample."""
    words = model.first(x).sin()
    of_samples = torch.zeros(SAMPLES, WIDTH).index_add(0, owners, model.second(words))
    return per_sample(model.third(of_samples) + model.scale)


@pytest.mark.parametrize("first", [0, 1])
def test_places_that_were_regular_by_accident(first: int) -> None:
    """All samples have as many words as the others in some steps, at first or later."""
    model = Layers()
    engine = Engine(model, verify="never")
    for step in range(first, STEPS):
        owners = torch.arange(SAMPLES).repeat_interleave(2 + step % 4)
        if step % 3:
            owners = owners_of(step)
        assert_exact(engine, model(batch(len(owners), WIDTH), pooled, owners), model)


def test_regular_places_beside_irregular_ones() -> None:
    """Pieces of one length in the first step, and of others later; edges that are never regular."""

    def both(model: Layers, x: Tensor, step: int) -> Tensor:
        sizes = [2] * SAMPLES if step == 0 else counts_of(step).tolist()
        owners = torch.arange(SAMPLES).repeat_interleave(torch.tensor(sizes))
        target = torch.arange(len(x)).repeat_interleave(1 + owners % 2)
        hidden = model.first(x)
        hidden = hidden + torch.zeros_like(hidden).index_add(0, target, hidden[target] * 0.5)
        pieces = [
            model.second(some.sin()) * number for number, some in enumerate(hidden.split(sizes))
        ]
        return per_sample(
            torch.zeros(SAMPLES, WIDTH).index_add(0, owners, torch.cat(pieces).tanh())
        )

    model = Layers()
    engine = Engine(model, verify="never")
    for step in range(STEPS):
        x = batch(2 * SAMPLES if step == 0 else len(owners_of(step)), WIDTH)
        assert_exact(engine, model(x, both, step), model)


def test_other_samples_in_the_same_places() -> None:
    """Values decide which sample a place is of, at equal sizes."""
    model = Layers()
    engine = Engine(model, verify="never")
    for step in range(STEPS):
        owners = (torch.arange(13) * (step + 1) + step) % SAMPLES
        assert_exact(engine, model(batch(len(owners), WIDTH), pooled, owners), model)


def test_nobody_is_there() -> None:
    """An expert without a token, and samples without a word."""
    model = Layers()
    engine = Engine(model, verify="never")
    for step in range(STEPS):
        owners = owners_of(step)
        if step % 3 == 2:
            owners = owners[owners == step % SAMPLES]
        elif step % 3 == 1:
            owners = owners[:0]
        assert_exact(engine, model(batch(len(owners), WIDTH), pooled, owners), model)
