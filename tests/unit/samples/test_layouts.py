"""Where the samples are in activations: found, whatever the model does with its dimensions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import CoupledObjectivesWarning, Engine
from tests.unit.checks import Objectives, assert_gramian_is_exact
from tests.unit.engines import assert_exact, batch, counted_passes, mlp, per_sample

AS_SAMPLES = Objectives("(B,)", per_sample, 0)  # raises where no samples are found


class Forward(nn.Module):
    """Some modules, and a forward pass that a test writes down."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.modules_ = nn.ModuleDict(modules)
        self.run = forward

    def forward(self, *inputs: Any) -> Tensor:
        return self.run(self.modules_, *inputs)


def _attention(d: int = 4, **arguments: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(d, 2, **arguments)


def _windows(modules: Any, x: Tensor) -> Tensor:
    """Windows of two positions, folded behind the samples and unfolded again."""
    b, t, d = x.shape
    windows = x.view(b, t // 2, 2, d).reshape(-1, 2, d)
    return modules["layer"](windows).view(b, t, -1).tanh()


def _frames(modules: Any, x: Tensor) -> Tensor:
    """Frames of a video, each an image for the layer, with a recurrent layer over them."""
    b, frames = x.shape[:2]
    features = modules["layer"](x.flatten(0, 1)).tanh().flatten(1)
    return modules["over"](features.view(b, frames, -1))[0]


def _sequence_first(modules: Any, x: Tensor) -> Tensor:
    return modules["layer"](x.transpose(0, 1)).tanh().transpose(0, 1)


def _sequence_first_folded(modules: Any, x: Tensor) -> Tensor:
    """Positions first, folded with the samples into rows of a matrix."""
    b, t, d = x.shape
    return modules["layer"](x.transpose(0, 1).reshape(t * b, d)).view(t, b, -1).transpose(0, 1)


def _between(modules: Any, x: Tensor) -> Tensor:
    """Samples folded between two other dimensions: heads before, positions behind."""
    b, t, d = x.shape
    folded = torch.stack([x, x.cos()]).reshape(2 * b * t, d)
    return modules["layer"](folded).view(2, b, t, -1).transpose(0, 1).tanh()


def _features_first(modules: Any, x: Tensor) -> Tensor:
    """Samples in the last dimension: the weight stands on the left."""
    layer = modules["layer"]
    return (layer.weight @ x.T + layer.bias.unsqueeze(1)).tanh().T


def _last_token(modules: Any, x: Tensor) -> Tensor:
    """Only one position of each sample, another for each, has a cotangent."""
    hidden = modules["layer"](x).tanh()
    lengths = torch.arange(len(x)) % x.shape[1]
    return modules["head"](hidden[torch.arange(len(x)), lengths])


def _last_token_folded(modules: Any, x: Tensor) -> Tensor:
    """As before, and all positions are rows of one matrix."""
    hidden = modules["layer"](x.flatten(0, 1)).tanh().view(*x.shape[:2], -1)
    lengths = torch.arange(len(x)) % x.shape[1]
    return modules["head"](hidden[torch.arange(len(x)), lengths])


def _first_token_folded(modules: Any, x: Tensor) -> Tensor:
    hidden = modules["layer"](x.flatten(0, 1)).tanh().view(*x.shape[:2], -1)
    return modules["head"](hidden[:, 0])


def _first_token_sequence_first(modules: Any, x: Tensor) -> Tensor:
    b, t, d = x.shape
    hidden = modules["layer"](x.transpose(0, 1).reshape(t * b, d)).tanh().view(t, b, -1)
    return modules["head"](hidden[0])


def _masked_mean(modules: Any, x: Tensor) -> Tensor:
    """Padded positions have no cotangent."""
    mask = torch.arange(x.shape[1]) <= (torch.arange(len(x)) % x.shape[1]).unsqueeze(1)
    hidden = modules["layer"](x).masked_fill(~mask.unsqueeze(2), 0)
    return hidden.sum(1) / mask.sum(1, keepdim=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "windows": lambda: Forward(_windows, layer=nn.Linear(4, 3)),
    "attention in windows": lambda: Forward(
        _windows, layer=nn.TransformerEncoderLayer(4, 2, 5, dropout=0, batch_first=True)
    ),
    "sequence first": lambda: Forward(_sequence_first, layer=nn.Linear(4, 3)),
    "sequence first and folded": lambda: Forward(_sequence_first_folded, layer=nn.Linear(4, 3)),
    "sequence-first attention": lambda: Forward(
        _sequence_first, layer=nn.TransformerEncoderLayer(4, 2, 5, dropout=0)
    ),
    "batch-first attention": lambda: nn.TransformerEncoderLayer(
        4, 2, 5, dropout=0, batch_first=True
    ),
    "folded between": lambda: Forward(_between, layer=nn.Linear(4, 3)),
    "last token": lambda: Forward(_last_token, layer=nn.Linear(4, 3), head=nn.Linear(3, 2)),
    "last token, folded": lambda: Forward(
        _last_token_folded, layer=nn.Linear(4, 3), head=nn.Linear(3, 2)
    ),
    "first token, folded": lambda: Forward(
        _first_token_folded, layer=nn.Linear(4, 3), head=nn.Linear(3, 2)
    ),
    "first token, sequence first and folded": lambda: Forward(
        _first_token_sequence_first, layer=nn.Linear(4, 3), head=nn.Linear(3, 2)
    ),
    "padding": lambda: Forward(_masked_mean, layer=nn.Linear(4, 3)),
    "long short-term memory": lambda: nn.Sequential(nn.LSTM(4, 3, batch_first=True), _First()),
}


class _First(nn.Module):
    """The output of a recurrent layer, without its state."""

    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0]


@pytest.mark.parametrize(
    ("samples", "positions"),
    [(1, 4), (2, 2), (3, 4), (4, 4), (4, 8), (6, 2), (3, 6), (8, 4)],
)
@pytest.mark.parametrize("name", MODELS)
def test_samples_are_found(name: str, samples: int, positions: int) -> None:
    """As many samples as positions or features, fewer, more, multiples, and a single one."""
    assert_gramian_is_exact(MODELS[name], batch(samples, positions, 4), objectives=AS_SAMPLES)


@pytest.mark.parametrize("name", ["first token, folded", "first token, sequence first and folded"])
@pytest.mark.parametrize("samples", [2, 4, 5])
def test_one_more_position_than_samples(name: str, samples: int) -> None:
    """First tokens of folded samples then are at multiples of B + 1, which count up modulo B."""
    inputs = batch(samples, samples + 1, 4)
    assert_gramian_is_exact(MODELS[name], inputs, objectives=AS_SAMPLES)


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_as_many_samples_as_features(samples: int) -> None:
    """Samples in the last dimension of the activations."""
    model = lambda: Forward(_features_first, layer=nn.Linear(4, 3))  # noqa: E731  # a factory
    assert_gramian_is_exact(model, batch(samples, 4), objectives=AS_SAMPLES)


@pytest.mark.parametrize("frames", [2, 3])
def test_frames_of_videos(frames: int) -> None:
    """A layer sees frames as its batch, and the next one sees them as positions."""

    def model() -> nn.Module:
        over = nn.GRU(2 * 2 * 2, 3, batch_first=True)
        return Forward(_frames, layer=nn.Conv2d(1, 2, 2), over=over)

    assert_gramian_is_exact(model, batch(3, frames, 1, 3, 3), objectives=AS_SAMPLES)


@pytest.mark.parametrize("silent", [[0], [2], [4], [2, 4], [1, 2, 3], [0, 1, 2, 3]])
def test_samples_without_a_gradient(silent: list[int]) -> None:
    """Samples whose losses are constant, also the one in the middle, searched for first."""

    def losses(output: Tensor) -> Tensor:
        kept = torch.ones(len(output))
        kept[silent] = 0
        return per_sample(output) * kept

    assert_gramian_is_exact(mlp, batch(5, 3), objectives=Objectives("", losses, 0))


def test_no_sample_has_a_gradient() -> None:
    """Losses that are connected and constant have a Gramian of zeros, and are no error."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    losses = per_sample(model(batch(4, 3))) * 0
    assert torch.equal(engine.compute_gramian(losses), torch.zeros(4, 4))
    assert_exact(engine, per_sample(model(batch(4, 3))), model)


def test_samples_that_have_a_gradient_in_turn() -> None:
    """Dead units: at each call, other samples say where they are."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    engine = Engine(model, batch_dim=0)
    for i in range(5):
        x = batch(5, 3)
        kept = torch.zeros(5)
        kept[i] = kept[0] = 1
        assert_exact(engine, per_sample(model(x)) * kept, model)


class Branch(nn.Module):
    """A residual branch that is zero at first, so that nothing in it has a cotangent."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.zeros(()))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        # Positions before samples, where there are as many: taken for samples they would be wrong.
        inside = self.inside(x.transpose(0, 1)).tanh().transpose(0, 1)
        return self.last(x + self.scale * torch.cat([inside, inside[..., :1]], -1))


def test_branch_that_wakes_up() -> None:
    """Where the samples are in a silent branch is looked up when it is silent no more."""
    model = Branch()
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        losses = per_sample(model(batch(4, 4, 4)))
        assert_exact(engine, losses, model)
        losses.sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.zero_grad()
    assert model.scale != 0


@pytest.mark.parametrize("name", MODELS)
def test_varying_shapes(name: str) -> None:
    """Other sizes at each call, and some come again."""
    model = MODELS[name]()
    engine = Engine(model, batch_dim=0)
    for samples, positions in [(2, 4), (4, 2), (4, 4), (2, 4), (1, 2), (5, 4), (4, 2)]:
        assert_exact(engine, per_sample(model(batch(samples, positions, 4))), model)


def test_same_shapes_in_another_order() -> None:
    """Positions and samples change places between two calls in which every shape is the same."""
    model = Forward(lambda modules, x, order: modules["layer"](x.permute(order)), layer=mlp(4))
    engine = Engine(model, batch_dim=0)
    for order in ([0, 1, 2], [1, 0, 2], [0, 1, 2]):
        output = model(batch(3, 3, 4), order).permute(order)
        assert_exact(engine, per_sample(output), model)


def test_mask_that_moves() -> None:
    """Other positions have a cotangent at each call, at first those that could mislead."""
    model = MODELS["last token, folded"]()
    engine = Engine(model, batch_dim=0)

    def run(modules: Any, x: Tensor, positions: Tensor) -> Tensor:
        hidden = modules["layer"](x.flatten(0, 1)).tanh().view(*x.shape[:2], -1)
        return modules["head"](hidden[torch.arange(len(x)), positions])

    model.run = run
    for positions in ([0, 0, 0, 0], [4, 4, 4, 4], [0, 1, 2, 3], [3, 0, 4, 1]):
        losses = per_sample(model(batch(4, 5, 4), torch.tensor(positions)))
        assert_exact(engine, losses, model)


@pytest.mark.parametrize("several", [False, True])
def test_positions_of_each_sample_are_found_without_another_pass(*, several: bool) -> None:
    """As the last token of a text, whose features are read by a matrix product of all tokens."""

    def run(modules: Any, x: Tensor, positions: Tensor) -> Tensor:
        hidden = modules["layer"](x.flatten(0, 1)).tanh().view(*x.shape[:2], -1)
        rows = torch.arange(len(x))
        return modules["head"](hidden[rows.unsqueeze(1) if several else rows, positions])

    model = Forward(run, layer=nn.Linear(4, 3), head=nn.Linear(3, 2))
    engine = Engine(model, verify="never")
    for samples, length in [(4, 5), (4, 5), (4, 5), (3, 6), (3, 6)]:
        positions = torch.randint(length, (samples, 2) if several else (samples,))
        losses = per_sample(model(batch(samples, length, 4), positions))
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        assert len(passes) == 1
        assert_exact(engine, losses, model)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_samples_of_different_lengths() -> None:
    """Packed sequences: positions of all samples in a row, as many as each has."""
    model = nn.LSTM(3, 4)
    engine = Engine(model)
    for lengths in ([4, 2, 5], [2, 2, 2], [1, 6, 2]):
        padded, counts = batch(max(lengths), 3, 3), torch.tensor(lengths, device="cpu")
        packed = nn.utils.rnn.pack_padded_sequence(padded, counts, enforce_sorted=False)
        _, (hidden, _) = model(packed)
        assert_exact(engine, per_sample(hidden[0]), model)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("samples", [4, 6])
def test_experts_that_see_some_samples(samples: int) -> None:
    """Rows sent to experts by what they hold: samples in another order, and not all of them."""

    def route(modules: Any, x: Tensor) -> Tensor:
        scores = modules["gate"](x).softmax(1)
        chosen = scores.argmax(1)
        output = torch.zeros_like(x)
        for i, name in enumerate(("first", "second")):
            places = (chosen == i).nonzero().squeeze(1).flip(0)
            output = output.index_add(
                0, places, modules[name](x[places]) * scores[places, i : i + 1]
            )
        return output

    model = Forward(route, gate=nn.Linear(3, 2), first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    engine = Engine(model)
    for _ in range(4):
        assert_exact(engine, per_sample(model(batch(samples, 3))), model)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("samples", [4, 5])
def test_hidden_activations_of_samples_mixed(samples: int) -> None:
    """Manifold mixup: each sample meets another, the middle one perhaps itself."""
    model = Forward(
        lambda modules, x: modules["last"](
            0.7 * modules["first"](x) + 0.3 * modules["first"](x).flip(0).tanh()
        ),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 2),
    )
    assert_exact(Engine(model), per_sample(model(batch(samples, 3))), model)


def test_two_views_of_each_sample() -> None:
    """Twice as many rows as losses, the views one after the other or side by side."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    both = torch.cat([batch(4, 3), batch(4, 3)])
    assert_exact(engine, per_sample(model(both).view(2, 4, -1).prod(0)), model)
    assert_exact(engine, per_sample(model(both).view(4, 2, -1).prod(1)), model)


def test_the_probe_leaves_random_numbers_alone() -> None:
    """A training loop draws the same numbers with the engine and without it."""
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    before = torch.get_rng_state()
    engine.compute_gramian(losses)
    assert torch.equal(torch.get_rng_state(), before)


def test_mixed_samples_are_noticed_behind_unmixed_ones() -> None:
    """Layers behind the place where samples meet keep theirs apart; one before it does not."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    engine = Engine(model)
    losses = per_sample(model(batch(5, 3)))
    with pytest.warns(CoupledObjectivesWarning, match=r"`0\.weight`"):
        engine.compute_gramian(losses)
    assert_exact(engine, losses, model)
