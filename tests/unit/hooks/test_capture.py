"""Capture: the arguments, outputs and gradients of each call, and what they keep alive."""

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from autogram import ChangedTensorError, Engine, HookError, InvalidModulesError
from autogram.hooks import Call, HookManager, capture
from autogram.testing import reference_jacobian
from tests.speed.captured import CAPTURES, Genomic, peak_bytes, step
from tests.unit.alive import live_tensors


class Attention(nn.Module):
    """Attention maps as a part of what the module returns."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        attention = (scale * x @ x.mT).softmax(-1)
        return attention @ x, {"map": attention}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attn(x, scale=0.5)
        out: Tensor = x + self.linear(y)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x).sum((1, 2))
        return out


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4, 3)


def test_attention_and_its_gradients(x: Tensor) -> None:
    """Nested as the module has them, by name."""
    model = Model()
    with capture(model, where="encoder.*.attn") as calls:
        model(x).sum().backward()
    assert list(calls) == ["encoder.0.attn", "encoder.1.attn"]
    (call,) = calls["encoder.1.attn"]
    assert call.module is model.encoder[1].attn
    assert (call.name, call.index) == ("encoder.1.attn", 0)
    (given,), (y, maps) = call.args, call.output
    assert call.kwargs == {"scale": 0.5}
    assert call.grad_kwargs == {"scale": None}
    assert maps["map"].shape == (2, 4, 4)
    assert not y.requires_grad
    (grad_y, grad_maps), (grad_given,) = call.grad_output, call.grad_args
    assert grad_maps == {"map": None}  # nothing else uses the map that is returned
    given = given.clone().requires_grad_()
    found = model.encoder[1].attn(given, scale=0.5)[0]
    assert_close(found, y)
    assert_close(grad_given, torch.autograd.grad(found, given, grad_y)[0])


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_gradients_of_what_is_returned(x: Tensor, is_first: bool) -> None:
    """Of all uses, in the module and behind it, in each of some passes, as `retain_grad` has it."""
    module, x = Attention(), x.requires_grad_(not is_first)
    scale = nn.Parameter(torch.tensor(0.5))

    def losses_of(output: tuple[Tensor, dict[str, Tensor]], step: int) -> Tensor:
        uses = [output[0].square().sum(), output[1]["map"].pow(3).sum()]
        return (uses[0], uses[1], uses[0] + uses[1])[step]

    with capture(nn.ModuleDict({"attn": module}), where="attn", returned=True) as calls:
        output = module(x, scale=scale)
        (call,) = calls["attn"]
        for step in (2, 0, 1, 2):
            losses_of(output, step).backward(retain_graph=True)
            plain = module.forward(x, scale=scale)
            for tensor in (plain[0], plain[1]["map"]):
                tensor.retain_grad()
            losses_of(plain, step).backward()
            y, maps = call.grad_returned
            for found, expected in ((y, plain[0].grad), (maps["map"], plain[1]["map"].grad)):
                assert (found is None) == (expected is None)
                assert found is None or torch.equal(found, expected)


class Maps(nn.Module):
    """A map that is returned and used by nothing behind, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.out: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.weight.softmax(-1)
        self.out.append(maps @ x)
        return maps, self.weight


@pytest.mark.usefixtures("without_collector")
def test_a_call_whose_output_is_used_inside_alone(x: Tensor) -> None:
    """No gate is reached. The function `keep` is called, and nothing stays on the parameter."""
    model = nn.ModuleDict({"maps": Maps()})
    with capture(model, where="maps", returned=True, keep=lambda call: call.grad_returned) as kept:
        model.maps(x)
        model.maps.out.pop().square().sum().backward()
        (maps, weight) = kept["maps"][0]
    plain = model.maps.weight.detach().softmax(-1).requires_grad_()
    (plain @ x).square().sum().backward()
    assert_close(maps, plain.grad)
    assert weight is None
    assert not model.maps.weight._backward_hooks


def test_gradients_of_what_is_returned_take_no_memory_where_they_are_those_of_the_output(
    x: Tensor,
) -> None:
    model = Model()
    with capture(model, where=nn.Linear, returned=True) as calls:
        model(x).square().sum().backward()
    for (call,) in calls.values():
        assert call.grad_returned.data_ptr() == call.grad_output.data_ptr()


def is_attention(_: str, module: nn.Module) -> bool:
    """Whether a module of transformers computes the maps."""
    return type(module).__name__ in ("BertSelfAttention", "ViTAttention")


