"""Parameters with several uses: their cross terms are part of the Gramian."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.checks import EVERY_KIND, ModelFactory, Objectives, assert_gramian_is_exact
from tests.unit.networks import call


class Twice(nn.Module):
    """One layer on two parts of the input, of equal or of different lengths."""

    def __init__(self, layer: nn.Module, lengths: tuple[int, int]) -> None:
        super().__init__()
        self.layer = layer
        self.lengths = lengths

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.split(self.lengths, 1)
        return torch.cat([self.layer(first).flatten(1), self.layer(second.sin()).flatten(1)], 1)


class Different(nn.Module):
    """One layer on tokens, and on their mean: without positions in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() + self.layer(x.mean(1)).unsqueeze(1)


class DifferentLayouts(nn.Module):
    """One layer on samples first, tokens first, and both folded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer(x).tanh()
        second = self.layer(first.transpose(0, 1)).tanh()
        return self.layer(second.reshape(-1, 4)).view(second.shape).transpose(0, 1)


class OnItsOutput(nn.Module):
    """A layer that is applied to what it gave."""

    def __init__(self, layer: nn.Module, times: int = 3) -> None:
        super().__init__()
        self.layer = layer
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return x


class Recurrent(nn.Module):
    """A loop over time with a cell of torch."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


class OwnRecurrence(nn.Module):
    """A loop over time of products, with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(4, 4))
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 4)
        for step in self.outer(x.transpose(0, 1)):
            state = (state @ self.inner + step).tanh()
        return state


class TwoModules(nn.Module):
    """Two modules that own one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class LinearAndConvolution(nn.Module):
    """One parameter as a weight and, in another shape, as a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        y = F.conv1d(x.mT, weight.unsqueeze(-1)).mT
        return F.conv1d(y.mT, weight.view(2, 4, 2)).mT.repeat(1, 1, 2) + self.linear(x)[:, :1]


class Parent(nn.Module):
    """Calls its child, and uses the child's parameters directly too."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x).tanh()
        return y @ self.child.weight + 2 * self.child.bias


class OutsideTheModule(nn.Module):
    """A parameter is read by an object that is no module, and by its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.readers = [self.layer]

    def forward(self, x: Tensor) -> Tensor:
        for reader in self.readers:
            x = F.linear(x, reader.weight).tanh()
        return self.layer(x)


class Autoencoder(nn.Module):
    """Encoder and decoder share a weight, which the decoder transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.up, self.down = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.weight, self.up).tanh()
        return F.linear(hidden, self.weight.T, self.down) - x


class SharedNorm(nn.Module):
    """One normalisation before and after a layer, whose weight is also a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        nn.init.normal_(self.norm.weight)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(self.norm(x)).tanh()) * self.norm.weight - self.norm.bias


class Experts(nn.Module):
    """Every token goes to one of two layers that share a bias; one table chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.experts[1].bias = self.experts[0].bias
        self.choice = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * self.choice(x).softmax(-1).unsqueeze(-2)).sum(-1)


class MixtureWithGather(nn.Module):
    """Only the tokens that choose it go through a layer: samples are in no regular place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., 0] > 0
        y = x.sin()
        y[chosen] = self.layer(x[chosen])
        return y


def attention(x, w):
    """Queries, keys and values from one weight."""
    q, k, v = x @ w, x.sin() @ w, x.cos() @ w
    return (q @ k.mT).softmax(-1) @ v


MODELS = [
    pytest.param(lambda: Twice(nn.Linear(4, 3), (2, 2)), id="equal shapes"),
    pytest.param(lambda: Twice(nn.Linear(4, 3), (1, 3)), id="different shapes"),
    pytest.param(Different, id="with positions and without"),
    pytest.param(DifferentLayouts, id="different layouts"),
    pytest.param(lambda: OnItsOutput(nn.Linear(4, 4)), id="on its output"),
    pytest.param(lambda: OnItsOutput(nn.Linear(4, 4), 12), id="on its output, often"),
    pytest.param(
        lambda: OnItsOutput(nn.Conv1d(4, 4, 3, padding=1)), id="convolution on its output"
    ),
    pytest.param(lambda: OnItsOutput(nn.Conv1d(4, 4, 1, groups=2)), id="groups on their output"),
    pytest.param(lambda: Recurrent(nn.RNNCell), id="RNN cell"),
    pytest.param(lambda: Recurrent(nn.GRUCell), id="GRU cell"),
    pytest.param(lambda: Recurrent(nn.LSTMCell), id="LSTM cell"),
    pytest.param(OwnRecurrence, id="own recurrence"),
    pytest.param(TwoModules, id="two modules"),
    pytest.param(LinearAndConvolution, id="weight and kernel"),
    pytest.param(Parent, id="parent and child"),
    pytest.param(OutsideTheModule, id="read from a list"),
    pytest.param(Autoencoder, id="transposed"),
    pytest.param(SharedNorm, id="normalisation"),
    pytest.param(Experts, id="experts"),
    pytest.param(call(attention, (4, 4)), id="queries, keys and values"),
    pytest.param(call(lambda x, w: F.linear(x, w, w[0]), (4, 4)), id="twice in one call, a slice"),
    pytest.param(call(lambda x, p: torch.addcmul(x, p, p), (4,)), id="twice in one call, fallback"),
    pytest.param(
        call(lambda x, p: F.layer_norm(x, (4,), p, p), (4,)), id="twice in one call, norm"
    ),
    pytest.param(call(lambda x, w: F.linear(x, w @ w), (4, 4)), id="twice in a derived tensor"),
    pytest.param(call(lambda x, w: torch.einsum("bti,io,op->btp", x, w, w), (4, 4)), id="einsum"),
    pytest.param(call(lambda x, w: F.bilinear(x, x, w.expand(2, 4, 4)), (4, 4)), id="copies"),
    pytest.param(
        call(lambda x, p: F.linear(x, p.unsqueeze(0), p[:1]) * p, (4,)), id="weight, bias, scale"
    ),
]


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("make_model", MODELS)
def test_gramian_is_exact(make_model: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4, 4), objectives=objectives)


@pytest.mark.parametrize("limit", [1, 300])
@pytest.mark.parametrize("make_model", MODELS)
def test_memory_limit_does_not_matter(make_model: ModelFactory, limit: int) -> None:
    assert_gramian_is_exact(make_model, torch.randn(3, 4, 4), memory_limit_bytes=limit)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(nn.RNN, id="RNN"),
        pytest.param(nn.GRU, id="GRU"),
        pytest.param(nn.LSTM, id="LSTM"),
    ],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layer(cell: type[nn.Module], batch_first: bool) -> None:
    """One call reads all parameters of two layers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = cell(4, 4, num_layers=2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            output = self.rnn(x if batch_first else x.transpose(0, 1))[0]
            return output if batch_first else output.transpose(0, 1)

    assert_gramian_is_exact(Model, torch.randn(3, 5, 4))


@pytest.mark.parametrize("objectives", EVERY_KIND[-2:], ids=repr)
def test_samples_gathered_from_irregular_places(objectives: Objectives) -> None:
    """Coupled objectives need no layout."""
    assert_gramian_is_exact(MixtureWithGather, torch.randn(3, 4, 4), objectives=objectives)
