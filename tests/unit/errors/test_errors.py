"""Every error: what happened, where, what to do. The next call works, and nothing is left."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autogram
from autogram import (
    AutogramError,
    CoupledObjectivesWarning,
    Engine,
    FreedGraphError,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidModulesError,
    InvalidOptionError,
    MixedSamplesError,
    NotConnectedError,
    UnsupportedError,
    UnverifiedWarning,
)
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, assert_works, batch, mlp, per_sample

BUILTINS = {
    "InvalidModulesError": ValueError,
    "InvalidLossesError": ValueError,
    "InvalidBatchDimError": IndexError,
    "NotConnectedError": ValueError,
    "MixedSamplesError": ValueError,
    "NonFiniteError": ArithmeticError,
    "FreedGraphError": RuntimeError,
    "UnsupportedError": NotImplementedError,
    "HookError": ValueError,
    "RuleError": ValueError,
    "RuleCheckError": AssertionError,
    "InvalidOptionError": ValueError,
    "UnseenUseError": RuntimeError,
    "InvalidOperandError": ValueError,
    "ChangedTensorError": RuntimeError,
    "StaleCaptureError": RuntimeError,
    "RemovedEngineError": RuntimeError,
    "MemoryLimitError": RuntimeError,
    "VerificationError": ArithmeticError,
    "RankError": RuntimeError,
}


def test_every_error_has_the_base_and_refines_a_builtin() -> None:
    """Users can catch all of them, or what they know from elsewhere."""
    errors = {name for name in autogram.__all__ if name.endswith("Error")} - {"AutogramError"}
    assert errors == set(BUILTINS)
    for name, builtin in BUILTINS.items():
        assert issubclass(getattr(autogram, name), AutogramError)
        assert issubclass(getattr(autogram, name), builtin)
    assert issubclass(CoupledObjectivesWarning, UserWarning)


class TestModules:
    """What an engine is made from."""

    def test_no_module(self) -> None:
        with pytest.raises(InvalidModulesError, match=r"No module was given.*`Engine\(model\)`"):
            Engine()

    @pytest.mark.parametrize("given", [[nn.Linear(2, 2)], "model", torch.zeros(2), None])
    def test_something_else_than_a_module(self, given: Any) -> None:
        with pytest.raises(InvalidModulesError, match=rf"A {type(given).__name__} was given.*Pass"):
            Engine(given)

    def test_a_scripted_module(self) -> None:
        """No hook can be put on it; inside of another module, it is all right."""
        model = torch.jit.script(nn.Linear(3, 2))
        with pytest.raises(InvalidModulesError, match=r"is scripted.*scripted from"):
            Engine(model)

    @pytest.mark.parametrize("order", [1, -1])
    def test_one_inside_another(self, order: int) -> None:
        model = mlp()
        with pytest.raises(
            InvalidModulesError, match=r"\(Linear\).*\(Sequential\).*`0`.*Pass only the outer"
        ):
            Engine(*(model, model[0])[::order])
        assert_no_hooks(model)

    def test_one_twice(self) -> None:
        model = mlp()
        with pytest.raises(InvalidModulesError, match="the same"):
            Engine(model, model)
        assert_no_hooks(model)

    def test_a_deeper_one(self) -> None:
        """The name of the inner one is its place in the outer one."""
        model = nn.Sequential(mlp(), nn.Linear(2, 2))
        with pytest.raises(InvalidModulesError, match=r"`0\.2`"):
            Engine(model, model[0][2])


def assert_no_hooks(model: nn.Module) -> None:
    """Assert that an engine that was refused has left nothing."""
    assert not any(m._compiled_call_impl for m in model.modules())


class TestBatchDim:
    """Which dimension counts the samples."""

    @pytest.mark.parametrize("batch_dim", ["first", 1.0, (0,), True])
    def test_not_a_dimension(self, batch_dim: Any) -> None:
        with pytest.raises(InvalidBatchDimError, match=r"`batch_dim` is .*`None`.*\"auto\""):
            Engine(mlp(), batch_dim=batch_dim)

    @pytest.mark.parametrize(
        ("batch_dim", "shape"), [(1, (4,)), (-2, (4,)), (2, (4, 2)), (-3, (4, 2)), (1, ())]
    )
    def test_out_of_range(self, batch_dim: int, shape: tuple[int, ...]) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=batch_dim)
        losses = model(batch(4, 3))
        losses = losses if len(shape) == 2 else losses.sum(1) if shape else losses.sum()
        expected = rf"`batch_dim` is {batch_dim}.*shape \({', '.join(map(str, shape))}.*reduction"
        with pytest.raises(InvalidBatchDimError, match=expected):
            engine.compute_gramian(losses)


def test_an_option_that_is_none_of_those() -> None:
    """The message lists them."""
    with pytest.raises(InvalidOptionError, match=r'`verify` is .*Pass "first" .*or "never"'):
        Engine(mlp(), verify="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r'`unseen` is .*Pass "rows" .*or "error"'):
        Engine(mlp(), unseen="ignore")  # type: ignore[arg-type]


LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a set": (lambda y: {y.sum()}, r"are a set.*Pass a tensor, or a list or a dict of them"),
    "a number": (lambda y: float(y.detach().sum()), "are a float"),
    "integers": (lambda y: y.argmax(1), r"dtype torch\.int64"),
    "booleans": (lambda y: y > 0, r"dtype torch\.bool"),
    "complex": (
        lambda y: torch.fft.fft(y),
        r"dtype torch\.complex128.*real floating-point.*`\.abs\(\)`",
    ),
    "sparse": (lambda y: y.to_sparse(), r"sparse tensor \(layout .*Pass a dense tensor"),
    "nested": (
        lambda y: torch.nested.as_nested_tensor(list(y.split((1, 3))), layout=torch.jagged),
        r"nested or sparse.*`torch\.cat`",
    ),
    "detached": (lambda y: y.detach(), "do not require a gradient.*Keep their graph"),
    "constant": (lambda _: torch.ones(4), "do not require a gradient"),
}


@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_a_jacobian(name: str, batch_dim: Any) -> None:
    """The message says what they are instead."""
    of, message = LOSSES[name]
    model = mlp()
    engine = Engine(model, batch_dim=batch_dim)
    with pytest.raises(InvalidLossesError, match=message):
        engine.compute_gramian(of(model(batch(4, 3))))
    assert_works(engine, model, batch(4, 3))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_call_with_gradients_disabled(context: Callable[[], Any]) -> None:
    """Losses with a graph, in a block that disables gradients."""
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(4, 3)))
    with context(), pytest.raises(InvalidLossesError, match=r"Gradients are disabled.*enabled"):
        engine.compute_gramian(losses)
    assert_exact(engine, losses, model)


def test_losses_of_a_forward_pass_without_gradients() -> None:
    """They have no graph."""
    model = mlp()
    engine = Engine(model)
    with torch.no_grad():
        losses = per_sample(model(batch(4, 3)))
    with pytest.raises(InvalidLossesError, match="computed with gradients disabled"):
        engine.compute_gramian(losses)
    assert_works(engine, model, batch(4, 3))


@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
class TestNotConnected:
    """Losses that depend on none of the engine's parameters."""

    def test_losses_of_another_model(self, batch_dim: Any) -> None:
        model, other = mlp(), mlp()
        engine = Engine(model, batch_dim=batch_dim)
        model(batch(4, 3))
        with pytest.raises(NotConnectedError, match=r"do not depend on any parameter.*Compute the"):
            engine.compute_gramian(per_sample(other(batch(4, 3))))
        assert_works(engine, model, batch(4, 3))

    def test_losses_of_the_inputs(self, batch_dim: Any) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=batch_dim)
        x = batch(4, 3).requires_grad_()
        model(x)
        with pytest.raises(NotConnectedError):
            engine.compute_gramian(per_sample(x))
        assert x.grad is None
        assert_works(engine, model, batch(4, 3))

    def test_a_module_without_parameters(self, batch_dim: Any) -> None:
        model = nn.Tanh()
        engine = Engine(model, batch_dim=batch_dim)
        with pytest.raises(NotConnectedError):
            engine.compute_gramian(per_sample(model(batch(4, 3).requires_grad_())))

    def test_a_frozen_model(self, batch_dim: Any) -> None:
        model = mlp().requires_grad_(False)
        engine = Engine(model, batch_dim=batch_dim)
        with pytest.raises(NotConnectedError, match="that requires a gradient"):
            engine.compute_gramian(per_sample(model(batch(4, 3).requires_grad_())))
        model.requires_grad_(True)
        assert_works(engine, model, batch(4, 3))


