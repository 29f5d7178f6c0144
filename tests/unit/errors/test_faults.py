"""Faults in the middle of a step: what is not finite, interrupted, too large, empty or single."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    MemoryLimitError,
    MixedSamplesError,
    UnverifiedWarning,
)
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, features
from tests.unit.engines import (
    assert_exact,
    assert_nothing_is_left,
    assert_works,
    batch,
    mlp,
    per_sample,
)
from tests.unit.faults import SHORTAGES, Fault, spread


class Sequence(nn.Module):
    """Samples in the first dimension, in the second, folded with positions, and looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Parameter(batch(3, 4)), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x) + self.table).transpose(0, 1)
        x = x + self.attention(x, x, x)[0]
        return self.last(self.norm(x).flatten(0, 1)).unflatten(0, (3, -1)).transpose(0, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (mlp, (3,)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten()), (2, 3, 3)),
    "sequence": (Sequence, (3, 4)),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "(B,)": lambda y: per_sample(y),
    "(B, K)": lambda y: features(y, 3),
}


@pytest.mark.filterwarnings("ignore:The Gramian cannot be verified:autogram.UnverifiedWarning")
@pytest.mark.parametrize("bad", [[1], [0, 3], [0, 1, 2, 4]], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("name", MODELS)
class TestNotFinite:
    """Losses of some samples that are not finite: only their rows and columns are concerned."""

    def test_at_the_first_call(self, name: str, losses: str, value: float, bad: list[int]) -> None:
        """The samples are found by the others; the next call looks again."""
        make, shape = MODELS[name]
        model, of = make(), LOSSES[losses]
        engine = Engine(model, batch_dim=0)
        factors = torch.ones(5)
        factors[bad] = value
        clean = of(model(batch(5, *shape)))
        hidden = clean * factors.view(-1, *(1,) * (clean.dim() - 1))
        assert_only_these_are_hidden(engine.compute_gramian(hidden), clean, model, bad)
        assert_exact(engine, of(model(batch(5, *shape))), model)

    def test_at_a_later_call(self, name: str, losses: str, value: float, bad: list[int]) -> None:
        make, shape = MODELS[name]
        model, of = make(), LOSSES[losses]
        engine = Engine(model, batch_dim=0)
        for _ in range(4):
            assert_exact(engine, of(model(batch(5, *shape))), model)
            clean = of(model(batch(5, *shape)))
            factors = torch.ones(5)
            factors[bad] = value
            hidden = clean * factors.view(-1, *(1,) * (clean.dim() - 1))
            assert_only_these_are_hidden(engine.compute_gramian(hidden), clean, model, bad)

    def test_in_the_inputs(self, name: str, losses: str, value: float, bad: list[int]) -> None:
        """Where plain autograd, row by row, would multiply it by zero and lose all rows."""
        make, shape = MODELS[name]
        model, of = make(), LOSSES[losses]
        engine = Engine(model, batch_dim=0)
        x = batch(5, *shape)
        clean = of(model(x))
        x = x.clone()
        x[bad] = value
        gramian = engine.compute_gramian(of(model(x)))
        assert_only_these_are_hidden(gramian, clean, model, bad)


def assert_only_these_are_hidden(
    gramian: Tensor, clean: Tensor, model: nn.Module, bad: list[int]
) -> None:
    """Assert that a Gramian is exact but for some samples, whose norms are not finite."""
    jacobian = reference_jacobian(clean, model.parameters())
    expected = jacobian @ jacobian.T
    good = torch.ones_like(clean, dtype=torch.bool)
    good[bad] = False
    good = good.flatten()
    assert not gramian.diag()[~good].isfinite().any()
    assert_close_to_reference(gramian[good][:, good], expected[good][:, good])


@pytest.mark.filterwarnings("ignore:The Gramian cannot be verified:autogram.UnverifiedWarning")
class TestNotFiniteAndMixed:
    """Nothing is guessed where what is not finite hides how samples are mixed."""

    def test_a_normalisation_of_the_batch(self) -> None:
        """It carries what is not finite to all samples, and mixes them also then."""
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        x = batch(5, 3)
        x[1] = math.nan
        with pytest.raises(MixedSamplesError, match="NativeBatchNorm"):
            Engine(model, batch_dim=0).compute_gramian(per_sample(model(x)))
        with pytest.warns(CoupledObjectivesWarning), pytest.warns(UnverifiedWarning):
            gramian = Engine(model).compute_gramian(per_sample(model(x)))
        assert not gramian.isfinite().any()

    def test_losses_that_are_finite_and_gradients_that_are_not(self) -> None:
        """The root of zero: the rows of its sample are not finite, and all others are right."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        factors, good = torch.tensor([1.0, 0.0, 1.0, 1.0]), [0, 2, 3]
        squares = model(batch(4, 3)).square().sum(1)
        with pytest.warns(UnverifiedWarning):
            gramian = engine.compute_gramian((squares * factors).sqrt())
        rows = reference_jacobian(squares.sqrt(), model.parameters())[good]
        assert_close_to_reference(gramian[good][:, good], rows @ rows.T)
        assert not gramian[1].isfinite().any()
        assert_works(engine, model, batch(4, 3))

    def test_a_sample_that_another_one_reads(self) -> None:
        """The third sample reads the fourth, also where that is not finite."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)

        def losses(factors: Tensor) -> Tensor:
            y = model(x).sum(1)
            return (y + nn.functional.pad(y[3:], (2, 1))) * factors

        for factors in (torch.tensor([1.0, 1.0, 1.0, math.nan]), torch.ones(4)):
            with pytest.raises(MixedSamplesError, match=r"`2\.weight`"):
                engine.compute_gramian(losses(factors))


class Interrupting(torch.autograd.Function):
    """Ctrl-C in a backward pass, at the chosen time."""

    left = 0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, cotangent: Tensor) -> Tensor:
        Interrupting.left -= 1
        if Interrupting.left == 0:
            raise KeyboardInterrupt
        return cotangent


