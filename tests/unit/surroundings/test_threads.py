"""One engine, or one model, in several threads: every call is exact."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from autogram import CoupledObjectivesWarning, Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, assert_same_gradients, features, trainable
from tests.unit.engines import assert_exact, batch, mlp, per_sample
from tests.unit.environment import device_of_threads

Losses = Callable[[Tensor], Tensor]

EACH = [
    pytest.param(per_sample, id="(B,)"),
    pytest.param(lambda output: features(output, 3), id="(B, K)"),
]


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Let threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Turn:
    """Lets threads meet. One that is alone goes on after a while."""

    def __init__(self, count: int = 2) -> None:
        self._barrier = threading.Barrier(count, timeout=20)

    def meet(self, *_: object) -> None:
        self._barrier.wait()


def in_threads(run: Callable[[int], None], count: int = 2) -> None:
    """Run 0, 1, ... in threads of their own, and raise what they raise."""
    with ThreadPoolExecutor(count, initializer=device_of_threads()) as pool:
        for done in [pool.submit(run, i) for i in range(count)]:
            done.result()


class Checkpointed(nn.Module):
    """A part runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(3, 4), mlp(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(checkpoint(self.part, self.first(x), use_reentrant=False))
        return y


class Sorted(nn.Module):
    """Samples are in irregular places, which are measured at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        y: Tensor = self.last(self.first(x).tanh()[order])
        return y[order.argsort()]


MODELS = [mlp, Checkpointed, Sorted]


@pytest.mark.cpu  # hooks wait for other threads, and a GPU has one for all passes
@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("make", MODELS)
class TestOneEngine:
    """One model and its engine, in two threads."""

    def test_gramians(self, make: Callable[[], nn.Module], losses_of: Losses) -> None:
        """In the middle of each other's forward passes and of each other's backward passes."""
        model = make()
        engine = Engine(model, batch_dim=0)
        inputs = [[batch(4 + i, 3) for _ in range(6)] for i in range(2)]
        turn = Turn()

        def run(i: int) -> None:
            for x in inputs[i]:
                turn.meet()
                y = model(x)
                turn.meet()
                losses = losses_of(y)
                expected = reference_jacobian(losses, trainable(model))
                turn.meet()
                y.register_hook(_once(turn.meet))
                gramian = engine.compute_gramian(losses)
                assert_close_to_reference(gramian, expected @ expected.T)

        in_threads(run)

    def test_steps(self, make: Callable[[], nn.Module], losses_of: Losses) -> None:
        """While both weigh; gradients of both are added up."""
        model = make()
        engine = Engine(model, batch_dim=0)
        turn = Turn()
        for _ in range(3):
            parts = [losses_of(model(batch(4 + i, 3))) for i in range(2)]
            weights = [batch(losses.numel()) for losses in parts]
            expected = sum(
                w @ reference_jacobian(losses, trainable(model))
                for w, losses in zip(weights, parts, strict=True)
            )

            def run(i: int, parts: list[Tensor] = parts, weights: list[Tensor] = weights) -> None:
                def weigh(gramian: Tensor) -> Tensor:
                    turn.meet()
                    assert len(gramian) == len(weights[i])
                    return weights[i]

                engine.backward(parts[i], weigh)

            in_threads(run)
            found = torch.cat([p.grad.flatten() for p in trainable(model) if p.grad is not None])
            assert isinstance(expected, Tensor)
            assert_close_to_reference(found, expected)
            model.zero_grad()

    def test_forward_beside_a_gramian(
        self, make: Callable[[], nn.Module], losses_of: Losses
    ) -> None:
        """One thread runs forward, again and again, while the other asks."""
        model = make()
        engine = Engine(model, batch_dim=0)
        is_over = threading.Event()
        alive: list[Tensor] = []

        def run(i: int) -> None:
            if i:
                while not is_over.is_set():
                    alive.append(model(batch(5, 3)))
                    del alive[:-3]
                return
            try:
                for _ in range(12):
                    assert_exact(engine, losses_of(model(batch(4, 3))), model)
                    jacobian = reference_jacobian(
                        losses := losses_of(model(batch(4, 3))), trainable(model)
                    )
                    assert_close_to_reference(engine.jacobian(losses).dense(), jacobian)
            finally:
                is_over.set()

        in_threads(run)
        assert_exact(engine, losses_of(alive[-1]), model)

    def test_an_ordinary_pass_beside_a_gramian(
        self, make: Callable[[], nn.Module], losses_of: Losses
    ) -> None:
        """Of the same graph. Taps do not answer to it."""
        model = make()
        engine = Engine(model, batch_dim=0)
        for _ in range(4):
            turn = Turn()
            y = model(batch(4, 3))
            losses = losses_of(y)
            expected = reference_jacobian(losses, trainable(model))
            u = batch(losses.numel()).view_as(losses)
            calls = threading.local()

            def meet(g: Tensor, calls: threading.local = calls, turn: Turn = turn) -> None:
                del g
                if not hasattr(calls, "made"):
                    calls.made = True
                    turn.meet()

            y.register_hook(meet)
            found: list[Tensor] = []

            def run(
                i: int,
                losses: Tensor = losses,
                u: Tensor = u,
                found: list[Tensor] = found,
                expected: Tensor = expected,
            ) -> None:
                if i:
                    found.extend(torch.autograd.grad(losses, trainable(model), u, True))
                else:
                    gramian = engine.compute_gramian(losses)
                    assert_close_to_reference(gramian, expected @ expected.T)

            in_threads(run)
            gradient = torch.cat([g.flatten() for g in found])
            assert_close_to_reference(gradient, u.flatten() @ expected)


def _once(function: Callable[[], None]) -> Callable[[Tensor], None]:
    """A hook that does something in the first pass alone."""
    calls: list[int] = []

    def hook(g: Tensor) -> None:
        del g
        if not calls:
            calls.append(1)
            function()

    return hook


def test_more_threads_than_cores() -> None:
    """With other shapes and other losses in each; what is not per-sample is noticed in each."""
    model = mlp()
    engine = Engine(model)
    inputs = [batch(3 + i, 3) for i in range(6)]

    def run(i: int) -> None:
        for _ in range(4):
            y = model(inputs[i])
            losses = per_sample(y - y.mean(0) if i == 5 else y)
            expected = reference_jacobian(losses, trainable(model))
            gramian = engine.compute_gramian(losses)
            assert_close_to_reference(gramian, expected @ expected.T)

    with pytest.warns(CoupledObjectivesWarning) as told:
        in_threads(run, 6)
    assert [x.category for x in told].count(CoupledObjectivesWarning) == 1


def test_threads_that_come_and_go_know_what_others_have_found() -> None:
    """A call in a new thread does not begin from nothing."""
    model = mlp()
    engine = Engine(model, batch_dim=0, verify="never")
    passes: list[int] = []

    def run(i: int) -> None:
        del i
        y = model(batch(4, 3))
        y.register_hook(lambda _: passes.append(1))
        engine.compute_gramian(per_sample(y))

    counts = []
    for _ in range(7):
        passes.clear()
        in_threads(run, 1)
        counts.append(len(passes))
    assert counts == [1] * 7


@pytest.mark.cpu
def test_two_models_with_hooks_that_ask_for_the_other() -> None:
    """An engine is asked in a pass of another one, crosswise, in two threads."""
    models = [mlp() for _ in range(2)]
    engines = [Engine(model, batch_dim=0) for model in models]
    turn = Turn()

    def run(i: int) -> None:
        def ask() -> None:
            turn.meet()
            with torch.enable_grad():
                other = models[1 - i]
                losses = per_sample(other(batch(3, 3)))
                jacobian = reference_jacobian(losses, trainable(other))
                gramian = engines[1 - i].compute_gramian(losses)
            assert_close_to_reference(gramian, jacobian @ jacobian.T)

        for _ in range(3):
            y = models[i](batch(4, 3))
            losses = per_sample(y)
            jacobian = reference_jacobian(losses, trainable(models[i]))
            y.register_hook(_once(ask))
            gramian = engines[i].compute_gramian(losses)
            assert_close_to_reference(gramian, jacobian @ jacobian.T)

    in_threads(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_threads_that_load_data() -> None:
    """They do nothing with the engine, and gradients are those of a model without one."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    engine = Engine(model, batch_dim=0)
    data = TensorDataset(batch(12, 3))
    for (x,) in DataLoader(data, batch_size=4):
        with ThreadPoolExecutor(2) as pool:
            loading = [
                pool.submit(lambda: next(iter(DataLoader(data, batch_size=4)))) for _ in "ab"
            ]
            losses = per_sample(model(x))
            assert_exact(engine, losses, model)
            for done in loading:
                done.result()
        losses.sum().backward()
        per_sample(twin(x)).sum().backward()
        assert_same_gradients(model, twin)


@pytest.mark.cpu  # a GPU has one thread for all passes, which would wait for itself
def test_gradients_that_are_retained_in_another_thread() -> None:
    """A pass of the engine puts back those of its own graph alone."""

    class Retaining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.first(x)
            h.retain_grad()
            return self.last(h.tanh()), h

    model = Retaining()
    engine = Engine(model, batch_dim=0)
    y, h = model(batch(4, 3))
    other, its = model(batch(4, 3))

    def beside() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: other.sum().backward()).result()

    y.register_hook(_once(beside))
    engine.compute_gramian(per_sample(y))
    assert h.grad is None
    assert its.grad is not None


