"""Uses that are contracted by programs: exact in series of steps in which their forms change."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import Engine, UnsupportedError, VerificationError
from autogram._blocks import Adjoint, Program
from autogram._blocks.kernels import CpuKernels
from autogram._blocks.programs import known
from autogram._capture import alone
from autogram._capture.backward.assembly import Assembly
from autogram.rules import product, register_rule, unregister_rule
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, in_real, irregular, trainable

Model = nn.Module


@pytest.fixture(params=["in bundles", "not in bundles"], autouse=True)
def each_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes each program the second time that its key comes, for columns of any size."""
    monkeypatch.setattr(known, "_WORTH_WRITING", 2)
    if request.param == "not in bundles":
        monkeypatch.setattr(CpuKernels, "tiny", 0)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that were run, in their order."""
    made: list[str] = []
    run = Program.__call__

    def noted(self: Program, *args: Any) -> Any:
        made.append(str(self))
        return run(self, *args)

    monkeypatch.setattr(Program, "__call__", noted)
    return made


def assert_step_is_exact(
    engine: Engine, model: Model, losses_of: Callable[[], Tensor], *, fused: bool
) -> None:
    """Assert that a step of an engine agrees with plain autograd."""
    parameters = trainable(model)
    jacobian = reference_jacobian(losses_of(), parameters)
    for parameter in parameters:
        parameter.grad = None
    losses = losses_of()
    if not fused:
        gramian = engine.compute_gramian(losses)
    else:
        weights = irregular(losses.numel()).view(losses.shape)
        _, gramian = engine.backward(losses, lambda _: weights, return_gramian=True)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([in_real(gradient).flatten() for gradient in gradients])
        assert_close_to_reference(flat, weights.flatten() @ jacobian)
    assert_close_to_reference(gramian, jacobian @ jacobian.T)


def per_sample(output: Tensor) -> Tensor:
    """A loss for each first index."""
    return output.flatten(1).sin().square().sum(1)


class Block(nn.Module):
    """Layers of several kinds, some of them of equal forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.norm, self.other = nn.LayerNorm(6, eps=1e-3), nn.LayerNorm(6, eps=2.0)
        self.rms = nn.RMSNorm(6, elementwise_affine=True)
        self.scale = nn.Parameter(irregular(6))
        self.convolution = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.channels = nn.GroupNorm(3, 6)
        self.table = nn.Embedding(7, 6)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """From ``(b, t, 6)`` and ``(b, t)``."""
        x = self.other(self.norm(self.first(x)).tanh()) + self.second(x) * self.scale
        x = self.rms(x + self.table(words))
        x = self.channels(self.convolution(x.transpose(1, 2)))
        return torch.addmm(self.last.bias, x.mean(2), self.last.weight.t(), alpha=0.5)