@pytest.mark.parametrize("losses", LOSSES)
class TestInterrupted:
    """Ctrl-C in the middle of a step: the next one is right, and nothing is left."""

    @pytest.mark.parametrize("when", [1, 2, 7])
    def test_in_the_engines_backward_pass(self, losses: str, when: int) -> None:
        """Where it finds the samples, where it assembles, and afterwards."""
        model, of = mlp(), LOSSES[losses]
        engine = Engine(model, batch_dim=0)
        Interrupting.left = when
        kept = of(model[2](Interrupting.apply(model[:2](batch(4, 3)))))
        kept = kept + of(model(batch(4, 3)))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - at any of the calls
            for _ in range(when):
                engine.compute_gramian(kept)
        assert_works(engine, model, batch(4, 3))
        assert_exact(engine, kept, model)

    def test_in_a_product(self, losses: str) -> None:
        """Anywhere: where it finds the samples, in the pass, in the contraction."""
        of = LOSSES[losses]

        def prepare() -> tuple[nn.Module, Engine, Tensor]:
            model = mlp()
            return model, Engine(model, batch_dim=0), of(model(batch(4, 3)))

        def call() -> Callable[[], Tensor]:
            _, engine, kept = prepare()
            return partial(engine.compute_gramian, kept)

        for skipped in spread(call, 12):
            model, engine, kept = prepare()
            with Fault(KeyboardInterrupt, skipped), pytest.raises(KeyboardInterrupt):
                engine.compute_gramian(kept)
            assert_exact(engine, kept, model)
            assert_works(engine, model, batch(4, 3))

    @pytest.mark.parametrize("first", ["hook", "engine"])
    def test_in_the_forward_pass(self, losses: str, first: str) -> None:
        """In the middle, and at the end, before the engine's hook or behind it."""
        model, of = mlp(), LOSSES[losses]
        if first == "hook":
            handle = model.register_forward_hook(_interrupt)
        engine = Engine(model, batch_dim=0)
        if first == "engine":
            handle = model.register_forward_hook(_interrupt)
        inner = model[1].register_forward_hook(_interrupt)
        for each in (inner, handle):
            with pytest.raises(KeyboardInterrupt):
                model(batch(4, 3))
            each.remove()
            assert_nothing_is_left(model.parameters())
        before = of(model(batch(4, 3)))
        inner = model[1].register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch(4, 3))
        inner.remove()
        assert_exact(engine, before, model)
        assert_exact(engine, of(model(batch(4, 3))), model)
        assert_works(engine, model, batch(4, 3))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