@pytest.mark.parametrize("kind", ["Bert", "ViT"])
def test_attention_of_transformers(kind: str) -> None:
    """The maps that eager attention returns are used inside of the call alone."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16}
    if kind == "Bert":
        config = transformers.BertConfig(**sizes, vocab_size=20, attn_implementation="eager")
        inputs = torch.randint(20, (2, 5))
    else:
        images = {"image_size": 4, "patch_size": 2}
        config = transformers.ViTConfig(**sizes, **images, attn_implementation="eager")
        inputs = torch.randn(2, 3, 4, 4)
    model = getattr(transformers, f"{kind}Model")(config).to(torch.get_default_dtype()).eval()
    output = model(inputs, output_attentions=True)
    for maps in output.attentions:
        maps.retain_grad()
    output.last_hidden_state.square().sum().backward()
    with capture(model, where=is_attention, inputs=False, returned=True) as calls:
        model(inputs).last_hidden_state.square().sum().backward()
    assert len(calls) == 2
    for (call,), maps in zip(calls.values(), output.attentions, strict=True):
        assert_close(call.output[1], maps.detach())
        assert call.grad_output[1] is None
        assert_close(call.grad_returned[1], maps.grad)


class Shared(nn.Module):
    """One ReLU with two shapes, whose gradients come in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.relu(x), self.relu(3 * x[:1])


def test_calls_of_a_shared_module(x: Tensor) -> None:
    """Each has its own shapes and gradients, in several forward passes, in any order."""
    model, x = Shared(), x.requires_grad_()
    with capture(model, where="relu") as calls:
        first, second = model(x), model(2 * x)
        for output, weight in [(first[1], 1.0), (second[0], 2.0), (first[0], 3.0)]:
            (weight * output).sum().backward(retain_graph=True)
    shapes = [tuple(call.output.shape) for call in calls["relu"]]
    assert shapes == [(2, 4, 3), (1, 4, 3)] * 2
    assert [call.index for call in calls["relu"]] == [0, 1, 2, 3]
    for call, weight in zip(calls["relu"], (3, 1, 2, None), strict=True):
        if weight is None:
            assert call.grad_output is call.grad_args is None
            continue
        assert_close(call.grad_output, torch.full_like(call.output, weight))
        assert_close(call.grad_args[0], weight * (call.args[0] > 0).double())


def test_gradients_behind_the_block(x: Tensor) -> None:
    """They come in as long as the calls are held."""
    model = Model()
    with capture(model, where=nn.Linear) as calls:
        losses = model(x)
    assert calls["encoder.0.linear"][0].grad_output is None
    losses.sum().backward()
    assert calls["encoder.0.linear"][0].grad_output.shape == (2, 4, 3)
    with torch.no_grad():
        model(x)
    assert len(calls["encoder.0.linear"]) == 1


@pytest.mark.parametrize("name", ["inputs", "outputs", "gradients", "returned"])
def test_what_is_not_wanted_is_not_kept(x: Tensor, name: str) -> None:
    model = Model()
    with capture(model, where=nn.Linear, **{"returned": True, name: False}) as calls:
        model(x).sum().backward()
    call = calls["encoder.0.linear"][0]
    gradients = ["grad_args", "grad_kwargs", "grad_output", "grad_returned"]
    fields = {
        "inputs": ["args", "kwargs", "grad_args", "grad_kwargs"],
        "outputs": ["output", "grad_output"],
        "gradients": gradients,
        "returned": ["grad_returned"],
    }[name]
    for field in ("args", "kwargs", "output", *gradients):
        assert (getattr(call, field) is None) == (field in fields)


def test_without_gradients_enabled(x: Tensor) -> None:
    """Calls are recorded, and have none."""
    model = Model()
    with torch.no_grad(), capture(model, where=nn.Linear) as calls:
        model(x)
    call = calls["encoder.0.linear"][0]
    assert call.output is not None
    assert call.grad_output is None


def test_with_the_graph(x: Tensor) -> None:
    """`detach=False` keeps it, so that what is captured can be differentiated."""
    model = Model()
    with capture(model, where=nn.Linear, detach=False, gradients=False) as calls:
        model(x)
    output = calls["encoder.0.linear"][0].output
    assert torch.autograd.grad(output.sum(), model.encoder[0].linear.bias)[0].tolist() == [8] * 3


def test_limit_and_keep(x: Tensor) -> None:
    """The last calls of each module; and a function's results instead of calls."""
    model = Shared()
    with capture(model, where="relu", limit=3, gradients=False) as calls:
        for _ in range(3):
            model(x)
    assert [call.index for call in calls["relu"]] == [3, 4, 5]
    with capture(model, gradients=False, keep=lambda call: call.output) as outputs:
        y = model(x)
        assert_close(outputs["relu"], list(y))
    x = x.requires_grad_()
    with capture(model, where="relu", keep=lambda c: (c.index, c.grad_output is None)) as kept:
        first, _ = model(x)
        first.sum().backward()
        assert kept["relu"][0] == (0, False)
        assert isinstance(kept["relu"][1], Call)
    assert kept["relu"] == [(0, False), (1, True)]


