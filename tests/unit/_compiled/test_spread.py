"""Parameters that are expanded over the samples, in compiled parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import CoupledObjectivesWarning, Engine
from autogram._capture.tracked import Tracked
from autogram._compiled.call import PartCall
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import (
    INNER,
    assert_steps,
    compile_inside,
    compiled,
    counted_parts,
)
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import batch, per_sample
from tests.unit.environment import DEVICE
from tests.unit.samples.test_spread import QUERIES, SPREADS, WIDTH, Decoder, by_heads, linear

pytestmark = pytest.mark.slow


def steps(*sizes: int) -> list[tuple[Tensor]]:
    """Batches of so many samples."""
    return [(batch(samples, 6, WIDTH),) for samples in sizes]


def losses_of(output: Tensor, *_: Tensor) -> Tensor:
    return per_sample(output)


class Layer(nn.Module):
    """Queries that look for something, which another layer may have found."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(WIDTH), linear(), linear()

    def forward(self, own: Tensor, x: Tensor) -> Tensor:
        own = self.norm(own)
        return (own + F.scaled_dot_product_attention(self.query(own), self.key(x), x)).tanh()


@contextmanager
def read_inside() -> Iterator[list[Tracked]]:
    """Collects the tensors that the uses of calls of parts read."""
    found: list[Tracked] = []
    all_uses = PartCall.all_uses

    def noted(self: PartCall, node: Any) -> Any:
        uses = all_uses(self, node)
        found.extend(tracked for use in uses if use for tracked in use.reads)
        return uses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartCall, "all_uses", noted)
        yield found


@pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, None) for name in SPREADS), *((x, True) for x in ("expand", "tile", "positions"))],
)
def test_series_of_batches(name: str, dynamic: bool | None, inner: str) -> None:
    """Nothing is derived for each sample, and nothing is compiled anew for a guess."""
    model = Decoder(SPREADS[name])
    engine = Engine(model, verify="never")
    run = compiled(model, inner, dynamic=dynamic)
    with counted_parts() as parts:
        for samples in (7, 5, QUERIES, 7):
            with read_inside() as read:
                assert_steps(model, run, engine, steps(samples), losses_of)
            assert read
            if samples == 7:
                assert all(samples not in tracked.shape for tracked in read)
            assert "one sample" not in str(engine.report())
    assert len(parts) == (1 if dynamic else 2)


def are_coupled(model: nn.Module, run: Any, engine: Engine, batches: Sequence[Any]) -> list[bool]:
    """Whether samples were taken for one in each of some steps, which are right."""
    found = []
    for x in batches:
        parameters = trainable(model)
        with engine.paused():
            expected = reference_jacobian(losses_of(model(*x)), parameters)
        losses = losses_of(run(*x))
        assert_close_to_reference(engine.compute_gramian(losses), expected @ expected.T)
        found.append("one sample" in str(engine.report()))
        weights = torch.linspace(0.5, 2.0, len(losses)).to(losses)
        for differentiate in (
            lambda losses=losses, weights=weights: losses.backward(weights),
            lambda x=x, weights=weights: engine.backward(losses_of(run(*x)), lambda _: weights),
        ):
            model.zero_grad()
            differentiate()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([x.flatten() for x in gradients])
            assert_close_to_reference(flat, expected.T @ weights)
    return found


class ByLength(Decoder):
    """Expands its queries to the length of the inputs, over which a mean is taken."""

    def __init__(self) -> None:
        super().__init__(lambda model, _: model.queries.weight)

    def forward(self, x: Tensor) -> Tensor:
        own = self.norm(self.queries.weight.expand(x.shape[1], -1, -1)).mean(0)
        own = own.expand(len(x), -1, -1)
        found = F.scaled_dot_product_attention(self.query(own), self.key(x), x)
        return (own + found).tanh()


@pytest.mark.parametrize("inner", INNER)
def test_sizes_that_happen_to_be_equal(inner: str) -> None:
    """A wrong guess is taken back where the part is compiled anew."""
    model = Decoder(by_heads)
    engine = Engine(model, verify="never")
    run = compiled(model, inner)
    with counted_parts() as parts:
        coupled = are_coupled(model, run, engine, steps(4, 4, 4, 5, 4, 3))
    assert coupled == [True, False, False, False, False, False]
    assert len(parts) == 3  # with the guess, without, and for other sizes


@pytest.mark.nightly
@pytest.mark.parametrize("inner", INNER)
def test_open_sizes_that_happen_to_be_equal(inner: str) -> None:
    """The number of samples and the length are one symbol, as they are equal at first."""
    model = ByLength()
    engine = Engine(model, verify="never")
    run = compiled(model, inner, dynamic=True)
    shapes = ((6, 6), (5, 5), (7, 7), (5, 6), (6, 6), (4, 4), (6, 5))
    with counted_parts() as parts:
        coupled = are_coupled(model, run, engine, [(batch(*x, WIDTH),) for x in shapes])
    assert coupled == [True] + 6 * [False]
    assert len(parts) == 3  # the last, where the sizes are different


