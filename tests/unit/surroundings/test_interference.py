"""The engine beside what else acts on torch calls, graphs and modules: exact, or refused."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autogram import ChangedTensorError, Engine, InvalidLossesError, concatenate
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, assert_same_gradients, features
from tests.unit.engines import assert_exact, assert_works, batch, mlp, per_sample
from tests.unit.environment import device_of_threads


def several(output: Tensor) -> Tensor:
    """Three losses for each sample."""
    return features(output, 3)


EACH = [pytest.param(per_sample, id="(B,)"), pytest.param(several, id="(B, K)")]
Losses = Callable[[Tensor], Tensor]


class TestThreads:
    """Training in several threads at once."""

    @pytest.mark.parametrize("losses_of", EACH)
    def test_two_models(self, losses_of: Losses) -> None:
        """Each with its engine, taking turns in the middle of their forward passes."""
        turn = threading.Barrier(2, timeout=60)
        models = [mlp() for _ in range(2)]
        for model in models:
            model[0].register_forward_hook(lambda *_: wait(turn))
        engines = [Engine(model, batch_dim=0) for model in models]
        inputs = [[batch(4, 3) for _ in range(5)] for _ in models]

        def run(i: int) -> None:
            for x in inputs[i]:
                assert_exact(engines[i], losses_of(models[i](x)), models[i])

        in_threads(run)

    def test_one_pauses_and_the_other_does_not(self) -> None:
        """Pausing is a matter of the thread: an evaluation leaves the training alone."""
        turn = threading.Barrier(2, timeout=60)
        model = mlp()
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)

        def run(i: int) -> None:
            with engine.paused() if i else nullcontext():
                turn.wait()
                output = model(x)
                turn.wait()
            if not i:
                assert_exact(engine, per_sample(output), model)

        in_threads(run)
        assert_works(engine, model, x)


def wait(turn: threading.Barrier) -> None:
    """Go on when the other thread is there, too."""
    turn.wait()


def in_threads(run: Callable[[int], None]) -> None:
    """Run 0 and 1 in two threads, and raise what they raise."""
    with ThreadPoolExecutor(2, initializer=device_of_threads()) as pool:
        for done in [pool.submit(run, i) for i in range(2)]:
            done.result()


class Distances(nn.Module):
    """Distances from parameters, between two layers: a call that has no rule and no batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.points, self.last = nn.Linear(3, 4), nn.Parameter(batch(5, 4)), mlp(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cdist(self.first(x), self.points))


class TestSeveralEngines:
    """Two engines on one model."""

    @pytest.mark.parametrize("losses_of", EACH)
    def test_on_one_graph(self, losses_of: Losses) -> None:
        """Made, removed and paused in any order."""
        model = mlp()
        first, second = Engine(model, batch_dim=0), Engine(model)
        losses = losses_of(model(batch(4, 3)))
        assert_exact(first, losses, model)
        assert_exact(second, losses, model)
        first.remove()
        assert_exact(second, losses, model)
        assert_works(second, model, batch(4, 3))

    @pytest.mark.parametrize("losses_of", EACH)
    def test_on_a_call_without_a_rule(self, losses_of: Losses) -> None:
        """Each engine finds the parameters behind what another engine has tapped."""
        model = Distances()
        engines = [Engine(model, unseen="error", verify="never") for _ in range(3)]
        for samples in (4, 4, 3):
            losses = losses_of(model(batch(samples, 3)))
            for engine in engines:
                assert_exact(engine, losses, model)

    @pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
    def test_on_calls_that_one_has_not_seen(self) -> None:
        """What may not be batched is found behind what another engine has tapped, too."""
        model = Distances()
        other = Engine(model)
        losses = per_sample(model(batch(4, 3)))
        engine = Engine(model, verify="never")
        for each in (engine, other):
            assert_exact(each, losses, model)

    def test_on_a_model_and_on_its_part(self) -> None:
        """The engine of the whole taps what that of the part has tapped."""
        model = mlp()
        part, whole = Engine(model[2], batch_dim=0), Engine(model, batch_dim=0)
        with part.paused():
            assert_exact(whole, per_sample(model(batch(4, 3))), model)
        losses = per_sample(model(batch(4, 3)))
        assert_exact(part, losses, model[2])
        assert_exact(whole, losses, model)


