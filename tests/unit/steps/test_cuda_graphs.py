"""Steps in CUDA graphs: what a captured step may not do, and what its replays are asked for.

Without a GPU, a captured step is a step that is told so: it may read nothing on the host.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from autogram import Engine, StaleCaptureError, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit._blocks.kernels.as_on_a_gpu import contract_as_on_a_gpu
from tests.unit._capture.captured import captured
from tests.unit.waits import Waits


class Gathered(nn.Module):
    """Positions are looked up by index values, which decide where the samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        flat = self.table(tokens).flatten(0, 1)  # (b t, 4)
        return self.linear(flat[places]).sum(1).unflatten(0, tokens.shape).sum(1)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(20, 3)),
    )


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.linear = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.lstm(x.unsqueeze(2))[0][:, -1])

    return Last()


def language() -> nn.Module:
    """Embeddings of tokens and positions, attention, and a head that is tied to the embedding."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(5, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 50)
            self.head.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x.abs() * 10).long() % 50
            x = self.tokens(tokens) + self.places(torch.arange(5, device=x.device))
            return self.head(self.layer(x)).mean(1)

    return Language()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines contract tensors of each device as those of a GPU."""
    contract_as_on_a_gpu(monkeypatch)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("is_fused", [False, True], ids=["two passes", "fused"])
@pytest.mark.parametrize("make_model", [perceptron, convolutional, recurrent, language])
def test_captured_step_is_an_eager_one(make_model: Callable[[], nn.Module], is_fused: bool) -> None:
    """It has the same results, and reads nothing on the host."""
    model = make_model()
    engine = Engine(model, batch_dim=0)
    x, y = torch.randn(6, 5), torch.randint(3, (6,))

    def step() -> Tensor:
        model.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        if is_fused:
            _, gramian = engine.backward(losses, lambda g: g.mean(1), return_gramian=True)
        else:
            gramian = engine.compute_gramian(losses)
            losses.backward(gramian.mean(1))
        return gramian

    with Waits():  # on a GPU, reshapes have other nodes where a mode looks on
        for _ in range(3):
            step()
    engine.prepare_capture()
    for _ in range(3):
        x.normal_()
        with captured() as waits:
            gramian = step()
        assert waits.names == []
        engine.check_replays()
        gradients = [p.grad for p in model.parameters()]
        losses = F.cross_entropy(model(x), y, reduction="none")
        jacobian = reference_jacobian(losses, model.parameters())
        assert_close(gramian, jacobian @ jacobian.T)
        expected = torch.autograd.grad(losses, list(model.parameters()), gramian.mean(1))
        assert_close(gradients, list(expected))


def test_replay_with_other_places_is_told_of() -> None:
    """The answer is on the device until it is asked for, and for all replays since then."""
    model = Gathered()
    engine = Engine(model, batch_dim=0)
    tokens = torch.randint(7, (4, 3))
    places = torch.arange(12).unsqueeze(1)

    def step() -> Tensor:
        return engine.compute_gramian(model(tokens, places).square().sum(1))

    with Waits():
        for _ in range(3):
            step()
    engine.prepare_capture()
    with captured():
        step()
    engine.check_replays()
    places.copy_(places.roll(1))
    with captured():
        step()
    places.copy_(places.roll(-1))
    with captured():
        step()
    with pytest.raises(StaleCaptureError, match="its results since the last check are in doubt"):
        engine.check_replays()
    engine.check_replays()


def test_step_that_is_not_known_is_not_captured() -> None:
    """Neither the first one, nor one with other shapes, nor one that is verified."""
    model = perceptron()
    engine = Engine(model, batch_dim=0)

    def step(samples: int) -> Tensor:
        return engine.compute_gramian(model(torch.randn(samples, 5)).square().sum(1))

    with pytest.raises(UnsupportedError, match="A step cannot be captured: no step"):
        engine.prepare_capture()
    step(4)
    with captured(), pytest.raises(UnsupportedError, match="the engine is not prepared"):
        step(4)
    engine.prepare_capture()
    with (
        captured(),
        pytest.raises(UnsupportedError, match="it is not known where its samples are"),
    ):
        step(5)
    losses = model(torch.randn(4, 5)).square().sum(1)
    with captured(), pytest.raises(UnsupportedError, match="cannot be verified"):
        engine.verify(losses)
    with captured():
        step(4)
    jacobian = reference_jacobian(losses, model.parameters())
    assert_close(engine.compute_gramian(losses), jacobian @ jacobian.T)
    step(5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("is_fused", [False, True], ids=["two passes", "fused"])
@pytest.mark.parametrize("make_model", [perceptron, convolutional])
def test_replays_are_eager_steps_bit_for_bit(
    make_model: Callable[[], nn.Module], is_fused: bool
) -> None:
    """For new inputs in the same tensors."""
    model = make_model().cuda()
    engine = Engine(model, batch_dim=0)
    x, y = torch.randn(6, 5, device="cuda"), torch.randint(3, (6,), device="cuda")

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        losses = F.cross_entropy(model(x), y, reduction="none")
        if is_fused:
            return engine.backward(losses, lambda g: g.mean(1), return_gramian=True)[1]
        gramian = engine.compute_gramian(losses)
        losses.backward(gramian.mean(1))
        return gramian

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        engine.prepare_capture()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gramian = step()
    gradients = [p.grad for p in model.parameters()]
    for _ in range(4):
        x.normal_()
        graph.replay()
        found = [gramian.clone(), *(g.clone() for g in gradients if g is not None)]
        expected = [step(), *(p.grad for p in model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    engine.check_replays()