@pytest.mark.parametrize("batch_dim", ["auto", 0, None])
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_graph_that_was_freed(batch_dim: Any, outputs: int) -> None:
    """A backward pass before the Gramian, at the first call or a later one."""
    model = mlp(outputs=outputs)
    engine = Engine(model, batch_dim=batch_dim)
    for _ in range(2):
        losses = model(batch(4, 3)).square()
        losses.sum().backward()
        model.zero_grad()
        with pytest.raises(
            FreedGraphError, match=r"retain_graph=True.*backward pass that has freed it.*before it"
        ):
            engine.compute_gramian(losses)
        assert_works(engine, model, batch(4, 3))


def test_a_state_of_an_earlier_step() -> None:
    """Of a recurrent layer, whose graph went with that step."""
    layer = nn.LSTM(3, 2).double()
    engine = Engine(layer, batch_dim=0)
    out, state = layer(batch(5, 4, 3))
    per_sample(out.mT).backward(torch.ones(5))
    out, _ = layer(batch(5, 4, 3), state)
    with pytest.raises(FreedGraphError, match=r"earlier step.*`\.detach\(\)`"):
        engine.compute_gramian(out.square().sum((0, 2)))
    out, _ = layer(batch(5, 4, 3), tuple(x.detach() for x in state))
    engine.verify(out.square().sum((0, 2)))