def _loss(parameters: dict[str, Tensor], x: Tensor, model: nn.Module) -> Tensor:
    return functional_call(model, parameters, (x,)).square().sum()


def _forward_mode(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    del parameters
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent
        assert tangent is not None
        return tangent


TRANSFORMS: dict[str, Callable[[nn.Module, dict[str, Tensor], Tensor], Any]] = {
    "grad": lambda m, p, x: grad(_loss)(p, x, m),
    "grad of inputs": lambda m, _, x: grad(lambda z: m(z).square().sum())(x),
    "vmap": lambda m, _, x: vmap(m)(x),
    "per-sample gradients": lambda m, p, x: vmap(grad(lambda q, z: _loss(q, z, m)), (None, 0))(
        p, x
    ),
    "jacrev": lambda m, p, x: jacrev(lambda q: functional_call(m, q, (x,)))(p),
    "jvp": lambda m, p, x: jvp(lambda q: functional_call(m, q, (x,)), (p,), (p,)),
    "hessian": lambda m, _, x: hessian(lambda z: m(z).square().sum())(x),
    "functional_call": lambda m, p, x: functional_call(m, p, (x,)),
    "forward mode": _forward_mode,
}


class TestTransforms:
    """`torch.func`, and derivatives in forward mode."""

    @pytest.mark.parametrize("name", TRANSFORMS)
    def test_of_a_hooked_model(self, name: str) -> None:
        """They give what they give without the engine, bit for bit, and leave nothing."""
        model = mlp()
        twin = copy.deepcopy(model)
        engine = Engine(model, batch_dim=0)
        x, parameters = batch(4, 3), {k: p.detach() for k, p in model.named_parameters()}
        ours, plain = (TRANSFORMS[name](m, parameters, x) for m in (model, twin))
        for a, b in zip(_tensors(ours), _tensors(plain), strict=True):
            assert torch.equal(a, b)
        assert_works(engine, model, x)

    @pytest.mark.parametrize("in_place", [False, True])
    def test_forward_mode_through_in_place_calls(self, in_place: bool) -> None:
        """Taps hand tangents on, whichever kind they are."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(batch(2))

            def forward(self, x: Tensor) -> Tensor:
                y = self.layer(x)
                return y.mul_(self.scale) if in_place else y * self.scale

        model = Model()
        twin = copy.deepcopy(model)
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)
        assert torch.equal(_forward_mode(model, {}, x), _forward_mode(twin, {}, x))
        assert_works(engine, model, x)

    @pytest.mark.parametrize("transform", [vmap, grad, lambda f: lambda x: jvp(f, (x,), (x,))])
    def test_an_engine_inside_is_refused(self, transform: Callable[[Any], Any]) -> None:
        """With losses of the inside, or of the outside."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        outside = per_sample(model(batch(4, 3)))

        def within(x: Tensor) -> Tensor:
            losses = per_sample(model(x.unsqueeze(0)))
            for given in (losses, outside):
                with pytest.raises(InvalidLossesError, match=r"`torch\.func` transform.*outside"):
                    engine.compute_gramian(given)
            return losses.sum()

        transform(within)(batch(2, 3) if transform is vmap else batch(3))
        assert_exact(engine, outside, model)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


class Sliced(nn.Module):
    """A part that is compiled and reads free parameters, between layers that are not."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(batch(4))
        self.activation = torch.compile(lambda x, scale: (x * scale).tanh(), backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x), self.scale))


class Broken(nn.Module):
    """A part at which the compiler gives up in the middle, and goes on behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x.tanh())


def _with_compiled_methods(backend: str) -> nn.Module:
    model = mlp()
    model[0].compile(backend=backend)
    model[2].compile(backend=backend)
    return model


def _with_replaced_parts(backend: str) -> nn.Module:
    model = mlp()
    model[0] = torch.compile(model[0], backend=backend)
    model[2] = torch.compile(model[2], backend=backend)
    return model


def _with_a_compiled_activation(backend: str) -> nn.Module:
    model = mlp()
    model[1] = torch.compile(model[1], backend=backend)
    return model