def test_the_engine_of_pytorch_is_back_when_all_threads_are_done() -> None:
    model = mlp()
    engine = Engine(model, batch_dim=0)
    before = Variable._execution_engine
    in_threads(lambda _: assert_exact(engine, per_sample(model(batch(4, 3))), model), 4)
    assert Variable._execution_engine is before


def test_hooks_on_parameters_rest_while_anybody_verifies() -> None:
    """In two threads, of which one ends before the other; and they run again afterwards."""
    model = mlp()
    engine = Engine(model, batch_dim=0, verify="always")
    calls: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: calls.append(1))
    ends = threading.Event()

    def run(i: int) -> None:
        y = model(batch(4, 3))
        passes: list[int] = []

        def wait(g: Tensor) -> None:
            del g
            passes.append(1)
            if i and not ends.is_set() and len(passes) == 8:
                ends.wait(20)

        y.register_hook(wait)
        engine.compute_gramian(per_sample(y))
        if not i:
            ends.set()

    for _ in range(5):
        in_threads(run)
        assert not calls
    model(batch(4, 3)).sum().backward()
    assert len(calls) == 4


def test_gradients_of_many_steps_at_once_are_added_up() -> None:
    """None is lost where two threads find no gradient yet."""
    model = nn.Linear(1, 1, bias=False)
    engine = Engine(model, batch_dim=0, verify="never")
    turn = Turn(4)
    losses = [model(torch.ones(2, 1)).sum(1) for _ in range(4 * 25)]
    ones = torch.ones(2)

    def run(i: int) -> None:
        for k in range(25):
            turn.meet()
            if not i:
                model.weight.grad = None
            turn.meet()
            engine.backward(losses[4 * k + i], lambda _: ones)
            turn.meet()
            assert model.weight.grad is not None
            assert model.weight.grad.item() == 8

    in_threads(run, 4)
