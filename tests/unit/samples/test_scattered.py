"""Samples that have elements of their own, and along no dimension places of their own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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
    irregular,
    trainable,
)
from tests.unit.engines import assert_exact, batch, counted_passes, per_sample

AS_SAMPLES = Objectives("(B,) given", PER_SAMPLE.of, batch_dim=0)
EVERY_KIND = [AS_SAMPLES, PER_SAMPLE, SEVERAL, SECOND, COUPLED]


def swapped(h: Tensor) -> Tensor:
    """The first token of each sample is that of the row before, as class tokens of frames are."""
    return torch.cat([h[:, :1].roll(1, 0), h[:, 1:]], 1)


class Swapped(nn.Module):
    """A layer, after which the first tokens go to other samples; and others around it."""

    def __init__(self, layer: nn.Module, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4) if first is None else first
        self.layer, self.last = layer, nn.LazyLinear(2)
        self(torch.ones(1, 5, 4))  # the last one takes its shape

    def forward(self, x: Tensor) -> Tensor:
        return self.last(swapped(self.layer(self.first(x))).tanh())


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return swapped(self.table(tokens)).tanh()


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(irregular(1, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions


class Join(nn.Module):
    """A class token, joined to every row."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(irregular(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1)


class WithoutRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(irregular(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp(x, self.weight)


class OfTokens(nn.Module):
    """A convolution whose channels are the tokens: along them no samples can be."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "added": lambda: Swapped(Add()),
    "joined": lambda: Swapped(Join()),
    "joined, then added": lambda: Swapped(nn.Sequential(Add(), Join())),
    "linear": lambda: Swapped(nn.Linear(4, 4)),
    "linear, twice": lambda: Swapped(nn.Sequential(*[nn.Linear(4, 4)] * 2)),
    "normed": lambda: Swapped(nn.LayerNorm(4)),
    "normed in groups": lambda: Swapped(nn.GroupNorm(5, 5)),
    "convolution": lambda: Swapped(OfTokens(), nn.Identity()),
    "without a rule": lambda: Swapped(WithoutRule()),
}


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("samples", [2, 3, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_first_tokens_of_other_samples(name: str, samples: int, objectives: Objectives) -> None:
    assert_gramian_is_exact(LAYERS[name], batch(samples, 5, 4), objectives=objectives)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
def test_reads_of_a_table(objectives: Objectives) -> None:
    assert_gramian_is_exact(Table, torch.randint(7, (4, 5)), objectives=objectives)


@pytest.mark.parametrize("name", LAYERS)
def test_series_of_steps(name: str) -> None:
    """With other numbers of samples, and another order at each step."""
    model = LAYERS[name]()
    engine = Engine(model, batch_dim=0, verify="never")
    for samples in (4, 4, 3, 4, 1, 5, 4):
        order = torch.randperm(samples)
        assert_exact(engine, per_sample(model(batch(samples, 5, 4))[order]), model)


def test_tokens_that_stay_and_go() -> None:
    """The same calls with samples that are in rows, and then do not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, order: Tensor) -> Tensor:
            h = self.layer(x)
            return torch.cat([h[:, :1][order], h[:, 1:]], 1)

    model = Model()
    engine = Engine(model, batch_dim=0, verify="never")
    same = torch.arange(4)
    for order in (same, same.roll(1), same, same.flip(0), same.roll(2), same):
        assert_exact(engine, per_sample(model(batch(4, 5, 4), order)), model)


def test_passes_of_a_step() -> None:
    """One, from the first step on."""
    model = LAYERS["added"]()
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(2):
        losses = per_sample(model(batch(8, 5, 4)))
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        assert len(passes) == 1


def test_products_with_the_jacobian() -> None:
    model = LAYERS["joined, then added"]()
    engine = Engine(model, batch_dim=0)
    losses = per_sample(model(batch(4, 5, 4)))
    expected = reference_jacobian(losses, trainable(model))
    jacobian = engine.jacobian(losses)
    assert_close_to_reference(jacobian.dense(), expected)
    assert_close_to_reference(jacobian.row_norms(), expected.norm(dim=1))


def test_report() -> None:
    model = LAYERS["added"]()
    engine = Engine(model, batch_dim=0)
    engine.compute_gramian(per_sample(model(batch(4, 5, 4))))
    (found,) = (of for of in engine.report().parameters if of.name == "layer.positions")
    assert [use.layout for use in found.uses] == ["single elements (4 samples, scattered)"]


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "in every element": lambda h: h - h.mean(0),
    "in few elements": lambda h: h[:, 0] + 0.5 * h[:, 0].roll(1, 0),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", MIXING)
def test_mixed_samples_are_refused(name: str) -> None:
    """Samples that meet in an element are coupled, which is found out once."""
    layer = nn.Linear(4, 3)
    strict = Engine(layer, batch_dim=0)
    losses = per_sample(MIXING[name](layer(batch(4, 5, 4))))
    with pytest.raises(MixedSamplesError, match="linear"):
        strict.compute_gramian(losses)
    strict.remove()
    engine = Engine(layer, verify="never")
    losses = per_sample(MIXING[name](layer(batch(4, 5, 4))))
    with pytest.warns(CoupledObjectivesWarning):
        gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, layer.parameters())
    assert_close_to_reference(gramian, jacobian @ jacobian.T)
    losses = per_sample(MIXING[name](layer(batch(4, 5, 4))))
    with counted_passes(losses) as passes:
        engine.compute_gramian(losses)
    assert len(passes) == len(losses)  # and none that searches