def _with_a_broken_part(backend: str) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), torch.compile(Broken(), backend=backend), nn.Linear(3, 2))


COMPILED_PARTS = [
    Sliced,
    _with_compiled_methods,
    _with_replaced_parts,
    _with_a_compiled_activation,
    _with_a_broken_part,
]
WHOLE: dict[str, Callable[[nn.Module, str], Callable[[Tensor], Tensor]]] = {
    "a compiled model": lambda model, backend: torch.compile(model, backend=backend),
    "a function of the model": lambda model, backend: torch.compile(
        lambda x: model(x).sin(), backend=backend
    ),
}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is left of what other tests have compiled, and the compiler's advice is not ours."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
class TestCompile:
    """`torch.compile` of a model, or of its parts, before and after the engine is attached."""

    @pytest.mark.parametrize("make", COMPILED_PARTS)
    def test_of_parts(self, backend: str, make: Callable[[str], nn.Module]) -> None:
        """What the compiler runs is adopted, with explicit rows, when it is next read."""
        model = make(backend)
        model(batch(4, 3))
        engine = Engine(model, batch_dim=0)
        for losses_of in (per_sample, several):
            assert_exact(engine, losses_of(model(batch(4, 3))), model)
        assert_works(engine, model, batch(4, 3))

    def test_of_parts_afterwards(self, backend: str) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        assert_works(engine, model, batch(4, 3))
        model[0].compile(backend=backend)
        for _ in range(2):
            assert_works(engine, model, batch(4, 3))

    def test_of_the_losses(self, backend: str) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        compiled = torch.compile(per_sample, backend=backend)
        for _ in range(2):
            assert_exact(engine, compiled(model(batch(4, 3))), model)

    def test_given_to_the_engine(self, backend: str) -> None:
        """The compiled model as the engine's module: its hooks are outside of what is compiled."""
        model = torch.compile(mlp(), backend=backend)
        engine = Engine(model, batch_dim=0)
        for _ in range(2):
            assert_exact(engine, per_sample(model(batch(4, 3))), model)

    @pytest.mark.parametrize("is_warm", [False, True], ids=["before", "before, and run"])
    @pytest.mark.parametrize("name", WHOLE)
    def test_of_everything_around(self, backend: str, name: str, is_warm: bool) -> None:
        """Nothing is recorded, and plain autograd gives the rows; gradients are as without."""
        model = mlp()
        twin = copy.deepcopy(model)
        compiled = WHOLE[name](model, backend)
        if is_warm:
            compiled(batch(4, 3))
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)
        losses, plain = per_sample(compiled(x)), per_sample(WHOLE[name](twin, "eager")(x))
        assert_exact(engine, losses, model)
        losses.sum().backward()
        plain.sum().backward()
        assert_same_gradients(model, twin)
        model.zero_grad()
        assert_works(engine, model, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_without_a_break() -> None:
    """`fullgraph` refuses whatever the compiler cannot see through."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    x = batch(4, 3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    around = torch.compile(lambda x: model(x).sin(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x).sin(), around(x))
    with torch.no_grad():
        assert torch.equal(compiled(x).sin(), around(x))
    assert_works(engine, model, x)


class FunctionMode(TorchFunctionMode):
    """A mode that counts calls."""

    count = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """A mode below autograd that counts operations."""

    count = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Inside(nn.Module):
    """A model that enters a context for a part of its forward pass."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.context, self.first, self.last = context, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            x = self.first(x).tanh()
        return self.last(x)


@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("make", [FunctionMode, DispatchMode])
class TestModes:
    """Modes of other libraries see the model's calls as before, and the engine does, too."""

    def test_around_the_step(self, make: Any, losses_of: Losses) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        with make() as mode:
            assert_exact(engine, losses_of(model(batch(4, 3))), model)
        assert mode.count > 0

    def test_around_the_forward_pass_alone(self, make: Any, losses_of: Losses) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        with make():
            losses = losses_of(model(batch(4, 3)))
        assert_exact(engine, losses, model)

    def test_around_the_call_alone(self, make: Any, losses_of: Losses) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        losses = losses_of(model(batch(4, 3)))
        with make():
            assert_exact(engine, losses, model)

    def test_inside_of_the_forward_pass(self, make: Any, losses_of: Losses) -> None:
        model = Inside(make)
        engine = Engine(model, batch_dim=0)
        assert_exact(engine, losses_of(model(batch(4, 3))), model)


class TestDefaults:
    """Default devices and dtypes that are not those of the model."""

    @pytest.mark.parametrize("batch_dim", [0, None])
    @pytest.mark.parametrize("losses_of", EACH)
    def test_another_device(self, losses_of: Losses, batch_dim: int | None) -> None:
        """Nothing of the engine is made on the default device."""
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Conv1d(3, 2, 1))
        engine = Engine(model, batch_dim=batch_dim)
        ids = torch.randint(0, 5, (4, 3))
        for _ in range(3):
            with torch.device("meta"):
                losses = model(ids).square()
            losses = losses_of(losses)
            with torch.device("meta"):
                engine.compute_gramian(losses)
            assert_exact(engine, losses, model)

    def test_another_device_around_products(self) -> None:
        """The same holds for Jacobians, of micro-batches, too, and for sketches."""
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Flatten(), nn.Linear(9, 2))
        engine = Engine(model, batch_dim=0)
        ids = torch.randint(0, 5, (4, 3))
        both = model(ids).square(), model(ids[:2]).square().sum(1)
        expected = torch.cat([reference_jacobian(x, model.parameters()) for x in both])
        index, weights = torch.tensor([9, 0, 3]), torch.rand(10)
        with torch.device("meta"):
            jacobian = concatenate([engine.jacobian(losses) for losses in both])
            rows = torch.cat([x.flatten(1) for x in jacobian.rows(index).values()], 1)
            gramians = jacobian.gramian(), jacobian.cross_gramian(jacobian)
            norms = jacobian.row_norms()
            products = torch.cat([x.flatten() for x in jacobian.vjp(weights).values()])
            sketch = engine.sketch(both[0])
            tasks = engine.weights([both[1], both[1]], lambda _: weights[:4])
            with engine.accumulate(lambda _: weights) as steps:
                for losses in both:
                    steps.add(losses)
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert_close_to_reference(rows, expected[index])
        assert_close_to_reference(norms, expected.norm(dim=1))
        for gramian in gramians:
            assert_close_to_reference(gramian, expected @ expected.T)
        for gradient in (products, gradients):
            assert_close_to_reference(gradient, weights @ expected)
        assert [x.tolist() for x in tasks] == weights[:4].view(2, 2).T.tolist()
        again = engine.sketch(model(ids).square())
        torch.testing.assert_close(sketch.rows, again.rows)

    def test_a_device_that_is_set_inside_of_the_forward_pass(self) -> None:
        """The mode that does so goes below all others, and comes from there."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                device = torch.get_default_device()
                before = None if device.type == "cpu" else device
                torch.set_default_device("meta")
                y = self.layer(x)
                torch.set_default_device(before)
                return y.tanh()

        model = Model()
        engine = Engine(model, batch_dim=0)
        for _ in range(2):
            assert_exact(engine, per_sample(model(batch(4, 3))), model)

    @pytest.mark.parametrize("losses_of", EACH)
    def test_another_dtype(self, losses_of: Losses) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            losses = losses_of(model(x).to(before))
            gramian = engine.compute_gramian(losses)
        finally:
            torch.set_default_dtype(before)
        assert gramian.dtype == before
        assert_exact(engine, losses, model)


class TestInstruments:
    """The profiler, and the search for anomalies."""

    @pytest.mark.parametrize("losses_of", EACH)
    def test_profiler(self, losses_of: Losses) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        with torch.profiler.profile(
            record_shapes=True, profile_memory=True, with_stack=True, acc_events=True
        ) as p:
            assert_exact(engine, losses_of(model(batch(4, 3))), model)
        assert any("_Tap" in event.key for event in p.key_averages())

    @pytest.mark.parametrize("losses_of", EACH)
    def test_detect_anomaly(self, losses_of: Losses) -> None:
        """No pass is batched then: the search reads values."""
        model = nn.Sequential(mlp(), nn.GRU(2, 2, batch_first=True), Softer())
        engine = Engine(model, batch_dim=0)
        with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"):
            context = torch.autograd.detect_anomaly()
        with context, warnings.catch_warnings():
            warnings.simplefilter("error")
            losses = losses_of(model(batch(4, 2, 3)))
            engine.compute_gramian(losses)
        assert_exact(engine, losses, model)

    def test_an_anomaly_is_found(self) -> None:
        """The user's search goes through the engine's passes."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"):
            context = torch.autograd.detect_anomaly()
        losses = per_sample(model(batch(4, 3)).mul(0).sqrt())
        with context, pytest.warns(UserWarning, match="Error detected|No forward pass"):  # noqa: SIM117
            with pytest.raises(RuntimeError, match="returned nan"):
                engine.compute_gramian(losses)
        assert_works(engine, model, batch(4, 3))