SIZES = [(4, 5), (4, 5), (4, 5), (3, 5), (4, 5), (4, 1), (4, 1), (3, 5), (4, 1), (4, 5), (1, 5)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("has_room", [False, True, None])
def test_sizes_change(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, fused: bool, has_room: bool | None
) -> None:
    """Also where a device has room for rows in some steps alone, for which there is ``None``."""
    rooms = iter(range(10**9))

    def room(*_: Any) -> int:
        return next(rooms) % 3 * 200 if has_room is None else has_room * 2**30

    monkeypatch.setattr(CpuKernels, "room", room)
    torch.manual_seed(0)
    model = Block()
    engine = Engine(model, verify="never")
    for step, (b, t) in enumerate(SIZES):
        x, words = torch.randn(b, t, 6), torch.randint(0, 7 - step % 3, (b, t))
        losses_of = partial(lambda *given: per_sample(model(*given)), x, words)
        assert_step_is_exact(engine, model, losses_of, fused=fused)
    assert len(runs) > len(SIZES)


@pytest.mark.parametrize("fused", [False, True])
def test_strides_change(runs: list[str], fused: bool) -> None:
    """As those of images in two memory formats, and of what was transposed or expanded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))
    engine = Engine(model, verify="never")
    images = torch.randn(3, 2, 5, 5)
    forms = [
        images,
        images.contiguous(memory_format=torch.channels_last),
        images.transpose(2, 3),
        images[:, :1].expand(3, 2, 5, 5),
        torch.randn(3, 4, 10, 10)[:, ::2, ::2, ::2],
    ]
    for form in [*forms, *forms, *forms, forms[0]]:
        assert_step_is_exact(engine, model, lambda form=form: per_sample(model(form)), fused=fused)
    assert runs


@pytest.mark.parametrize("fused", [False, True])
def test_numbers_change(runs: list[str], fused: bool) -> None:
    """Numbers that formulas have, and no shape shows."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x: Tensor, eps: float, alpha: float, beta: float) -> Tensor:
            x = F.layer_norm(x, (6,), self.norm.weight, self.norm.bias, eps)
            return torch.addmm(self.last.bias, x, self.last.weight, alpha=alpha, beta=beta)

    model = Model()
    engine = Engine(model, verify="never")
    x = torch.randn(4, 6)
    for numbers in [(1e-5, 1, 1), (1e-5, 1.0, 1), (0.5, 2, 1), (1e-5, 2, -1), (0.5, 1, 1)] * 3:
        losses_of = partial(lambda *given: per_sample(model(x, *given)), *numbers)
        assert_step_is_exact(engine, model, losses_of, fused=fused)
    assert runs


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_use_shares_changes(runs: list[str], fused: bool) -> None:
    """A layer that is called twice in some steps, frozen in part, or scaled by a hook."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor, kind: str) -> Tensor:
            y = self.first(x).tanh()
            y = self.second(y) if kind != "twice" else self.first(y).tanh() + self.second(y)
            if kind == "in the loss":
                return y * self.first.weight.sum(1)
            return y * self.first.bias if kind == "elsewhere" else y

    model = Model()
    engine = Engine(model, verify="never")
    x = torch.randn(4, 3, 6)
    kinds = ["once", "twice", "once", "once", "elsewhere", "twice", "in the loss", "elsewhere"]
    for kind in [*kinds, "frozen", *kinds, "frozen", "frozen", *kinds]:
        first.bias.requires_grad_(kind != "frozen")
        second.weight.requires_grad_(kind != "frozen")
        assert_step_is_exact(engine, model, lambda k=kind: per_sample(model(x, k)), fused=fused)
    assert runs


class Shared(nn.Module):
    """A weight that is read in several ways, of which each step takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.weight = nn.Parameter(irregular(6, 6))

    def forward(self, x: Tensor, kind: str) -> Tensor:
        y = self.first(x).tanh()
        weight = self.weight
        if kind == "transposed":
            weight = weight.t()
        elif kind == "overlapping":  # which is no region, so that its blocks are pulled back
            weight = weight.as_strided((6, 6), (5, 1))
        elif kind == "checkpointed":
            y = checkpoint(self._before, y, use_reentrant=False)
        elif kind == "in a slice":  # behind which a survey of the graph may not see uses
            others, y = y[:, 1].clone(), y.clone()
            y[:, 0].addmm_(others, weight)
        return self.last(F.linear(y, weight).tanh())

    def _before(self, y: Tensor) -> Tensor:
        """Reads the weight once more, where a survey of the graph does not see it."""
        return F.linear(y, self.weight).tanh()


class OneOrTwo(nn.Module):
    """A normalisation and a layer, whose two parameters may be one, or parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scales = nn.ParameterList(torch.rand(4) + 0.5 for _ in range(2))
        self.flat = nn.ParameterList(torch.randn(20) for _ in range(2))

    def forward(self, x: Tensor, other: int) -> Tensor:
        y = F.layer_norm(self.first(x), (4,), self.scales[0], self.scales[other])
        return self.last(F.linear(y, self.flat[0][:16].view(4, 4), self.flat[other][16:]).tanh())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_whether_two_parameters_are_one_changes(runs: list[str], first: int, fused: bool) -> None:
    model = OneOrTwo()
    engine = Engine(model, verify="never")
    for other in [first] * 4 + [1 - first] * 4 + [first, 1 - first]:
        x = torch.randn(5, 3)
        step = partial(lambda x, i: per_sample(model(x, i)), x, other)
        assert_step_is_exact(engine, model, step, fused=fused)
    assert runs


class Complex(nn.Module):
    """Complex numbers divided by real ones, as they are or conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.below = nn.Parameter(torch.rand(2) + 0.5)
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def forward(self, x: Tensor, conjugated: bool) -> Tensor:
        z = torch.view_as_complex(self.first(x).unflatten(1, (2, 2)))
        y = (z.conj() if conjugated else z) / self.below
        y = y + z.conj().imag * self.phase
        return self.last(torch.view_as_real(y.resolve_conj()).flatten(1))


@pytest.mark.parametrize("fused", [False, True])
def test_conjugate_views(runs: list[str], fused: bool) -> None:
    model = Complex()
    engine = Engine(model, verify="never")
    for conjugated in (False, False, False, True, True, True, False):
        x = torch.randn(5, 3)
        step = partial(lambda x, c: per_sample(model(x, c)), x, conjugated)
        assert_step_is_exact(engine, model, step, fused=fused)
    assert runs


@pytest.mark.parametrize("part", [0, -1], ids=["the Gramian", "what is kept"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_check_sees_what_programs_give(
    monkeypatch: pytest.MonkeyPatch, part: int, fused: bool
) -> None:
    model = Block()
    engine = Engine(model, batch_dim=0, verify="always")

    def step() -> None:
        losses = per_sample(model(torch.randn(4, 5, 6), torch.randint(0, 7, (4, 5))))
        if fused:
            engine.backward(losses, lambda gramian: gramian.diagonal())
        else:
            engine.compute_gramian(losses)

    for _ in range(4):
        step()
    run = Program.__call__

    def wrong(self: Program, *args: Any) -> Any:
        found = list(run(self, *args))
        found[part] = found[part] * 2
        return found

    monkeypatch.setattr(Program, "__call__", wrong)
    with pytest.raises(VerificationError):
        step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "kind", ["transposed", "overlapping", "checkpointed", "in a slice", "in the losses"]
)
def test_how_a_weight_is_read_changes(runs: list[str], fused: bool, kind: str) -> None:
    torch.manual_seed(0)
    model = Shared()
    engine = Engine(model, verify="never")
    x = torch.randn(4, 3, 6)

    def losses_of(kind: str) -> Tensor:
        losses = per_sample(model(x, kind))
        return losses * model.last.weight.square().sum() if kind == "in the losses" else losses

    for each in ["once", kind] * 2 + ["once"] * 3 + [kind] * 3 + ["once", kind]:
        assert_step_is_exact(engine, model, partial(losses_of, each), fused=fused)
    assert runs


@pytest.mark.parametrize("fused", [False, True])
def test_the_dimension_of_the_samples_changes(runs: list[str], fused: bool) -> None:
    """Tensors of the same forms, whose samples are elsewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    engine = Engine(model, verify="never")
    x = torch.randn(4, 4, 6)
    for dim in [0, 0, 0, 1, 0, 1, 1, 1, 0]:
        losses_of = partial(lambda d: model(x).sin().square().sum((d, 2)), 1 - dim)
        assert_step_is_exact(engine, model, losses_of, fused=fused)
    assert runs


@pytest.mark.parametrize("fused", [False, True])
def test_one_of_two_is_frozen(runs: list[str], fused: bool) -> None:
    """A rule computes the blocks of both together, which have equal forms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.LayerNorm(5))
    engine = Engine(model, verify="never")
    x = torch.randn(3, 4, 5)
    for frozen in [None, "bias", "bias", "bias", "weight", "weight", None, None, "bias"]:
        for layer in model[1:]:
            layer.weight.requires_grad_(frozen != "weight")
            layer.bias.requires_grad_(frozen != "bias")
        assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=fused)
    assert runs