def test_layers_that_are_compiled_apart() -> None:
    """The queries are expanded outside of compiled layers, or in another part."""

    class Layers(nn.Module):
        def __init__(self, spread: Callable[[Any, int], Tensor], *, has_break: bool) -> None:
            super().__init__()
            self.queries, self.norm = nn.Embedding(QUERIES, WIDTH), nn.LayerNorm(WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.spread, self.has_break = spread, has_break

        def forward(self, x: Tensor) -> Tensor:
            own, x = self.spread(self, len(x)), x.exp()
            if self.has_break:
                torch._dynamo.graph_break()
            for layer in self.layers:
                own = layer(own, x)
            return own

    for spread in (SPREADS["expand"], by_heads):
        for is_regional in (True, False):
            torch._dynamo.reset()
            model = Layers(spread, has_break=not is_regional)
            engine = Engine(model, verify="never")
            run: Any = model
            if is_regional:
                for layer in model.layers:
                    compile_inside(layer)
            else:
                run = compiled(model)
            coupled = are_coupled(model, run, engine, steps(4, 4, 7, 4, 7))
            assert coupled == [spread is by_heads] + 4 * [False]


@pytest.mark.parametrize("spread", [SPREADS["expand"], by_heads])
def test_several_engines(spread: Any) -> None:
    """What one engine has taken back, no other is misled by."""
    model = Decoder(spread)
    engines = [Engine(model, verify="never"), Engine(model.queries, model.norm, verify="never")]
    run = compiled(model)
    for number, x in enumerate(steps(4, 4, 4, 4, 6, 6, 4, 4)):
        engine, parameters = engines[number % 2], trainable(model)
        if number % 2:
            parameters = [*model.queries.parameters(), *model.norm.parameters()]
        with engines[0].paused(), engines[1].paused():
            expected = reference_jacobian(losses_of(model(*x)), parameters)
        gramian = engine.compute_gramian(losses_of(run(*x)))
        assert_close_to_reference(gramian, expected @ expected.T)
        assert ("one sample" in str(engine.report())) == (spread is by_heads and number == 0)


def test_losses_that_are_coupled() -> None:
    """Where samples are mixed, guesses are taken back first, and the user is told then."""
    model = Decoder(SPREADS["expand"])
    engine = Engine(model, verify="never")
    run = compiled(model)

    def step() -> None:
        ((x,),) = steps(5)
        with engine.paused():
            expected = reference_jacobian(mixed(model(x)), trainable(model))
        gramian = engine.compute_gramian(mixed(run(x)))
        assert_close_to_reference(gramian, expected @ expected.T)

    def mixed(output: Tensor) -> Tensor:
        return per_sample(output - output.mean(0))

    step()
    with pytest.warns(CoupledObjectivesWarning):
        step()


@pytest.mark.parametrize("spread", [SPREADS["expand"], SPREADS["positions"], by_heads])
def test_surroundings(spread: Any) -> None:
    """Graphs that are compiled again may hold checkpoints and autocast."""

    class Surrounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.bias = Decoder(spread), nn.Parameter(batch(WIDTH))
            self.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            found: Tensor = checkpoint(self.decoder, x, use_reentrant=False)
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=False):
                found = found + self.bias.expand(len(x), 1, -1) * 2 * self.scale
            with torch.no_grad():
                factor = self.decoder.norm.weight.exp()
            return (self.decoder.query(found) + spread(self.decoder, len(x))) * factor

    model = Surrounded()
    engine = Engine(model, verify="never")
    run = compiled(model)
    coupled = are_coupled(model, run, engine, steps(4, 4, 6, 4, 5))
    assert coupled == [spread is by_heads] + 4 * [False]


@pytest.mark.parametrize("samples", [4, 5, 6])
def test_frozen_tables_with_as_many_rows_as_samples(samples: int) -> None:
    """A table of positions that is not trained is no input, whatever its sizes are."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(batch(1, 5, WIDTH), requires_grad=False)
            self.scale, self.layer = nn.Parameter(batch(WIDTH)), linear()
            self.token = nn.Parameter(batch(1, 1, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            own = (self.table * self.scale).tanh()
            own = torch.cat([self.token.expand(len(x), -1, -1), own + x], 1)
            return self.layer(own).tanh()

    model = Table()
    engine = Engine(model, verify="never")
    run = compiled(model)
    for count in (samples, 7):
        x = batch(count, 5, WIDTH)
        assert are_coupled(model, run, engine, [(x,), (x,)]) == [False, False]
