"""Recurrent layers and cells: each result, each arrangement of layers and of samples."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)
from torch.utils.checkpoint import checkpoint

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError, RuleError
from autogram.rules import Recipe, _registry, composed, find_rule
from autogram.testing import reference_jacobian
from tests.unit._capture.seen import left_to_fallback, seen_uses
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SECOND,
    SEVERAL,
    ModelFactory,
    Objectives,
    assert_gramian_is_exact,
    irregular,
)
from tests.unit.engines import assert_exact, batch, per_sample
from tests.unit.environment import DEVICE
from tests.unit.networks import trained
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact

B, T, WIDTH, UNITS = 3, 4, 2, 3

MakeLayer = Callable[..., nn.RNNBase]
Read = Callable[[list[Tensor]], Tensor]  # from the results, samples first, to a model's output


def relu(*args: Any, **kwargs: Any) -> nn.RNN:
    return nn.RNN(*args, nonlinearity="relu", **kwargs)


def projected(*args: Any, **kwargs: Any) -> nn.LSTM:
    return nn.LSTM(*args, proj_size=2, **kwargs)


def together(results: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten(1) for x in results], 1)


def output(results: list[Tensor]) -> Tensor:
    return results[0]


def hidden(results: list[Tensor]) -> Tensor:
    return results[1]


def last(results: list[Tensor]) -> Tensor:
    """The hidden state, or the cell state of an LSTM."""
    return results[-1]


def last_step(results: list[Tensor]) -> Tensor:
    return results[0][:, -1]


class Net(nn.Module):
    """A recurrent layer between samples that come first and results in which they do."""

    def __init__(self, layer: nn.RNNBase, read: Read = together) -> None:
        super().__init__()
        self.layer = layer
        self.read = read

    def forward(self, x: Tensor, *states: Any) -> Tensor:
        result, final = self.layer(x if self.layer.batch_first else x.transpose(0, 1), *states)
        finals = [final] if isinstance(final, Tensor) else list(final)
        result = result if self.layer.batch_first else result.transpose(0, 1)
        return self.read([result, *(x.transpose(0, 1) for x in finals)])


LAYERS = [
    pytest.param(nn.RNN, id="RNN"),
    pytest.param(relu, id="RNN with ReLU"),
    pytest.param(nn.LSTM, id="LSTM"),
    pytest.param(projected, id="LSTM with projection"),
    pytest.param(nn.GRU, id="GRU"),
]
ARRANGEMENTS = [
    pytest.param({}, id="one layer"),
    pytest.param({"bias": False, "batch_first": True}, id="batch first, no bias"),
    pytest.param({"num_layers": 2, "batch_first": True}, id="two layers"),
    pytest.param({"bidirectional": True, "batch_first": True}, id="both directions"),
    pytest.param({"num_layers": 2, "bidirectional": True}, id="two layers, both directions"),
    pytest.param({"num_layers": 3, "bidirectional": True, "bias": False}, id="three, no bias"),
]
READS = [
    pytest.param(together, id="every result"),
    pytest.param(output, id="output"),
    pytest.param(hidden, id="hidden state"),
    pytest.param(last, id="last state"),
    pytest.param(last_step, id="last step"),
]


class Loop(nn.Module):
    """A cell that is called at each step, from zeros or from learned initial states."""

    def __init__(self, cell: nn.RNNCellBase, is_learned: bool = False) -> None:
        super().__init__()
        self.cell = cell
        self.start = nn.Parameter(irregular(2, UNITS)) if is_learned else None

    def forward(self, x: Tensor) -> Tensor:
        is_long = isinstance(self.cell, nn.LSTMCell)
        state = None
        if self.start is not None:
            h, c = self.start.unsqueeze(1).expand(2, len(x), UNITS)
            state = (h, c) if is_long else h
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if is_long else state)
        return torch.stack([*outputs, state[1] if is_long else state], 1)


CELLS = [
    pytest.param(nn.RNNCell, id="RNN cell"),
    pytest.param(lambda *n, **options: nn.RNNCell(*n, nonlinearity="relu", **options), id="ReLU"),
    pytest.param(nn.LSTMCell, id="LSTM cell"),
    pytest.param(nn.GRUCell, id="GRU cell"),
]
CASES = [
    *(
        pytest.param(
            lambda make=case.values[0]: Net(make(WIDTH, UNITS, num_layers=2, bidirectional=True)),
            (B, T, WIDTH),
            id=case.id,
        )
        for case in LAYERS
    ),
    *(
        pytest.param(
            lambda make=case.values[0]: Loop(make(WIDTH, UNITS)), (B, T, WIDTH), id=case.id
        )
        for case in CELLS
    ),
]


def has_kernel() -> bool:
    """Whether one kernel computes all layers here, with random numbers of its own."""
    return composed._has_kernel(torch.empty(1))


@pytest.fixture(autouse=True)
def no_fallback(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows by vector-Jacobian products are right, too, and would hide a rule that is not used."""
    name = request.node.name
    with seen_uses() as uses:
        yield
    assert "fallback" in name or ("dropout" in name and has_kernel()) or not left_to_fallback(uses)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("make", LAYERS)