def test_the_limit_changes(runs: list[str]) -> None:
    """What is cut to keep the limit is cut in programs, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    engine = Engine(model, verify="never")
    x = torch.randn(6, 4, 6)
    found: dict[int, set[str]] = {}
    for limit in (2**20, 2**20, 2**20, 40, 40, 40, 2**20, 40):
        engine._limit.elements = limit
        runs.clear()
        for fused in (False, True):
            assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=fused)
        found.setdefault(limit, set()).update(run for run in runs if "as_strided" in run)
    cut = {run for run in found[40] if "slice(" in run or "narrow" in run or "split" in run}
    assert cut
    assert not cut & found[2**20]


@pytest.mark.cpu
class TestRoom:
    """How many elements of rows a device has room for decides what a fused step keeps."""

    @pytest.fixture
    def taken(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many elements of rows each pass has kept that are larger than factors."""
        found: list[int] = []
        complete = Assembly.complete

        def noted(self: Assembly) -> None:
            complete(self)
            found.append(self._taken)

        monkeypatch.setattr(Assembly, "complete", noted)
        return found

    def test_is_for_all_layers(self, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
        engine = Engine(model, verify="never")
        x = torch.randn(4, 20, 64)
        room = [2 * 4 * 64**2]  # for rows of two layers
        kernels = engine._devices.on("cpu")
        monkeypatch.setattr(kernels, "room", lambda *_: room[0])
        monkeypatch.setattr(kernels, "are_rows_worth_memory", lambda *_: True)
        for _ in range(6):
            assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=True)
        assert taken[-1] == room[0]
        room[0] = 0
        assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=True)
        assert taken[-1] == 0

    def test_may_be_short_when_a_program_is_due(
        self, taken: list[int], runs: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Later steps keep rows where there is room, by a program that is written then."""
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)])
        engine = Engine(model, verify="never")
        x = torch.randn(4, 20, 64)
        room = [0]
        kernels = engine._devices.on("cpu")
        monkeypatch.setattr(kernels, "room", lambda *_: room[0])
        monkeypatch.setattr(kernels, "are_rows_worth_memory", lambda *_: True)
        for room[0] in [0] * 4 + [2**30] * 4:
            assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=True)
        assert set(taken[:4]) == {0}
        assert set(taken[4:]) == {2 * 4 * 64**2}
        assert runs

    def test_gradients_of_convolutions_are_those_of_pytorch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where no rows are kept, they are computed without patches, also in later steps."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 2))
        engine = Engine(model, verify="never")
        x = torch.randn(2, 8, 4, 4)
        monkeypatch.setattr(CpuKernels, "room", lambda *_: 0)
        calls: list[Adjoint] = []
        call = Adjoint.__call__

        def noted(self: Adjoint, *given: Any) -> Tensor:
            calls.append(self)
            return call(self, *given)

        monkeypatch.setattr(Adjoint, "__call__", noted)
        counts = []
        for _ in range(5):
            calls.clear()
            assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=True)
            counts.append(len(calls))
        assert counts == counts[:1] * 5
        assert counts[0]


def test_steps_inside_of_steps(runs: list[str]) -> None:
    """They have no memory of their own for rows, which the outer step uses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5, bias=False))
    engine = Engine(model, verify="never")
    x, parameters = torch.randn(4, 3, 6), trainable(model)
    jacobian = reference_jacobian(per_sample(model(x)), parameters)
    weights = irregular(4)

    def weighting(gramian: Tensor) -> Tensor:
        for _ in range(2):
            assert_close_to_reference(engine.compute_gramian(per_sample(model(x))), gramian)
        engine.backward(per_sample(model(x)), lambda _: weights)
        return weights

    for _ in range(5):
        model.zero_grad()
        engine.backward(per_sample(model(x)), weighting)
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        assert_close_to_reference(flat, 2 * weights @ jacobian)
    assert runs


