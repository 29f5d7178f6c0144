"""Parameters that are expanded over the samples: queries that a decoder learns, for instance."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import CoupledObjectivesWarning, Engine, UnsupportedError
from tests.unit._capture.seen import seen_uses
from tests.unit.engines import assert_exact, batch, per_sample

QUERIES, WIDTH = 3, 4
POSITIONS = torch.arange(QUERIES).unsqueeze(0)


class Decoder(nn.Module):
    """Queries that look for something in each sample, ``(n, length, WIDTH)``."""

    def __init__(self, spread: Callable[["Decoder", int], Tensor]) -> None:
        super().__init__()
        self.queries = nn.Embedding(QUERIES, WIDTH)
        self.norm, self.query, self.key = nn.LayerNorm(WIDTH), linear(), linear()
        self._spread = spread

    def forward(self, x: Tensor) -> Tensor:
        """What the queries have found, ``(n, QUERIES, WIDTH)``."""
        own = self.norm(self._spread(self, len(x)))
        found = F.scaled_dot_product_attention(self.query(own), self.key(x), x)
        return (own + found).tanh()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


SPREADS: dict[str, Callable[[Decoder, int], Tensor]] = {
    "expand": lambda m, n: m.queries.weight.expand(n, -1, -1),
    "expand_as": lambda m, n: m.queries.weight.expand_as(torch.zeros(n, QUERIES, WIDTH)),
    "broadcast_to": lambda m, n: m.queries.weight.broadcast_to((n, QUERIES, WIDTH)),
    "second": lambda m, n: m.queries.weight.unsqueeze(1).expand(-1, n, -1).transpose(0, 1),
    "repeat": lambda m, n: m.queries.weight.unsqueeze(1).repeat(1, n, 1).movedim(1, 0),
    "tile": lambda m, n: m.queries.weight.tile(n, 1, 1),
    "derived": lambda m, n: m.key(m.queries.weight).expand(n, -1, -1),
    "positions": lambda m, n: m.queries(POSITIONS.expand(n, -1)),
    "made": lambda m, n: m.queries(torch.zeros(n, QUERIES, dtype=torch.long)),
    "changed": lambda m, n: m.queries.weight.repeat(n, 1, 1).mul_(2).add_(m.key.bias),
    "cast": lambda m, n: m.queries.weight.expand(n, -1, -1).to(torch.float64, copy=True),
}


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("name", SPREADS)
def test_series_of_batches(name: str, verify: Any) -> None:
    """No tensor is derived whose rows would be pulled back through all samples."""
    model = Decoder(SPREADS[name])
    engine = Engine(model, verify=verify)
    for samples in (5, 4, QUERIES, WIDTH, 1, 2, 5):
        with seen_uses() as seen:
            losses = per_sample(model(batch(samples, 6, WIDTH)))
        if samples == 5:
            assert seen
            assert all(5 not in tracked.shape for use in seen for tracked in use.reads)
        assert_exact(engine, losses, model)
        assert "one sample" not in str(engine.report()) or samples == 1


PHASES = torch.polar(torch.ones(QUERIES, WIDTH), torch.arange(12.0).view(QUERIES, WIDTH))
COMPLEX: dict[str, Callable[[Decoder, Tensor], Tensor]] = {
    "times_real": lambda m, phases: phases * m.queries.weight,
    "times_complex": lambda m, phases: phases * torch.view_as_complex(m.pairs),
    "matrices": lambda m, phases: phases @ (m.key.weight + 1j),
    "einsum": lambda m, phases: torch.einsum("bqi,oi->bqo", phases, 1j * m.key.weight),
    "expanded": lambda m, phases: torch.view_as_complex(m.pairs).expand_as(phases),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_constants_and_parameters(name: str) -> None:
    """Rules are for real numbers, and the samples are in the constant alone, such as a rotation."""

    def spread(model: Decoder, samples: int) -> Tensor:
        rotated = COMPLEX[name](model, PHASES.to(torch.complex128).expand(samples, -1, -1))
        return rotated.real + rotated.imag.sin()

    model = Decoder(spread)
    model.pairs = nn.Parameter(batch(QUERIES, WIDTH, 2))
    engine = Engine(model, verify="never")
    for samples in (5, 4, QUERIES):
        assert_exact(engine, per_sample(model(batch(samples, 6, WIDTH))), model)


def by_heads(model: Decoder, samples: int) -> Tensor:
    """Expanded to four heads, over which a mean is taken."""
    heads = model.norm(model.queries.weight.expand(4, -1, -1))
    return heads.mean(0).expand(samples, -1, -1)


@pytest.mark.parametrize("batch_dim", ["auto", 0])
def test_sizes_that_happen_to_be_equal(batch_dim: Any) -> None:
    """One step goes through the network for each sample, without a warning, and no other does."""
    model = Decoder(by_heads)
    engine = Engine(model, batch_dim=batch_dim)
    are_coupled = []
    for samples in (5, 4, 4, 5):
        assert_exact(engine, per_sample(model(batch(samples, 6, WIDTH))), model)
        are_coupled.append("one sample" in str(engine.report()))
    assert are_coupled == [False, True, False, False]


def test_guesses_that_only_a_detached_copy_shows() -> None:
    """No guess is made again where a call reads a copy, to which the losses do not lead back."""

    def spread(model: Decoder, samples: int) -> Tensor:
        heads = model.queries.weight.expand(4, -1, -1).detach()
        return model.query(heads).mean(0).expand(samples, -1, -1)

    model = Decoder(spread)
    engine = Engine(model)
    are_coupled = []
    for samples in (5, 4, 4, 4, 5):
        assert_exact(engine, per_sample(model(batch(samples, 6, WIDTH))), model)
        are_coupled.append("one sample" in str(engine.report()))
    assert are_coupled == [False, True, True, False, False]  # one step for each of two guesses


def test_no_capture_of_a_step_with_a_wrong_guess() -> None:
    """The next step is another one, to which the engine has seen no equal."""
    model = Decoder(by_heads)
    engine = Engine(model)
    for is_ready in (False, True, True):
        engine.compute_gramian(per_sample(model(batch(4, 6, WIDTH))))
        with nullcontext() if is_ready else pytest.raises(UnsupportedError, match="captured"):
            engine.prepare_capture()


def test_losses_that_are_coupled() -> None:
    """Where samples are mixed, the user is told so one step later."""
    model = Decoder(SPREADS["expand"])
    engine = Engine(model)

    def step() -> None:
        output = model(batch(5, 6, WIDTH))
        assert_exact(engine, per_sample(output - output.mean(0)), model)

    step()
    with pytest.warns(CoupledObjectivesWarning):
        step()


@pytest.mark.parametrize("spread", [SPREADS["expand"], SPREADS["positions"], by_heads])
def test_in_checkpoints(spread: Callable[[Decoder, int], Tensor]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.bias = Decoder(spread), nn.Parameter(batch(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.decoder, x, use_reentrant=False)
            return found + checkpoint(self.expanded, x, use_reentrant=False)

        def expanded(self, x: Tensor) -> Tensor:
            return self.bias.expand(len(x), 1, -1) * 2

    model = Checkpointed()
    engine = Engine(model)
    for samples in (5, 4, 4):
        assert_exact(engine, per_sample(model(batch(samples, 6, WIDTH))), model)


def test_positions_for_as_many_samples() -> None:
    """A row of positions is for all samples, also where there are as many."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH)
            self.layer = linear()

        def forward(self, words: Tensor, places: Tensor) -> Tensor:
            return self.layer(self.words(words) + self.places(places)).tanh()

    model = Tokens()
    engine = Engine(model, batch_dim=0)
    for samples, length in ((4, 5), (4, 4), (1, 4), (1, 1)):
        words, places = torch.randint(9, (samples, length)), torch.arange(length).unsqueeze(0)
        assert_exact(engine, per_sample(model(words, places)), model)