class TestMixedSamples:
    """Losses that are not per-sample, where the user says that they are."""

    def test_names_the_parameter_and_the_call(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten())
        engine = Engine(model, batch_dim=0)
        x = batch(4, 1, 3, 3)
        expected = r"(?s)mixed.*`conv2d` with `0\.weight`.*\.eval\(\).*GroupNorm.*`batch_dim=None`"
        for _ in range(2):  # found out, then known
            losses = per_sample(model(x))
            with pytest.raises(MixedSamplesError, match=expected):
                engine.compute_gramian(losses)
        model.eval()
        assert_works(engine, model, x)

    def test_names_the_parameter_among_several_modules(self) -> None:
        first, second = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        engine = Engine(first, second, batch_dim=0)
        losses = per_sample(second(first(batch(4, 3))))
        with pytest.raises(MixedSamplesError, match=r"`linear` with `1\.0\.weight`"):
            engine.compute_gramian(losses)

    def test_losses_that_compare_samples(self) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        output = model(batch(4, 3))
        with pytest.raises(MixedSamplesError, match=r"`2\.weight`.*compare"):
            engine.compute_gramian((output @ output.T).logsumexp(1))
        assert_works(engine, model, batch(4, 3))

    def test_tasks_taken_for_samples(self) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        with pytest.raises(MixedSamplesError, match="batch_dim=None"):
            engine.compute_gramian(model(batch(4, 3)).square().mean(0))
        assert_works(engine, model, batch(4, 3))

    def test_a_parameter_that_is_used_without_a_batch(self) -> None:
        """All samples read what is computed from it, in one tensor with what is of each sample."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.points = nn.Linear(3, 2), nn.Parameter(batch(2, 3))

            def forward(self, x: Tensor) -> Tensor:
                joined = self.layer(torch.cat([self.points, x]))
                return joined[2:] * joined[:2].exp().sum(0)

        model = Model()
        engine = Engine(model, batch_dim=0)
        with pytest.raises(MixedSamplesError, match=r"`layer.weight`.*without a batch"):
            engine.compute_gramian(model(batch(5, 3)).square().sum(1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("batch_dim", ["auto", 0])
def test_cotangents_that_are_not_finite(value: float, batch_dim: Any) -> None:
    """The Gramian shows it, a warning names the objectives, and the next call is right."""
    model = mlp()
    engine = Engine(model, batch_dim=batch_dim)
    losses = per_sample(model(batch(4, 3))) * value
    expected = r"objectives 0, 1, 2, 3 .*infinite or not a number.*detect_anomaly"
    with pytest.warns(UnverifiedWarning, match=expected):
        assert not engine.compute_gramian(losses).isfinite().any()
    assert_works(engine, model, batch(4, 3))


def test_overflow_after_the_layouts_are_known() -> None:
    """As plain autograd does, the rows concerned are not finite, and the others are right."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    x, factors = batch(4, 3), torch.ones(4)
    expected = engine.compute_gramian(per_sample(model(x)) * factors)
    factors = torch.tensor([1, 1, math.nan, 1])
    losses = per_sample(model(x)) * factors
    with pytest.warns(UnverifiedWarning, match="objectives 2 .*Only their rows and columns"):
        gramian = engine.compute_gramian(losses)
    finite = [0, 1, 3]
    assert_close_to_reference(gramian[finite][:, finite], expected[finite][:, finite])
    assert gramian[2].isnan().all()