def test_what_is_asked_for_changes(runs: list[str]) -> None:
    """Jacobians, checks, reports and steps in turn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5))
    engine = Engine(model, verify="first")
    x, parameters = torch.randn(4, 6), trainable(model)
    for _ in range(6):
        jacobian = reference_jacobian(per_sample(model(x)), parameters)
        runs.clear()
        found = engine.jacobian(per_sample(model(x)))
        assert not runs  # a Jacobian keeps factors, and adds no Gramian up
        assert_close_to_reference(found.gramian(), jacobian @ jacobian.T)
        assert_close_to_reference(found.row_norms(), jacobian.norm(dim=1))
        engine.verify(per_sample(model(x)))
        for fused in (True, False):
            assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=fused)
        assert "0.weight" in str(engine.report())


def test_parameters_that_move_are_told_of() -> None:
    """In the steps with programs as in the first."""
    model = nn.Linear(6, 6)
    engine = Engine(model, verify="never")
    x = torch.randn(4, 6)
    for _ in range(4):
        engine.compute_gramian(per_sample(model(x)))
    losses = per_sample(model(x))
    model.weight.data = model.weight.data.t().contiguous().t()
    with pytest.raises(UnsupportedError, match="was moved in memory after the forward pass"):
        engine.compute_gramian(losses)
    for _ in range(3):
        assert_step_is_exact(engine, model, lambda: per_sample(model(x)), fused=True)


class TestOfTheUser:
    """What a user's function does need not follow from the forms of its tensors."""

    def test_rules_that_count_their_calls(self, runs: list[str]) -> None:
        calls: list[int] = []
        weight = nn.ParameterList([nn.Parameter(irregular(6))])

        def prepare(cotangent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(len(calls))
            return cotangent, weight[0] / torch.hypot(x, weight[0])

        @register_rule(torch.hypot)
        def rule(x: Tensor, weight: Tensor) -> Any:
            return [product(weight, "to,to->o", x, prepare=prepare)]

        try:

            class Model(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.inner = weight

                def forward(self, x: Tensor) -> Tensor:
                    return torch.hypot(x, self.inner[0])

            outer = Model()
            engine = Engine(outer, verify="never")
            x = torch.randn(4, 6)
            for _ in range(5):
                assert_step_is_exact(engine, outer, lambda: per_sample(outer(x)), fused=False)
            assert len(calls) >= 5
            assert not runs
        finally:
            unregister_rule(torch.hypot)

    def test_closures_have_no_program(self) -> None:
        number = 3

        def closure(x: Tensor) -> Tensor:
            return x * number

        for value in (
            closure,
            partial(closure),
            lambda x: x,
            object(),
            [1],
            nn.Tanh(),
            torch.ones(1),
        ):
            with pytest.raises(alone._ImpureError):
                alone._made_of(value)
        assert alone._made_of(partial(F.layer_norm, eps=1.0)) == (F.layer_norm, (), ("eps", 1.0))


def test_programs_keep_no_tensor() -> None:
    torch.manual_seed(0)
    model = Block()
    engine = Engine(model, verify="never")
    x, words = torch.randn(4, 5, 6), torch.randint(7, (4, 5))
    for _ in range(5):
        engine.compute_gramian(per_sample(model(x, words)))
        engine.backward(per_sample(model(x, words)), lambda g: g.diagonal())
    gc.collect()
    gc.disable()
    try:
        hidden = model(x, words)
        kept = [weakref.ref(hidden)]
        losses = per_sample(hidden)
        engine.backward(losses, lambda g: g.diagonal())
        kept += [weakref.ref(losses), *(weakref.ref(p) for p in trainable(model))]
        del hidden, losses
        assert kept[0]() is kept[1]() is None
        kept += [weakref.ref(kernels) for kernels in (engine._devices.on("cpu"), engine._devices)]
        del model, engine  # which no program keeps
        assert kept[-2]() is kept[-1]() is None
        gc.collect()
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()


def test_threads_have_memory_of_their_own() -> None:
    """Programs that one thread has written down are run by another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    engine = Engine(model, verify="never")
    inputs = [torch.randn(4, 3, 6) for _ in range(2)]
    jacobians = [reference_jacobian(per_sample(model(x)), trainable(model)) for x in inputs]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            for _ in range(10):
                gramian = engine.compute_gramian(per_sample(model(inputs[number])))
                expected = jacobians[number] @ jacobians[number].T
                assert_close_to_reference(gramian, expected)
        except BaseException as error:
            failures.append(error)

    for _ in range(2):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
