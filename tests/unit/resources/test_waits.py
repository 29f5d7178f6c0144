"""In the steady state, no step waits for the device: nothing is read on the host."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from tests.unit._blocks.kernels.as_on_a_gpu import contract_as_on_a_gpu
from tests.unit._weights.as_on_a_gpu import look_as_on_a_gpu
from tests.unit.waits import Waits

Batch = tuple[tuple[Tensor, ...], Tensor]


class Language(nn.Module):
    """Tokens and positions, attention with a mask, dropout, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 50)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(5, device=tokens.device))
        return self.head(self.layer(x, src_key_padding_mask=mask)).mean(1)


class Gathered(nn.Module):
    """Positions are looked up by index values, which decide where the samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        flat = self.table(tokens).flatten(0, 1)
        return self.linear(flat[places]).sum(1).unflatten(0, tokens.shape).sum(1)


def of_vectors() -> Batch:
    return (torch.randn(6, 5),), torch.randint(3, (6,))


def of_images() -> Batch:
    return (torch.randn(6, 2, 7, 7),), torch.randint(3, (6,))


def of_tokens() -> Batch:
    mask = torch.arange(5) >= torch.randint(1, 6, (6, 1))
    return (torch.randint(50, (6, 5)), mask), torch.randint(50, (6,))


def of_places() -> Batch:
    return (torch.randint(7, (4, 3)), torch.arange(12).unsqueeze(1)), torch.randint(3, (4,))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)),
        of_vectors,
    ),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16, 3)),
        ),
        of_images,
    ),
    "language model": (Language, of_tokens),
}


def take(engine: Engine, model: nn.Module, batch: Batch, *, is_fused: bool) -> None:
    """One step."""
    inputs, targets = batch
    losses = F.cross_entropy(model(*inputs), targets, reduction="none")
    if is_fused:
        engine.backward(losses, lambda gramian: gramian.mean(1))
    else:
        losses.backward(engine.compute_gramian(losses).mean(1))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines contract tensors of each device, and look at weights, as on a GPU."""
    contract_as_on_a_gpu(monkeypatch)
    look_as_on_a_gpu(monkeypatch)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("is_fused", [False, True], ids=["two passes", "fused"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_no_step_waits(problem: str, is_fused: bool) -> None:
    """But those that are verified."""
    make_model, make_batch = PROBLEMS[problem]
    model = make_model()
    engine = Engine(model, batch_dim=0)
    waiting = []
    for call in range(1, 16):
        batch = make_batch()
        with Waits() as waits:
            take(engine, model, batch, is_fused=is_fused)
        if waits.names:
            waiting.append(call)
    assert waiting == [1, 2, 4, 8]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_index_values_are_compared_on_the_device() -> None:
    """One truth value is read for all of them; on a GPU, behind the backward pass alone."""
    model = Gathered()
    engine = Engine(model, batch_dim=0)
    for _ in range(5):
        take(engine, model, of_places(), is_fused=False)
    with Waits() as waits:
        take(engine, model, of_places(), is_fused=False)
    assert set(waits.names) == {"aten::_local_scalar_dense"}
    assert len(waits.names) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to wait for")
@pytest.mark.parametrize("is_fused", [False, True], ids=["two passes", "fused"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_no_step_waits_for_a_gpu(problem: str, is_fused: bool) -> None:
    """PyTorch raises where one would."""
    make_model, make_batch = PROBLEMS[problem]
    model = make_model().cuda()
    engine = Engine(model, batch_dim=0)
    for call in range(1, 8):
        inputs, targets = make_batch()
        batch = tuple(x.cuda() for x in inputs), targets.cuda()
        mode = "error" if call in (6, 7) else "default"
        torch.cuda.set_sync_debug_mode(mode)
        try:
            take(engine, model, batch, is_fused=is_fused)
        finally:
            torch.cuda.set_sync_debug_mode("default")
