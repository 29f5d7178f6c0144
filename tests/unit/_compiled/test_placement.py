"""Where samples are inside of compiled parts: what is known, and what is measured each time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, VerificationError
from autogram._blocks import Folded
from autogram._capture.places.probe import Prober
from autogram._compiled import variants
from tests.unit._compiled.compiling import (
    INNER,
    Decoder,
    Images,
    assert_step,
    assert_steps,
    class_losses,
    compiled,
    language_losses,
    sequences,
)
from tests.unit.checks import trainable

pytestmark = pytest.mark.slow


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Counts the calls of nodes alone inside of a block, which find samples."""
    calls: list[int] = []
    call = Prober.gradients

    def noted(*args: Any) -> Any:
        calls.append(1)
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prober, "gradients", noted)
        yield calls


class Between(nn.Module):
    """Two layers, and something between them that moves tokens."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.LazyLinear(2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.first(x)))
        return found


# From (B, T, 4) to a tensor with the samples in its first dimension.
CARRIED: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: F.gelu(x).tanh() * x.sigmoid() + x.exp(),
    "folded tokens": lambda x: x.reshape(-1, 4).sin().view(x.shape),
    "sequence first": lambda x: (
        x.transpose(0, 1).reshape(-1, 4).relu().view(5, -1, 4).transpose(0, 1)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.unsqueeze(1),) * 3).squeeze(1),
    "matrix products": lambda x: (x @ x.transpose(1, 2)).softmax(2) @ x,
    "matrices from the left": lambda x: torch.ones(6, 5) @ x,
    "sums": lambda x: x.sum(1, keepdim=True) + x.mean((1, 2)).view(-1, 1, 1),
    "slices": lambda x: torch.cat(
        [x[:, 1:3], x[:, :1], x[..., 0].unsqueeze(1).expand(-1, 2, 5)[..., :4]], 1
    ),
    "parts": lambda x: (
        torch.stack(x.unbind(1)[:2], 1) * x.split([2, 2, 1], 1)[1].sum(1, keepdim=True)
    ),
    "padding": lambda x: F.pad(x, (0, 0, 1, 1)),
    "norms": lambda x: F.layer_norm(x, (4,)) + F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "pooling": lambda x: F.max_pool2d(x.unsqueeze(1), 2).flatten(1),
    "convolutions": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3)).transpose(1, 2),
    "gathered": lambda x: x.gather(1, torch.tensor([3, 1]).view(1, 2, 1).expand(len(x), 2, 4)),
    "cumulated": lambda x: x.cumsum(1),
}
# Where the values of an index, or of the samples, decide.
MEASURED: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "sorted": lambda x: x[x[:, 0, 0].argsort()],
    "shuffled": lambda x: x[torch.arange(len(x) - 1, -1, -1)],
}


NORMS = pytest.param(
    "norms",
    marks=pytest.mark.xfail(
        torch.__version__ >= "2.14",
        raises=RuntimeError,
        reason="PyTorch's own aot_eager views a cotangent that has other strides than in its trace",
    ),
)


class TestWithinOnePart:
    """Places that follow from sizes alone cost nothing; others are measured in each step."""

    @pytest.mark.parametrize("name", [NORMS if x == "norms" else x for x in (*CARRIED, *MEASURED)])
    def test_steps(self, name: str) -> None:
        model = Between({**CARRIED, **MEASURED}[name])
        model(torch.randn(4, 5, 3))
        engine = Engine(model, unseen="error", verify="never")
        run = compiled(model)
        for step in range(3):
            (x,) = (torch.randn(4, 5, 3),)
            losses_of = lambda y: y.square().flatten(1).sum(1)  # noqa: E731
            with engine.paused():
                expected = losses_of(model(x))
            with counted_calls() as calls:
                assert_step(engine, losses_of(run(x)), expected, trainable(model))
            assert bool(calls) == (step == 0 or name in MEASURED)

    @pytest.mark.parametrize("inner", INNER)
    def test_models(self, inner: str) -> None:
        for model, batch, losses_of in (
            (Decoder(layers=1), sequences(4, 6), language_losses),
            (Images(), (torch.randn(6, 3, 8, 8),), class_losses),
        ):
            engine = Engine(model, verify="never")
            run = compiled(model, inner)
            engine.compute_gramian(losses_of(run(*batch), *batch))  # type: ignore[operator]
            with counted_calls() as calls:
                engine.compute_gramian(losses_of(run(*batch), *batch))  # type: ignore[operator]
            assert not calls


class Ordered(nn.Module):
    """A model that is given an order of the samples, or a mask of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = x[order] if order.dim() == 1 else order @ x
        found: Tensor = self.last(x)
        return found


@pytest.mark.parametrize("as_matrix", [False, True])
def test_values_that_change(as_matrix: bool) -> None:
    """An index, or a matrix, that moves samples to other places in each step."""
    model = Ordered()
    engine = Engine(model, unseen="error", verify="never")
    orders = [torch.randperm(4) for _ in range(4)]
    batches = [(torch.randn(4, 3), torch.eye(4)[o] if as_matrix else o) for o in orders]
    assert_steps(model, compiled(model), engine, batches, lambda y, *_: y.square().sum(1))


def test_several_parts() -> None:
    """Samples go through one part into another."""
    body, head = Between(CARRIED["folded tokens"]), nn.Linear(2, 2)
    body(torch.randn(4, 5, 3))
    engine = Engine(body, head, unseen="error", verify="never")
    runs = compiled(body), compiled(head)
    for step in range(3):
        x = torch.randn(4, 5, 3)
        losses = runs[1](runs[0](x).sin()).square().flatten(1).sum(1)
        with engine.paused():
            expected = head(body(x).sin()).square().flatten(1).sum(1)
        with counted_calls() as calls:
            parameters = [*body.parameters(), *head.parameters()]
            assert_step(engine, losses, expected, parameters)
        assert bool(calls) == (step == 0)


def test_verification_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in eager mode: a rule that is wrong is found, and named."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model, batch_dim=0)
    run = compiled(model)
    taps = variants.Backward._taps

    def doubled(self: variants.Backward, args: list[Tensor], *rest: object) -> object:
        return taps(self, [x * 2 if x.is_floating_point() else x for x in args], *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(variants.Backward, "_taps", doubled)
    with pytest.raises(VerificationError, match=r"`0\.weight`"):
        engine.compute_gramian(run(torch.randn(4, 3)).square().sum(1))


@pytest.mark.parametrize(
    ("place", "old", "new", "expected"),
    [
        (Folded(0, 1, 4, 1), (4, 5, 6), (20, 6), Folded(0, 1, 4, 5)),
        (Folded(1, 1, 4, 1), (5, 4, 6), (20, 6), Folded(0, 5, 4, 1)),
        (Folded(0, 5, 4, 1), (20, 6), (5, 4, 6), Folded(1, 1, 4, 1)),
        (Folded(0, 1, 4, 5), (20, 6), (4, 5, 6), Folded(0, 1, 4, 1)),
        (Folded(0, 1, 4, 1), (4, 6), (4, 1, 2, 3), Folded(0, 1, 4, 1)),
        (Folded(0, 1, 4, 1), (4, 6), (2, 2, 6), None),
        (Folded(0, 1, 4, 1), (4, 6), (8, 3), Folded(0, 1, 4, 2)),
    ],
)
def test_places_in_other_shapes(
    place: Folded, old: tuple[int, ...], new: tuple[int, ...], expected: Folded | None
) -> None:
    """As many elements before the samples, and behind them."""
    assert place.reshaped(old, new) == expected