class Softer(nn.Module):
    """A call without a rule, and a derived weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(batch(2, 2))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.linear(pair[0], self.weight.softmax(0))


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "before": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "before, with keywords": lambda m: m.register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0].sin(),), kwargs), with_kwargs=True
    ),
    "before, first": lambda m: m.register_forward_pre_hook(
        lambda _, args: (args[0].cos(),), prepend=True
    ),
    "after": lambda m: m.register_forward_hook(lambda _, __, y: y * y),
    "after, first": lambda m: m.register_forward_hook(lambda _, __, y: y.sin(), prepend=True),
    "after, with a parameter": lambda m: m.register_forward_hook(
        lambda module, _, y: y + module.bias.cos() if hasattr(module, "bias") else y
    ),
    "after, always": lambda m: m.register_forward_hook(lambda *_: None, always_call=True),
    "backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward that changes": lambda m: m.register_full_backward_hook(
        lambda _, given, __: tuple(g if g is None else g * 2 for g in given)
    ),
    "backward, before": lambda m: m.register_full_backward_pre_hook(
        lambda _, given: tuple(g * 3 for g in given)
    ),
}


@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("when", ["before the engine", "after the engine"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_others(name: str, when: str, losses_of: Losses) -> None:
    """On the model and on its parts, before the engine's hooks or after them."""
    model = mlp()
    modules = [model, model[0], model[1], model[2]]
    if when == "before the engine":
        handles = [HOOKS[name](module) for module in modules]
    engine = Engine(model, batch_dim=0)
    if when == "after the engine":
        handles = [HOOKS[name](module) for module in modules]
    for _ in range(2):
        x = batch(4, 3).requires_grad_()  # or PyTorch warns of the backward hooks
        assert_exact(engine, losses_of(model(x)), model)
    for handle in handles:
        handle.remove()
    assert_works(engine, model, batch(4, 3))