EMBEDDINGS = {
    "max_norm": (lambda: nn.Embedding(5, 3, max_norm=1.0), "`max_norm`.*parametrize"),
    "scale_grad_by_freq": (
        lambda: nn.Embedding(5, 3, scale_grad_by_freq=True),
        "`scale_grad_by_freq=True`.*Set it to False",
    ),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_calls_that_are_refused(name: str) -> None:
    """What has no gradient for each objective; without the option, the engine works."""
    make, message = EMBEDDINGS[name]
    model = nn.Sequential(make(), nn.Linear(3, 2))
    ids = torch.randint(0, 5, (4, 2))
    engine = Engine(model)
    with pytest.raises(UnsupportedError, match=rf"(?s){message}"):
        engine.compute_gramian(per_sample(model(ids)))
    model[0].max_norm, model[0].scale_grad_by_freq = None, False
    assert_works(engine, model, ids)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    """They have no shape of numbers; padded ones work."""
    model = mlp()
    engine = Engine(model)
    samples = [batch(count, 3) for count in (2, 3, 2)]
    with pytest.raises(UnsupportedError, match=r"`linear` was called with a nested tensor.*Pad"):
        model(torch.nested.nested_tensor(samples, layout=layout))
    assert_works(engine, model, torch.nn.utils.rnn.pad_sequence(samples, batch_first=True))


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_behind_a_parameter_are_refused(layout: torch.layout) -> None:
    """As in a pooling of ragged sequences; with the batch as one sample, they work."""
    model = mlp()
    engine, coupled = Engine(model), Engine(model, batch_dim=None)
    for counts in ((2, 3, 2), (3, 1, 3)):
        parts = list(model(batch(sum(counts), 3)).split(counts))
        nested = torch.nested.as_nested_tensor(parts, layout=layout)
        losses = per_sample(torch.nested.to_padded_tensor(nested, 0.0))
        with pytest.raises(UnsupportedError, match=r"contains a nested tensor.*Pad the samples"):
            engine.compute_gramian(losses)
        assert_exact(coupled, losses, model)
    assert_works(engine, model, batch(4, 3))


def test_parameters_from_inference_mode_are_refused() -> None:
    """PyTorch drops gradients of these; a copy has them."""
    with torch.inference_mode():
        first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.Linear(4, 2))
    engine = Engine(model)
    with pytest.raises(UnsupportedError, match=r"`linear` was called.*in inference mode.*clone"):
        model(batch(5, 3))
    for name, parameter in list(first.named_parameters()):
        setattr(first, name, nn.Parameter(parameter.clone()))
    assert_works(engine, model, batch(5, 3))


def test_an_error_of_the_users_backward_passes_through() -> None:
    """What a custom function raises is not hidden, with one objective per sample or several."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(*_: Any) -> Tensor:
            raise ValueError("refused by the user")

    model = mlp()
    engine = Engine(model, batch_dim=0)
    for losses in (model(batch(4, 3)), per_sample(model(batch(4, 3)))):
        with pytest.raises(ValueError, match="refused by the user"):
            engine.compute_gramian(Refusing.apply(losses))
        assert_works(engine, model, batch(4, 3))


def test_errors_do_not_silence_the_warning() -> None:
    """The warning of "auto" comes at the first call that deserves it, whatever came before."""
    model = mlp()
    engine = Engine(model)
    with pytest.warns(UnverifiedWarning):
        engine.compute_gramian(per_sample(model(batch(4, 3))) * math.nan)
    output = model(batch(4, 3))
    with pytest.warns(CoupledObjectivesWarning, match=r"`2\.weight`"):
        engine.compute_gramian((output @ output.T).logsumexp(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_works(engine, model, batch(4, 3))