@pytest.mark.parametrize("steps", [1, 2])
def test_one_sample_that_is_not_finite(steps: int) -> None:
    model = LAYERS["added"]()
    engine = Engine(model, batch_dim=0, verify="never")
    factors = torch.ones(4)
    for step in range(steps):
        if step == steps - 1:
            factors[2] = torch.inf
        x = batch(4, 5, 4)
        gramian = engine.compute_gramian(per_sample(model(x)) * factors)
    jacobian = reference_jacobian(per_sample(model(x)), trainable(model))
    good = [0, 1, 3]
    expected = (jacobian @ jacobian.T)[good][:, good]
    assert_close_to_reference(gramian[good][:, good], expected)
    assert not gramian[2].isfinite().any()


class Packed(nn.Module):
    """Attention within sequences, of which several are one behind the other in each row."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.table, self.layer, self.last = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.middle = nn.Identity() if middle is None else middle

    def forward(self, tokens: Tensor, is_own: Tensor) -> Tensor:
        h = self.middle(self.table(tokens))
        weights = (h @ h.mT).masked_fill(~is_own, -torch.inf).softmax(-1)
        return self.last(self.layer(weights @ h).tanh())


class Places(nn.Module):
    """A parameter for each place of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(irregular(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions


class ByPlace(nn.Module):
    """A product that has a constant for each place of a row among its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(irregular(4))
        self.register_buffer("of_place", irregular(9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("rtd,t,d->rtd", x, self.of_place, self.weight)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "plain": nn.Identity,
    "norm": lambda: nn.LayerNorm(4),
    "parameter for each place": Places,
    "constant for each place": ByPlace,
    "without a rule": WithoutRule,
    "network of values": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)),
}


def in_rows(step: int) -> tuple[Tensor, Tensor]:
    """Of each place of four rows, the sequence; and which places are of the same one."""
    sizes = torch.tensor([[2, 4, 3], [4, 1, 4], [3, 3, 3], [1, 6, 2]])[torch.randperm(4)]
    sizes = sizes.roll(step, 1)
    owners = torch.arange(12).repeat_interleave(sizes.flatten()).view(4, 9)
    return owners, owners.unsqueeze(1) == owners.unsqueeze(2)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("middle", MIDDLES)
def test_sequences_in_several_rows(middle: str, several: bool) -> None:
    """Packed anew in each step, for which no further pass is made."""
    model = Packed(MIDDLES[middle]())
    engine = Engine(model, verify="never")
    for step in range(10):
        owners, is_own = in_rows(step)
        terms = model(torch.randint(7, (4, 9)), is_own).square().flatten(0, 1)
        losses = torch.zeros(12, 2).index_add(0, owners.flatten(), terms)
        losses = losses if several else losses.sum(1)
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        if not several:
            assert len(passes) == 1
        assert_exact(engine, losses, model)
    uses = {of.name: of.uses[0].layout for of in engine.report().parameters}
    assert uses["last.weight"] == "dimensions 0, 1 (36 places of 12 samples, routed)"
    if middle == "parameter for each place":
        assert uses["middle.positions"] == "single elements (12 samples, scattered)"


def test_empty_sequences_in_several_rows() -> None:
    """Some have no place, and some places are of none."""
    model = Packed()
    engine = Engine(model, verify="never")
    for step in range(5):
        owners, _ = in_rows(step)
        owners = torch.where(owners % 5 == step, -1, owners)
        is_own = owners.unsqueeze(1) == owners.unsqueeze(2)
        terms = model(torch.randint(7, (4, 9)), is_own).square().sum(2).flatten()
        has = owners.flatten() >= 0
        losses = torch.zeros(12).index_add(0, owners.flatten()[has], terms[has])
        assert_exact(engine, losses, model)


class Joined(nn.Module):
    """A vector of a parameter and of the samples, along which the rule lets no samples lie."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(irregular(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.weight, x.sin()])
        return y[:4].sin() * y[4:]


def test_a_call_whose_rule_lets_no_samples_lie_in_its_result() -> None:
    model = Joined()
    engine = Engine(model, batch_dim=0, verify="never")
    for _ in range(3):
        assert_exact(engine, model(batch(4)), model)