def test_checkpoints(x: Tensor) -> None:
    """What runs again in the backward pass is the same call."""
    model, block = Model(), Block()
    expected = []
    for use in (lambda x: block(x), lambda x: checkpoint(block, x, use_reentrant=False)):
        with capture(block) as calls:
            use(x.clone().requires_grad_()).sum().backward()
        assert [len(found) for found in calls.values()] == [1, 1, 1]
        expected.append(calls["linear"][0].grad_args)
    assert_close(*expected)
    del model


def test_passes_of_an_engine_leave_no_gradients(x: Tensor) -> None:
    model = Model()
    engine = Engine(model)
    with capture(model, where="encoder.1.*", returned=True) as calls:
        losses = model(x)
        gramian = engine.compute_gramian(losses)
        (linear,), (attn,) = calls["encoder.1.linear"], calls["encoder.1.attn"]
        for call in (linear, attn):
            assert call.grad_output is call.grad_returned is None
        losses.sum().backward()
    for call in (linear, attn):
        assert call.grad_output is not None
        assert call.grad_returned is not None
    rows = reference_jacobian(model(x), model.parameters())
    assert_close(gramian, rows @ rows.T)


def test_what_is_changed_in_place(x: Tensor) -> None:
    """It is not shown as if it was the output; a copy is."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    expected = model[0](x).detach()
    with capture(model, where=nn.Linear) as calls:
        model(x).sum().backward()
    with pytest.raises(ChangedTensorError, match=r"`output` of call 0 of `0`.*`copy=True`"):
        _ = calls["0"][0].output
    assert calls["0"][0].grad_output.shape == x.shape
    with capture(model, where=nn.Linear, copy=True) as calls:
        model(x).sum().backward()
    assert_close(calls["0"][0].output, expected)


def test_gradients_do_not_pin_activations(x: Tensor) -> None:
    """Without inputs and outputs kept, activations die with the pass."""
    model, alive = Model(), []

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        alive.append(weakref.ref(output))

    gc.disable()
    try:
        with HookManager() as manager:
            manager.register(watch, model, where=nn.Linear)
            with capture(model, where=nn.Linear, detach=True) as calls:
                model(x).sum().backward()
                grads = [call.grad_output for found in calls.values() for call in found]
        assert len(grads) == len(alive) == 2
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


class Pair(NamedTuple):
    """What a module may keep of itself."""

    output: Tensor
    module: nn.Module


class Keeping(nn.Module):
    """Keeps its last output, as hooks by hand do."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = Pair(2 * x, self)
        return self.last.output


@pytest.mark.slow
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("gradients", [True, False])
def test_memory_is_flat(x: Tensor, gradients: bool) -> None:
    """Over 200 steps, without the garbage collector."""
    model, counts = nn.Sequential(nn.Linear(3, 3), Keeping(), nn.Linear(3, 1)), []
    for i in range(200):
        with capture(model, gradients=gradients) as calls:
            model(x).sum().backward()
        assert len(calls["1"]) == 1
        model[1].last = None
        if i in (10, 100, 199):
            counts.append(live_tensors())
    assert len(set(counts)) == 1, counts


@pytest.mark.usefixtures("without_collector")
def test_nothing_stays_alive(x: Tensor) -> None:
    """After the block, what the user does not hold is gone, though the graph lives on."""
    model = Model()
    with capture(model) as calls:
        losses = model(x)
        output = weakref.ref(calls["encoder.0.linear"][0].output)
        call = weakref.ref(calls["encoder.0.linear"][0])
    assert call() is not None
    del calls
    assert call() is None
    assert output() is None
    losses.sum().backward()
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(a or b for a, b in hooks)


@pytest.mark.cpu  # whose allocator is watched
@pytest.mark.parametrize("name", list(CAPTURES))
def test_the_peak_of_a_step_rises_by_what_is_kept(name: str) -> None:
    """On a long sequence, by the bytes of what was asked for, and by nothing else."""
    model, x = Genomic(width=4, layers=5), torch.randn(1, 4, 2048)
    plain = peak_bytes(lambda: step(model, x, CAPTURES["plain step"]))
    kept = []
    peak = peak_bytes(lambda: kept.append(step(model, x, CAPTURES[name])))
    assert peak <= plain + kept[0] + 4096, (peak, plain, kept)


def test_mistakes() -> None:
    model = Model()
    with pytest.raises(InvalidModulesError, match="chooses no module"), capture(model, where="x"):
        pass
    with pytest.raises(HookError, match="Pass how many calls to keep"), capture(model, limit=0):
        pass


def test_a_pass_that_misses_the_output_is_the_last_one() -> None:
    """A pass through a tensor that the module keeps reaches the arguments alone."""

    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = 2 * x
            return x.sin()

    model = nn.Sequential(Keeping())
    with capture(model, where=Keeping) as calls:
        model(torch.randn(3, requires_grad=True)).sum().backward()
        (call,) = calls["0"]
        assert call.grad_output is not None
        model[0].kept.sum().backward()
    assert call.grad_output is None
    assert_close(call.grad_args[0], torch.full((3,), 2.0))