def test_layers(make: MakeLayer, arrangement: dict[str, Any], read: Read) -> None:
    assert_gramian_is_exact(
        lambda: trained(Net(make(WIDTH, UNITS, **arrangement), read)), torch.randn(B, T, WIDTH)
    )


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_settings(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)


@pytest.mark.parametrize("options", [{"bias": False}, {}], ids=["no bias", "bias"])
@pytest.mark.parametrize("make", CELLS)
def test_cells_from_learned_states(make: MakeLayer, options: dict[str, Any]) -> None:
    assert_gramian_is_exact(
        lambda: trained(Loop(make(WIDTH, UNITS, **options), True)), torch.randn(B, T, WIDTH)
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("make", CELLS)
def test_cells_with_a_kernel(make: MakeLayer, is_learned: bool) -> None:
    for objectives in (PER_SAMPLE, SEVERAL):
        assert_gramian_is_exact(
            lambda: trained(Loop(make(WIDTH, UNITS), is_learned)),
            torch.randn(B, T, WIDTH),
            objectives=objectives,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", CELLS)
def test_composed_cells_are_those_of_pytorch(make: MakeLayer, dtype: torch.dtype) -> None:
    """Bit for bit, in sizes for which there are vectors and rests."""
    for units, bias in ((UNITS, True), (37, False), (64, True)):
        model = Loop(make(WIDTH, units, bias=bias), False).to(dtype)
        x = torch.randn(19, T, WIDTH, dtype=dtype)
        expected = model(x)
        expected.square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        engine = Engine(model)
        output = model(x)
        assert torch.equal(output, expected)
        output.square().sum().backward()
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(p.grad, gradient)
        engine.remove()


@pytest.mark.parametrize("shape", [(1, T, WIDTH), (B, 1, WIDTH), (4, 4, 4), (6, 3, 2)], ids=str)
@pytest.mark.parametrize("make", LAYERS)
def test_sizes(make: MakeLayer, shape: tuple[int, ...]) -> None:
    """One sample, one step, all sizes equal, twice as many samples as steps."""
    assert_gramian_is_exact(
        lambda: trained(Net(make(shape[2], 4, bidirectional=True))), torch.randn(shape)
    )


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("make", LAYERS)
def test_float32(make: MakeLayer) -> None:
    torch.set_default_dtype(torch.float32)
    assert_gramian_is_exact(lambda: Net(make(WIDTH, UNITS, num_layers=2)), torch.randn(B, T, WIDTH))


@pytest.mark.parametrize("make", LAYERS)
def test_input_without_samples(make: MakeLayer) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make(WIDTH, UNITS)

        def forward(self, x: Tensor) -> Tensor:
            output, final = self.layer(x)
            return output.flatten() if isinstance(final, Tensor) else final[1].flatten()

    assert_gramian_is_exact(Model, torch.randn(T, WIDTH), objectives=COUPLED)


def states_of(start: Tensor, *sizes: int) -> Tensor:
    """Initial states that all samples have, in a form that the layer takes on this device."""
    states = start.expand(sizes)
    return states.contiguous() if has_kernel() else states


class FromStates(nn.Module):
    """Initial states of each kind: given, learned, learned for each sample, computed from these."""

    def __init__(self, layer: nn.RNNBase, kind: str) -> None:
        super().__init__()
        self.net = Net(layer)
        self.kind = kind
        self.widths = [getattr(layer, "proj_size", 0) or UNITS]
        self.widths += [UNITS] * isinstance(layer, nn.LSTM)
        places = {"learned": 1, "for each sample": B}.get(kind, 0)
        self.start = nn.ParameterList(irregular(4, places, n) for n in self.widths if places)
        self.encoder = nn.Linear(WIDTH, 4 * sum(self.widths)) if kind == "batched" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.encoder is not None:
            states = self.encoder(x[:, 0]).unflatten(1, (4, -1)).transpose(0, 1)
            states = [part.contiguous() for part in states.split(self.widths, 2)]
        elif self.start:
            states = [states_of(start, 4, len(x), -1) for start in self.start]
        else:
            states = [irregular(4, len(x), n) for n in self.widths]
        return self.net(x, states[0] if len(states) == 1 else tuple(states))


@pytest.mark.parametrize("objectives", [PER_SAMPLE, SEVERAL, COUPLED], ids=repr)
@pytest.mark.parametrize("kind", ["given", "learned", "for each sample", "batched"])
@pytest.mark.parametrize("make", LAYERS)
def test_initial_states(make: MakeLayer, kind: str, objectives: Objectives) -> None:
    assert_gramian_is_exact(
        lambda: FromStates(make(WIDTH, UNITS, num_layers=2, bidirectional=True), kind),
        torch.randn(B, T, WIDTH),
        objectives=objectives,
    )


def tied() -> nn.Module:
    layer = nn.GRU(UNITS, UNITS, num_layers=2, batch_first=True)
    layer.weight_ih_l1 = layer.weight_hh_l0
    layer.bias_ih_l1 = layer.bias_hh_l1
    return nn.Sequential(nn.Linear(WIDTH, UNITS), Net(layer))


def partly_frozen() -> nn.Module:
    net = Net(nn.LSTM(WIDTH, UNITS, num_layers=2, bidirectional=True))
    for name in ("weight_ih_l0", "weight_hh_l1", "bias_hh_l0_reverse"):
        net.layer.get_parameter(name).requires_grad_(False)
    return net


def twice() -> nn.Module:
    layer = nn.GRU(UNITS, UNITS, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, UNITS), Net(layer, output), nn.Tanh(), Net(layer))


def normed() -> nn.Module:
    layer = nn.LSTM(WIDTH, UNITS, num_layers=2)
    for name in ("weight_hh_l0", "weight_ih_l1"):
        parametrizations.weight_norm(layer, name)
    return Net(layer)


def encoder_and_decoder() -> nn.Module:
    """The final states of one layer are the initial ones of another with the same weights."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(WIDTH, UNITS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            _, states = self.layer(x)
            return self.layer(x.flip(1).sin(), states)[0]

    return Model()


@pytest.mark.parametrize("objectives", [PER_SAMPLE, SECOND, COUPLED], ids=repr)
@pytest.mark.parametrize("make", [tied, partly_frozen, twice, normed, encoder_and_decoder])
def test_weights(make: ModelFactory, objectives: Objectives) -> None:
    assert_gramian_is_exact(make, torch.randn(B, T, WIDTH), objectives=objectives)


class LearnedInput(nn.Module):
    """The samples are in the initial state alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, UNITS)
        self.tokens = nn.Parameter(irregular(T, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(self.tokens.expand(T, len(x), WIDTH), x.unsqueeze(0))
        return output.transpose(0, 1)


class ComputedWeight(nn.Module):
    """One weight depends on the samples, beside others that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(WIDTH, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        cell = self.cell
        weight = cell.weight_hh + x.mean(0)[:, :UNITS]
        biases = cell.bias_ih, cell.bias_hh
        h = torch.zeros(len(x), UNITS)
        for step in x[..., :WIDTH].unbind(1):
            h = torch.rnn_tanh_cell(step, h, cell.weight_ih, weight, *biases)
        return h


@pytest.mark.parametrize("objectives", [PER_SAMPLE, SEVERAL], ids=repr)
def test_learned_input_goes_to_the_fallback(objectives: Objectives) -> None:
    assert_gramian_is_exact(LearnedInput, torch.randn(B, UNITS), objectives=objectives)


def test_weight_that_depends_on_the_samples() -> None:
    assert_gramian_is_exact(ComputedWeight, torch.randn(4, UNITS, UNITS), objectives=COUPLED)


@pytest.mark.parametrize("make", LAYERS)
def test_checkpoint(make: MakeLayer) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.net = Net(make(WIDTH, UNITS, num_layers=2))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, self.first(x), use_reentrant=False)

    assert_gramian_is_exact(Model, torch.randn(B, T, WIDTH))


def with_dropout(make: MakeLayer, **options: Any) -> nn.RNNBase:
    return make(WIDTH, UNITS, num_layers=3, dropout=0.5, **options)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", LAYERS)
def test_dropout(make: MakeLayer, read: Read) -> None:
    """The layers are called one by one."""
    net = trained(Net(with_dropout(make, batch_first=True), read))
    assert_gramian_is_exact(lambda: net, torch.randn(B, T, WIDTH))
    with Engine(net) as engine:
        engine.compute_gramian(per_sample(net(batch(B, T, WIDTH))))
        uses = [use for parameter in engine.report().parameters for use in parameter.uses]
    assert all(use.rule is not None for use in uses) != has_kernel()


@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_dropout_goes_to_the_fallback_where_a_kernel_computes_all_layers(
    make: MakeLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the call itself knows what was dropped."""
    monkeypatch.setattr(composed, "_has_kernel", lambda _: True)
    net = trained(Net(with_dropout(make, batch_first=True)))
    assert_gramian_is_exact(lambda: net, torch.randn(B, T, WIDTH))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("make", LAYERS)
def test_dropout_changes_no_bit(
    make: MakeLayer, batch_first: bool, is_bidirectional: bool, is_packed: bool
) -> None:
    """Results, gradients and the state of the random numbers are those without an engine."""
    options = {"batch_first": batch_first, "bidirectional": is_bidirectional}
    layer = with_dropout(make, **options)
    x = torch.randn(B, T, WIDTH) if batch_first else torch.randn(T, B, WIDTH)
    lengths = torch.tensor([T, 2, 1], device="cpu")

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        packed = pack_padded_sequence(given, lengths, batch_first) if is_packed else given
        output, states = layer(packed)
        output = output.data if is_packed else output
        states = states if isinstance(states, tuple) else (states,)
        loss = sum(y.sin().sum() for y in (output, *states))
        gradients = torch.autograd.grad(loss, [given, *layer.parameters()])
        random = torch.rand(1)
        return [output, *states, *gradients, random]

    expected = results()
    with Engine(layer):
        found = results()
    for y, z in zip(found, expected, strict=True):
        assert torch.equal(y, z)
        assert y.stride() == z.stride()


@pytest.mark.cpu  # cuDNN differentiates no layer that is not in training
@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
@pytest.mark.parametrize("layers", [1, 2])
def test_dropout_that_drops_nothing(layers: int) -> None:
    def model() -> nn.Module:
        net = Net(nn.GRU(WIDTH, UNITS, num_layers=layers, dropout=0.5))
        return net.train(layers == 1)

    assert_gramian_is_exact(model, torch.randn(B, T, WIDTH))


def test_weights_changed_before_the_gramian() -> None:
    net = Net(nn.GRU(WIDTH, UNITS))
    engine = Engine(net)
    losses = per_sample(net(batch(B, T, WIDTH)))
    with torch.no_grad():
        net.layer.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.compute_gramian(losses)


def test_autocast() -> None:
    """The cotangents are those of the network in half precision, the replay is in single."""
    torch.set_default_dtype(torch.float32)
    net = Net(nn.GRU(8, 8), last_step)
    engine = Engine(net)
    with torch.autocast(DEVICE, torch.bfloat16):
        losses = per_sample(net(batch(B, T, 8)).float())
    jacobian = reference_jacobian(losses, net.parameters())
    gramian = engine.compute_gramian(losses)
    assert gramian.dtype == torch.float32
    torch.testing.assert_close(gramian, jacobian @ jacobian.T, rtol=0.03, atol=0.03)


class Packed(nn.Module):
    """Sequences of different length, packed; the result is what `read` makes of it."""

    def __init__(self, layer: nn.RNNBase, read: Callable[..., Tensor], is_sorted: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.read = read
        self.is_sorted = is_sorted

    def forward(self, x: Tensor, lengths: Tensor, *states: Any) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=self.is_sorted
        )
        result, final = self.layer(packed, *states)
        finals = [final] if isinstance(final, Tensor) else list(final)
        return self.read(result, lengths, [x.transpose(0, 1) for x in finals])


def read_padded(result: PackedSequence, lengths: Tensor, finals: list[Tensor]) -> Tensor:
    del lengths, finals
    return pad_packed_sequence(result, batch_first=True)[0]


def read_last(result: PackedSequence, lengths: Tensor, finals: list[Tensor]) -> Tensor:
    """The output at the last step of each sequence, where alone it has a cotangent."""
    del finals
    return pad_packed_sequence(result, batch_first=True)[0][torch.arange(len(lengths)), lengths - 1]


def read_final(result: PackedSequence, lengths: Tensor, finals: list[Tensor]) -> Tensor:
    del result, lengths
    return together(finals)


def read_all(result: PackedSequence, lengths: Tensor, finals: list[Tensor]) -> Tensor:
    return together([read_padded(result, lengths, finals), *finals])


LENGTHS = [
    pytest.param([5, 3, 2, 2], True, id="sorted"),
    pytest.param([2, 5, 1, 3], False, id="in another order"),
    pytest.param([4, 4, 4, 4], True, id="of one length"),
    pytest.param([1, 1, 1, 1], True, id="one step"),
]


@pytest.mark.parametrize("read", [read_padded, read_last, read_final, read_all])
@pytest.mark.parametrize(("lengths", "is_sorted"), LENGTHS)
@pytest.mark.parametrize("make", LAYERS)
def test_packed(
    make: MakeLayer, lengths: list[int], is_sorted: bool, read: Callable[..., Tensor]
) -> None:
    def model() -> nn.Module:
        layer = make(WIDTH, UNITS, num_layers=2, bidirectional=True)
        return trained(Packed(layer, read, is_sorted))

    x = torch.randn(4, max(lengths), WIDTH)
    assert_gramian_is_exact(model, x, torch.tensor(lengths))


@pytest.mark.parametrize("objectives", [SEVERAL, SECOND, COUPLED], ids=repr)
@pytest.mark.parametrize("make", LAYERS)
def test_packed_with_objectives(make: MakeLayer, objectives: Objectives) -> None:
    def model() -> nn.Module:
        return Packed(make(WIDTH, UNITS, bidirectional=True), read_all, False)

    lengths = torch.tensor([2, 5, 1, 3])
    assert_gramian_is_exact(model, torch.randn(4, 5, WIDTH), lengths, objectives=objectives)


class PackedFromLearned(nn.Module):
    """Packed sequences from initial states that are learned."""

    def __init__(self, layer: nn.RNNBase, read: Callable[..., Tensor], is_sorted: bool) -> None:
        super().__init__()
        self.packed = Packed(layer, read, is_sorted)
        self.start = nn.Parameter(irregular(2, 2, 1, UNITS))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h, c = states_of(self.start, 2, 2, len(x), UNITS)
        return self.packed(x, lengths, (h, c) if isinstance(self.packed.layer, nn.LSTM) else h)


@pytest.mark.parametrize("read", [read_padded, read_last, read_final])
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_packed_from_learned_states(make: MakeLayer, read: Callable[..., Tensor]) -> None:
    def model() -> nn.Module:
        return PackedFromLearned(make(WIDTH, UNITS, bidirectional=True), read, True)

    assert_gramian_is_exact(model, torch.randn(4, 5, WIDTH), torch.tensor([5, 3, 2, 2]))


@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_permutation_of_learned_states_goes_to_the_fallback(make: MakeLayer) -> None:
    """A call of its own, before that of the layer."""

    def model() -> nn.Module:
        return PackedFromLearned(make(WIDTH, UNITS, bidirectional=True), read_all, False)

    assert_gramian_is_exact(model, torch.randn(4, 5, WIDTH), torch.tensor([2, 5, 1, 3]))


@pytest.mark.parametrize("make", LAYERS)
def test_packed_dropout(make: MakeLayer) -> None:
    net = trained(Packed(with_dropout(make, bidirectional=True), read_all, False))
    engine = Engine(net)
    for lengths in ([2, 5, 1, 3], [3, 3, 3, 2], [1, 5, 2, 3], [4, 4, 4, 4]):
        losses = per_sample(net(batch(4, 5, WIDTH), torch.tensor(lengths)))
        assert_exact(engine, losses, net)


def test_packed_with_other_lengths_at_each_step() -> None:
    model = Packed(nn.GRU(WIDTH, UNITS, bidirectional=True), read_all, False)
    engine = Engine(model, batch_dim=0)
    for lengths in ([2, 5, 1, 3], [3, 3, 3, 2], [1, 5, 2, 3], [3, 2, 5, 1], [2, 5, 1, 3]):
        losses = per_sample(model(batch(4, 5, WIDTH), torch.tensor(lengths)))
        assert_exact(engine, losses, model)


@pytest.mark.cpu
def test_packed_outside_of_the_model() -> None:
    """The recorder sees no call that packs: equal totals, other numbers at each step."""
    model = nn.GRU(WIDTH, UNITS)
    engine = Engine(model, batch_dim=0)
    for lengths in ([4, 2, 1], [3, 3, 1], [3, 2, 2], [5, 1, 1], [4, 2, 1]):
        packed = pack_sequence([batch(n, WIDTH) for n in lengths])
        padded, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
        assert_exact(engine, per_sample(padded), model)


@pytest.mark.cpu
def test_numbers_of_sequences_are_remembered_with_the_places() -> None:
    """Equal shapes and equal calls: nothing else tells the second batch from the first."""
    model = nn.GRU(WIDTH, UNITS)
    engine = Engine(model, batch_dim=0)
    for lengths in ([3, 3], [3, 3], [4, 2], [3, 3], [5, 1]):
        packed = pack_sequence([batch(n, WIDTH) for n in lengths])
        owners = pack_sequence([torch.full((n,), float(i)) for i, n in enumerate(lengths)]).data
        is_own = torch.stack([1 - owners, owners])  # (samples, rows)
        assert_exact(engine, is_own @ per_sample(model(packed)[0].data), model)


def test_samples_along_the_steps() -> None:
    """They meet inside of the call: its outputs have one sample each, and its inputs several."""
    model = nn.GRU(WIDTH, UNITS)
    engine = Engine(model, batch_dim=0)
    for samples in (B, B, 2, B):
        x = batch(samples, T, WIDTH)  # the layer takes the first dimension for steps
        assert_exact(engine, per_sample(model(x)[0]), model)


def test_samples_along_the_steps_behind_another_layer() -> None:
    both = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, UNITS))
    x = batch(B, T, WIDTH)
    strict = Engine(both, batch_dim=0)
    with pytest.raises(MixedSamplesError, match=r"`linear` with `0.weight`"):
        strict.compute_gramian(per_sample(both(x)[0]))
    strict.remove()
    engine = Engine(both)
    losses = per_sample(both(x)[0])
    with pytest.warns(CoupledObjectivesWarning):
        assert_exact(engine, losses, both)