class Greedy(torch.autograd.Function):
    """A custom function that changes the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        del ctx
        return g.mul_(2)


class Shifted(nn.Module):
    """An addition, which hands its gradient on as it is, behind a greedy function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return Greedy.apply(self.layer(x)) + self.shift


class GreedyTwice(nn.Module):
    """One layer used twice, whose second use waits for the first as a greedy function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Greedy.apply(self.layer(x)) + self.layer(x.flip(1))


class GreedyDerived(nn.Module):
    """The same with a derived weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.tanh()
        return Greedy.apply(F.linear(x, weight)) + F.linear(x.flip(1), weight)


@pytest.mark.parametrize("verify", ["never", "first"])
@pytest.mark.parametrize("make_model", [Shifted, GreedyTwice, GreedyDerived])
def test_gradients_changed_in_place_are_noticed(make_model: Any, verify: Any) -> None:
    """Blocks that are kept would be silently wrong."""
    model = make_model()
    engine = Engine(model, verify=verify)
    with pytest.raises(ChangedTensorError, match="custom autograd Function"):
        engine.compute_gramian(per_sample(model(batch(5, 3))))
    with pytest.raises(ChangedTensorError, match="custom"):
        engine.backward(per_sample(model(batch(5, 3))), lambda gramian: gramian.sum(1))
    with pytest.raises(ChangedTensorError, match="custom"):
        engine.jacobian(per_sample(model(batch(5, 3)))).gramian()
    assert all(parameter.grad is None for parameter in model.parameters())