PRODUCTS: dict[str, Callable[[Engine, Tensor], Tensor]] = {
    "compute_gramian": Engine.compute_gramian,
    "jacobian": lambda engine, losses: engine.jacobian(losses).gramian(),
}


@pytest.mark.parametrize("device", SHORTAGES)
@pytest.mark.parametrize("product", PRODUCTS)
class TestMemory:
    """Memory that runs out in a product."""

    def test_another_attempt_with_less(self, product: str, device: str) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0, memory_limit_bytes=2**20)
        losses = per_sample(model(batch(4, 3)))
        jacobian = reference_jacobian(losses, model.parameters())
        with Fault(SHORTAGES[device]) as fault:
            gramian = PRODUCTS[product](engine, losses)
        assert fault.failures == 1
        assert_close_to_reference(gramian, jacobian @ jacobian.T)

    def test_an_error_that_names_a_limit(self, product: str, device: str) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0, memory_limit_bytes=2**20)
        losses = per_sample(model(batch(4, 3)))
        error = SHORTAGES[device]()
        message = rf"(?s)1,048,576 bytes.*131,072.*memory_limit_bytes={2**14}`.*{error}"
        with (
            Fault(SHORTAGES[device], times=math.inf),
            pytest.raises(MemoryLimitError, match=message),
        ):
            PRODUCTS[product](engine, losses)
        assert_exact(engine, losses, model)

    def test_another_error_passes(self, product: str, device: str) -> None:
        """At the first attempt, and at the second."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        losses = per_sample(model(batch(4, 3)))
        other = LookupError("something else")
        for errors in ([other], [SHORTAGES[device](), other]):
            left = list(errors)
            with (
                Fault(partial(left.pop, 0), times=len(errors)),
                pytest.raises(LookupError, match="something else"),
            ):
                PRODUCTS[product](engine, losses)
            assert left == []
        assert_exact(engine, losses, model)


@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
class TestSizes:
    """Losses and batches of extreme sizes."""

    def test_no_losses(self, batch_dim: Any) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=batch_dim)
        for losses in (per_sample(model(batch(0, 3))), model(batch(4, 3))[:, :0]):
            gramian = engine.compute_gramian(losses)
            assert gramian.shape == (0, 0)
            assert gramian.dtype == losses.dtype
        assert_works(engine, model, batch(4, 3))

    @pytest.mark.parametrize("losses", LOSSES)
    @pytest.mark.parametrize("name", MODELS)
    def test_a_batch_of_one(self, batch_dim: Any, name: str, losses: str) -> None:
        """First, and after larger ones."""
        make, shape = MODELS[name]
        model = make()
        engine = Engine(model, batch_dim=batch_dim)
        for samples in (1, 4, 1):
            assert_exact(engine, LOSSES[losses](model(batch(samples, *shape))), model)

    def test_a_single_loss(self, batch_dim: Any) -> None:
        model = mlp()
        if batch_dim is None:  # or it is taken for a mistake
            engine = Engine(model, batch_dim=batch_dim)
            assert_exact(engine, per_sample(model(batch(4, 3))).sum(), model)
        engine = Engine(model, batch_dim=batch_dim)
        assert_exact(engine, per_sample(model(batch(1, 3))), model)