@pytest.mark.cpu
def test_samples_in_one_packed_sequence() -> None:
    """Its state carries one sample over to the next."""
    model = nn.GRU(WIDTH, UNITS)
    packed = pack_sequence([batch(4, WIDTH), batch(4, WIDTH)])
    for batch_dim in (0, None):
        engine = Engine(model, batch_dim=batch_dim)
        data = model(packed)[0].data.unflatten(0, (4, 2))
        losses = torch.stack([per_sample(data[:, 0]), per_sample(data[:, 1])]).flatten()
        if batch_dim is None:
            assert_exact(engine, losses, model)
        else:
            with pytest.raises(MixedSamplesError, match="one packed sequence"):
                engine.compute_gramian(losses)


class NamedWeights(nn.Module):
    """A cell whose weights are given by name."""

    def __init__(self, function: Callable[..., Any], cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.function, self.cell = function, cell

    def forward(self, x: Tensor) -> Tensor:
        cell, h = self.cell, torch.zeros(len(x), UNITS)
        hx = (h, h) if isinstance(cell, nn.LSTMCell) else h
        biases: dict[str, Any] = {"b_ih": cell.bias_ih, "b_hh": cell.bias_hh}
        found = self.function(x, hx, w_ih=cell.weight_ih, w_hh=cell.weight_hh, **biases)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("function", "make"),
    [
        (torch.lstm_cell, nn.LSTMCell),
        (torch.gru_cell, nn.GRUCell),
        (torch.rnn_tanh_cell, nn.RNNCell),
        (torch.rnn_relu_cell, nn.RNNCell),
    ],
)
def test_cells_whose_weights_have_names(function: Any, make: Any) -> None:
    model = NamedWeights(function, make(WIDTH, UNITS))
    engine = Engine(model)
    assert_exact(engine, per_sample(model(batch(B, WIDTH))), model)


def test_rule_that_leaves_out_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = find_rule(torch.lstm_cell)
    monkeypatch.setitem(_registry._RULES, torch.lstm_cell, lambda *args: rule(*args)[:1])
    model = nn.LSTMCell(WIDTH, UNITS)
    engine = Engine(model)
    with pytest.raises(RuleError, match="`lstm_cell` has no recipe for tensor 1 of its results"):
        model(batch(B, WIDTH))
    monkeypatch.undo()
    assert_exact(engine, per_sample(model(batch(B, WIDTH))[0]), model)


def test_rule_that_leaves_out_an_operand_goes_to_the_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By way of one result it has all blocks, and by way of the other it misses one."""
    rule = find_rule(torch.lstm_cell)

    def incomplete(*args: Any) -> list[Recipe]:
        first, second = rule(*args)
        return [first, second._replace(operands=second.operands[:-1])]

    monkeypatch.setitem(_registry._RULES, torch.lstm_cell, incomplete)
    assert_gramian_is_exact(lambda: Loop(nn.LSTMCell(WIDTH, UNITS)), torch.randn(B, T, WIDTH))
