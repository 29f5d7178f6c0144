"""Mistakes that look like a right call: each is told, with what to do instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchjd.aggregation import (
    ConFIG,
    ConstantWeighting,
    CRMOGMWeighting,
    ExcessMTLWeighting,
    GradDrop,
    Mean,
    MeanWeighting,
    MoDoWeighting,
    RandomWeighting,
    SumWeighting,
    UPGrad,
    UPGradWeighting,
)

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    InvalidOperandError,
    InvalidOptionError,
    weightings,
)
from autogram.monitor import ConflictMonitor, cosines, noise_and_signal
from autogram.plot import by_cluster, plot_cosines, plot_norms
from tests.unit.checks import features
from tests.unit.engines import assert_exact, assert_nothing_is_left, batch, mlp, per_sample

Losses = Callable[[Tensor], Tensor]

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "aggregator": (
        UPGrad,
        r"`UPGrad` is an aggregator.*Pass `UPGrad\(\)\.gramian_weighting`",
    ),
    "aggregator of rows": (ConFIG, r"`ConFIG` is an aggregator.*Pass the rows to it: .*jacobian"),
    "aggregator of columns": (GradDrop, r"`GradDrop` is an aggregator.*jacobian"),
    "aggregator of any": (Mean, r"`Mean` is an aggregator"),
    "weighting of rows": (ExcessMTLWeighting, r"`ExcessMTLWeighting` takes the rows of J"),
    "another": (MoDoWeighting, r"`MoDoWeighting` takes the rows of J.*UPGradWeighting"),
    "weighting of an aggregator": (lambda: UPGrad().weighting, r"Leave out `compute_gramian`"),
    "composition": (
        lambda: UPGradWeighting() << UPGrad().weighting.fn,
        r"Leave out `compute_gramian`",
    ),
    "smoothed": (lambda: CRMOGMWeighting(ExcessMTLWeighting()), r"`ExcessMTLWeighting` takes"),
    "smoothed composition": (
        lambda: CRMOGMWeighting(UPGrad().weighting),
        r"Leave out `compute_gramian`",
    ),
    "tensor": (lambda: torch.ones(4), r"is a Tensor.*`losses\.backward\(weights\)`"),
    "list": (lambda: [1.0] * 4, r"is a list.*function that maps"),
    "class": (
        lambda: UPGradWeighting,
        r"the class `UPGradWeighting`\. Pass .* `UPGradWeighting\(\)`",
    ),
    "nothing": (lambda: None, r"is a NoneType.*function that maps"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_weighting_of_gramians(name: str) -> None:
    """It is refused before anything is computed, and the next call is right."""
    make, message = MISTAKES[name]
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    with pytest.raises(InvalidOperandError, match=message):
        engine.backward(losses, make())
    assert_nothing_is_left(model.parameters())
    engine.backward(losses, UPGradWeighting())
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "weighting",
    [
        pytest.param(MeanWeighting(), id="mean"),
        pytest.param(SumWeighting(), id="sum"),
        pytest.param(RandomWeighting(), id="random"),
        pytest.param(ConstantWeighting(torch.arange(4.0, dtype=torch.float64)), id="constant"),
        pytest.param(UPGrad().gramian_weighting, id="of an aggregator"),
        pytest.param(UPGradWeighting() << (lambda g: g / g.diagonal().mean()), id="composition"),
        pytest.param(CRMOGMWeighting(UPGradWeighting()), id="smoothed"),
        pytest.param(nn.Sequential(nn.AvgPool1d(4), nn.Flatten(0)), id="module"),
        pytest.param(torch.diagonal, id="function"),
    ],
)
def test_what_is_one(weighting: Any) -> None:
    """The gradient is that of the weights that it returns."""
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    weights = engine.backward(losses, weighting, retain_graph=True)
    found = [p.grad.clone() for p in model.parameters()]
    expected = torch.autograd.grad(losses, list(model.parameters()), weights)
    for actual, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-10, atol=1e-10)


OPTIONS: dict[str, tuple[Callable[[Engine, Tensor], Any], str]] = {
    "limit of nothing": (
        lambda *_: Engine(mlp(), memory_limit_bytes=0),
        r"Pass a positive integer.*`2\*\*29`",
    ),
    "limit of a fraction": (lambda *_: Engine(mlp(), memory_limit_bytes=1e9), r"is 1000000000\.0"),  # type: ignore[arg-type]
    "limit in words": (lambda *_: Engine(mlp(), memory_limit_bytes="1G"), "is '1G'"),  # type: ignore[arg-type]
    "what to keep": (
        lambda engine, losses: engine.jacobian(losses, keep="all"),  # type: ignore[arg-type]
        r"`keep` is 'all'.*" + 'Pass "auto", "factors" or "rows"',
    ),
    "what to keep of micro-batches": (
        lambda engine, _: engine.accumulate(torch.diagonal, keep="row"),  # type: ignore[arg-type]
        "`keep` is 'row'",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_without_such_a_value(name: str) -> None:
    act, message = OPTIONS[name]
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    with pytest.raises(InvalidOptionError, match=message):
        act(engine, losses)


@pytest.mark.parametrize("returned", [None, [1.0] * 4, 1.0])
def test_what_is_no_tensor_of_weights(returned: Any) -> None:
    model = mlp()
    engine = Engine(model)
    with pytest.raises(InvalidOperandError, match=rf"returned a {type(returned).__name__}.*tensor"):
        engine.backward(per_sample(model(batch(4, 3))), lambda _: returned)
    assert_nothing_is_left(model.parameters())


@pytest.mark.parametrize(
    "read",
    [
        weightings.UPGrad(),
        weightings.DualProj(),
        weightings.PCGrad(),
        weightings.GradVac(),
        ConflictMonitor().observe,
        cosines,
        noise_and_signal,
        plot_cosines,
        plot_norms,
        by_cluster,
    ],
)
def test_what_is_no_gramian(read: Callable[[Any], Any]) -> None:
    """Integers gave weights that are integers, too."""
    for given, kind in [(None, "NoneType"), (torch.eye(3).long(), "Tensor of torch.int64")]:
        with pytest.raises(InvalidOperandError, match=rf"The Gramian is a {kind}.*Pass a tensor"):
            read(given)
    with pytest.raises(InvalidOperandError, match="shape"):
        read(torch.ones(3, 4))


@pytest.mark.parametrize("form", [lambda w: w * 1j, Tensor.to_sparse], ids=["complex", "sparse"])
def test_weights_of_other_numbers(form: Callable[[Tensor], Tensor]) -> None:
    """They have no gradient of the dtype of parameters, or no order."""
    model = mlp()
    engine = Engine(model)
    for call in (engine.backward, engine.weights):
        with pytest.raises(InvalidOperandError, match=r"A vector of dtype .*in a dense tensor"):
            call(per_sample(model(batch(4, 3))), lambda gramian: form(gramian.diagonal()))
    assert_nothing_is_left(model.parameters())


CALLS: dict[str, Callable[[Engine, Tensor], Any]] = {
    "gramian": lambda engine, losses: engine.compute_gramian(losses),
    "jacobian": lambda engine, losses: engine.jacobian(losses),
    "backward": lambda engine, losses: engine.backward(losses, torch.diagonal, retain_graph=True),
    "verify": lambda engine, losses: engine.verify(losses),
}


class TestReducedLosses:
    """A mean over the batch, where losses of samples are expected."""

    @pytest.mark.parametrize("batch_dim", ["auto", 0])
    @pytest.mark.parametrize("name", CALLS)
    def test_warns_once_at_the_line_of_the_user(self, name: str, batch_dim: Any) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=batch_dim)
        loss = per_sample(model(batch(4, 3))).mean()
        with pytest.warns(
            CoupledObjectivesWarning, match=r"reduction='none'.*batch_dim=None.*one number.*1 x 1"
        ) as found:
            CALLS[name](engine, loss)
        assert [warning.filename for warning in found] == [__file__]
        CALLS[name](engine, loss)
        assert_exact(engine, loss, model)

    def test_a_single_objective_may_be_meant(self) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=None)
        assert_exact(engine, per_sample(model(batch(4, 3))).mean(), model)

    def test_a_batch_of_one_sample(self) -> None:
        """The last of a data set, say."""
        model = mlp()
        engine = Engine(model)
        assert_exact(engine, per_sample(model(batch(1, 3))), model)


class TestSeveralLossesOfOneBatch:
    """Of several tasks: each depends on the whole batch."""

    @pytest.mark.parametrize(
        "losses_of",
        [
            pytest.param(lambda y: torch.stack([y.mean(), y.sin().mean()]), id="2"),
            pytest.param(lambda y: features(y, 3).mean(0), id="as many as features"),
            pytest.param(lambda y: features(y, 5).mean(0), id="5"),
        ],
    )
    def test_the_message_says_so(self, losses_of: Losses) -> None:
        model = mlp()
        engine = Engine(model)
        losses = losses_of(model(batch(8, 3)))
        with pytest.warns(CoupledObjectivesWarning) as found:
            gramian = engine.compute_gramian(losses)
        message = str(found[0].message)
        assert "whole batch" in message
        assert "`batch_dim=None`" in message
        assert "normalisation" not in message
        assert len(message.split()) < 50
        assert gramian.shape == 2 * losses.shape

    def test_samples_that_are_mixed_get_another(self) -> None:
        """As many losses as samples: something couples them, and the message says where."""
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        engine = Engine(model)
        with pytest.warns(CoupledObjectivesWarning, match=r"samples are mixed.*normalisation"):
            engine.compute_gramian(per_sample(model(batch(8, 3))))
