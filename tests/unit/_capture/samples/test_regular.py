"""Regular places that several layouts fit: nodes in front of them tell which is right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import assert_exact, batch, counted_passes

WIDTH = 3


class Tokens(nn.Module):
    """Layers on tokens, of which the losses read some."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.first, self.mix, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x)).tanh() + self.mix(x.mean(1, keepdim=True))
        return self.head(self.read(x + self.last(x).sin()))


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda x: x[:, 0], id="class token"),
        pytest.param(lambda x: x[:, -1], id="last token"),
        pytest.param(lambda x: x[:, 1:2].flatten(1), id="slice"),
    ],
)
def test_one_token_of_each_sample(read: Callable[[Tensor], Tensor]) -> None:
    """With T = q a tokens, q = 1 modulo B, token t of sample s is at (s T + t) // a = s modulo B.

    So it is where it would be with samples along a dimension of q x B x a places, too.
    """
    model = Tokens(read)
    engine = Engine(model, batch_dim=0, verify="never")
    seen = set()
    for samples, tokens in [(4, 5), (4, 5), (2, 9), (4, 15), (4, 5), (3, 4), (2, 9), (4, 15)]:
        losses = model(batch(samples, tokens, WIDTH)).square().sum(1)
        with counted_passes(losses) as passes:
            gramian = engine.compute_gramian(losses)
        jacobian = reference_jacobian(losses, trainable(model))
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        if (samples, tokens) in seen:
            assert len(passes) == 1
        seen.add((samples, tokens))


def test_other_tokens_in_a_later_step() -> None:
    """What was read of one token is read of all of them, and of another one."""
    model = Tokens(lambda x: x[:, 0])
    engine = Engine(model, batch_dim=0, verify="never")
    reads = [lambda x: x[:, 0], lambda x: x.mean(1), lambda x: x[:, 2], lambda x: x[:, :2].sum(1)]
    for read in reads * 2:
        model.read = read
        losses = model(batch(4, 5, WIDTH)).square().sum(1)
        assert_exact(engine, losses, model)


def test_masks_of_tokens_in_a_later_step() -> None:
    """At first they leave the class tokens alone, where two layouts fit."""
    mask = torch.zeros(4, 5, 1)
    mask[:, 0] = 1
    model = Tokens(lambda x: (x * mask).sum(1))
    engine = Engine(model, batch_dim=0, verify="never")
    for step in range(6):
        losses = model(batch(4, 5, WIDTH)).square().sum(1)
        assert_exact(engine, losses, model)
        mask[:, step % 5] = 1 - mask[:, step % 5]
        mask[:, 1] = 1


@pytest.mark.parametrize("samples", [2, 3])
def test_labels_that_are_a_permutation_at_first(samples: int) -> None:
    """As if the samples lay along the classes. Later steps look again, at the fourth search."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, samples))
    engine = Engine(model, batch_dim=0, verify="never")
    found = []
    for step in range(8):
        labels = torch.arange(samples) if step < 2 else torch.arange(samples) % step // 2
        outputs = model(batch(samples, WIDTH)).log_softmax(1)
        losses = nn.functional.nll_loss(outputs, labels, reduction="none")
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        found.append(len(passes))
        assert_exact(engine, losses, model)
    assert found[-3:] == [1] * 3, found
