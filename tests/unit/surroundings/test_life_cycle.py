"""An engine's life: made, paused, removed; and what may happen to its model meanwhile."""

import copy
import gc
import io
import multiprocessing
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from autogram import Engine, NotConnectedError, RemovedEngineError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import assert_exact, assert_nothing_is_left, assert_works, batch, mlp
from tests.unit.engines import per_sample as losses_of


def hooks_of(model: nn.Module) -> list[object]:
    """Everything that was hooked onto the modules of a model."""
    names = [name for name in vars(model) if "hooks" in name and not name.startswith("_is")]
    hooks = [hook for m in model.modules() for name in names for hook in vars(m)[name] or ()]
    return hooks + [m for m in model.modules() if m._compiled_call_impl is not None]


def has_taps(tensor: Tensor) -> bool:
    """Whether an engine has recorded the forward pass behind a tensor."""
    seen, pending = set(), [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
    return any("Tap" in type(node).__name__ for node in seen)


class TestRemove:
    """The ends that an engine can come to."""

    @pytest.mark.parametrize("way", ["remove", "with", "with that raises", "dropped"])
    def test_leaves_nothing_on_the_model(self, way: str) -> None:
        model = mlp()
        attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        engine = Engine(model)
        assert hooks_of(model)
        if way == "remove":
            engine.remove()
        elif way == "dropped":
            del engine
        else:
            expected = (
                pytest.raises(ValueError, match="inside") if "raises" in way else nullcontext()
            )
            with expected, engine as entered:
                assert entered is engine
                assert_works(engine, model, batch(4, 3))
                if "raises" in way:
                    raise ValueError("inside")
        assert hooks_of(model) == []
        assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
        assert not has_taps(model(batch(4, 3)))

    def test_twice(self) -> None:
        """The second time does nothing, and takes off nothing of another engine."""
        model = mlp()
        engine, other = Engine(model), Engine(model, batch_dim=0)
        engine.remove()
        engine.remove()
        assert_works(other, model, batch(4, 3))

    def test_calls_afterwards_are_refused(self) -> None:
        """Also on losses from before."""
        model = mlp()
        engine = Engine(model)
        losses = losses_of(model(batch(4, 3)))
        engine.remove()
        for later in (losses, losses_of(model(batch(4, 3)))):
            with pytest.raises(RemovedEngineError, match=r"was removed by `remove`.*Make a new"):
                engine.compute_gramian(later)
        losses.sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_inside_of_a_forward_pass(self) -> None:
        """The rest of the pass is as without an engine, and no mode is left."""
        model = mlp()
        engine = Engine(model)
        handle = model[0].register_forward_hook(lambda *_: engine.remove())
        output = model(batch(4, 3))
        assert_nothing_is_left(model.parameters())
        handle.remove()
        losses_of(output).sum().backward()
        model.zero_grad()
        assert_works(Engine(model), model, batch(4, 3))

    def test_an_engine_in_a_cycle_goes_with_the_collector(self) -> None:
        """Of an object that holds itself, say."""
        model = mlp()
        engine = Engine(model)
        engine.myself = engine
        dead = weakref.ref(engine)
        del engine
        gc.collect()
        assert dead() is None
        assert hooks_of(model) == []

    def test_an_engine_inside_of_its_module_goes_with_it(self) -> None:
        """As an attribute, where the model and the engine hold each other by nothing strong."""
        model = mlp()
        model.engine = Engine(model)
        assert_works(model.engine, model, batch(4, 3))
        dead = weakref.ref(model.engine)
        del model
        gc.collect()
        assert dead() is None


class TestPaused:
    """Forward passes that the engine lets go."""

    def test_records_nothing_inside(self) -> None:
        model = mlp()
        engine = Engine(model)
        with engine.paused():
            assert not has_taps(model(batch(4, 3)))
        assert_works(engine, model, batch(4, 3))

    def test_is_over_after_an_exception(self) -> None:
        model = mlp()
        engine = Engine(model)
        with pytest.raises(ValueError, match="inside"), engine.paused():
            raise ValueError("inside")
        assert_works(engine, model, batch(4, 3))

    def test_nested(self) -> None:
        """The outer one counts."""
        model = mlp()
        engine = Engine(model)
        with engine.paused():
            with engine.paused():
                pass
            assert not has_taps(model(batch(4, 3)))

    def test_losses_from_before_are_used_inside(self) -> None:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        losses = losses_of(model(batch(4, 3)))
        with engine.paused():
            assert_exact(engine, losses, model)

    def test_other_engines_go_on(self) -> None:
        model = mlp()
        paused, other = Engine(model), Engine(model, batch_dim=0)
        with paused.paused():
            losses = losses_of(model(batch(4, 3)))
        assert_exact(other, losses, model)

    def test_another_thread_goes_on(self) -> None:
        """One evaluates while another trains."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        found: list[Tensor] = []
        with engine.paused():
            x = batch(4, 3)
            thread = threading.Thread(target=lambda: found.append(model(x)))
            thread.start()
            thread.join()
            assert not has_taps(model(batch(4, 3)))
        assert_exact(engine, losses_of(found[0]), model)

    def test_a_checkpointed_pass_runs_again_without_the_engine(self) -> None:
        """A backward pass inside of the block, where its second run is not recorded either."""
        model = mlp()
        engine = Engine(model)
        with engine.paused():
            checkpoint(model, batch(4, 3), use_reentrant=False).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


class TestGradientMode:
    """Modules are recorded where they are called with gradients enabled, whatever is around."""

    def test_a_part_with_gradients_in_a_model_without(self) -> None:
        """A frozen trunk that is written so."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.trunk, self.head = mlp(), nn.Linear(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                y = self.trunk(x)
                with torch.enable_grad():
                    return self.head(y)

        model = Model()
        engine = Engine(model, batch_dim=0)
        for _ in range(3):
            with torch.no_grad():
                output = model(batch(4, 3))
            assert has_taps(output)
            assert_exact(engine, losses_of(output), model.head)

    def test_a_part_without_in_a_model_with(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.trunk, self.head = mlp(), nn.Linear(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    y = self.trunk(x)
                return self.head(y) + self.trunk[2](self.trunk[0](x).tanh())

        model = Model()
        engine = Engine(model, batch_dim=0)
        for _ in range(3):
            assert_works(engine, model, batch(4, 3))

    def test_steps_between_evaluations(self) -> None:
        """Also where a checkpoint runs again after one."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        for _ in range(3):
            losses = losses_of(checkpoint(model, batch(4, 3), use_reentrant=False))
            with torch.no_grad():
                model(batch(4, 3))
            assert_exact(engine, losses, model)


class TestCost:
    """What an engine costs where it has nothing to do."""

    @pytest.mark.parametrize("context", ["no_grad", "inference_mode", "paused"])
    def test_calls_of_python(self, context: str) -> None:
        """Two for each module. PyTorch takes many for a hook of its own, which does nothing.

        In a pause, six more: it is asked whether a checkpoint runs again.
        """
        model, plain = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))) for _ in range(2))
        engine = Engine(model)
        around = engine.paused if context == "paused" else getattr(torch, context)
        x = batch(3, 2)
        with around():
            each = 8 if context == "paused" else 2
            # Garbage of other tests may call functions as well, once.
            with_engine = min(calls_of_python(model, x) for _ in range(3))
            assert with_engine <= calls_of_python(plain, x) + each * 21
        assert hooks_of(model) == list(model.modules())  # and none of PyTorch's

    def test_calls_of_python_of_a_pytorch_hook(self) -> None:
        """The count can fail."""
        model = nn.Linear(2, 2)
        before = calls_of_python(model, batch(3, 2))
        model.register_forward_pre_hook(lambda *_: None)
        assert calls_of_python(model, batch(3, 2)) >= before + 2


def calls_of_python(model: nn.Module, x: Tensor) -> int:
    """How many functions of Python run in a forward pass."""
    calls: list[str] = []
    sys.setprofile(lambda _, event, __: calls.append(event))
    try:
        model(x)
    finally:
        sys.setprofile(None)
    return calls.count("call")


class TestTorchScript:
    """`torch.jit` takes a model with an engine as one without."""

    @pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "active"])
    @pytest.mark.parametrize(
        "convert",
        [
            pytest.param(lambda model, _: torch.jit.script(model), id="script"),
            pytest.param(lambda model, x: torch.jit.trace(model, x), id="trace"),
            pytest.param(lambda model, _: torch.jit.freeze(torch.jit.script(model)), id="freeze"),
        ],
    )
    def test_of_a_model(self, convert: Callable[..., nn.Module], is_paused: bool) -> None:
        model, x = mlp().eval(), batch(4, 3)
        engine = Engine(model, batch_dim=0)
        with engine.paused() if is_paused else nullcontext():
            converted = convert(model, x)
        with engine.paused():
            expected = model(x).detach()
        assert_close_to_reference(converted(x).detach(), expected)
        assert not has_taps(converted(x))
        file = io.BytesIO()
        torch.jit.save(converted, file)
        assert b"autogram" not in file.getvalue()
        assert_works(engine, model, x)


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda model, x: torch.export.export(model, (x,)).module(), id="export"),
        pytest.param(
            lambda model, x: torch.export.export(
                model, (x,), dynamic_shapes=({0: torch.export.Dim("B")},)
            ).module(),
            id="export of any size",
        ),
        pytest.param(lambda model, x: make_fx(model)(x), id="make_fx"),
    ],
)
def test_exported_models(convert: Callable[..., nn.Module]) -> None:
    """A graph that is traced of a model has its gradients, and works with an engine of its own."""
    model, x = mlp(), batch(4, 3)
    engine = Engine(model, batch_dim=0)
    assert_works(engine, model, x)
    converted = convert(model, x)
    assert_close_to_reference(
        reference_jacobian(converted(x).square().sum(1), trainable(model)),
        reference_jacobian(model(x).square().sum(1), trainable(model)),
    )
    assert not has_taps(converted(x))
    assert_works(engine, model, x)
    assert_works(Engine(converted, batch_dim=0), converted, x)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "averaged": averaged,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "saved": saved,
}


class TestCopies:
    """Copies of a hooked model have no engine."""

    @pytest.mark.parametrize("name", COPIES)
    def test_have_no_engine(self, name: str) -> None:
        """They run as the model does, are not recorded, and may have an engine of their own."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        twin = COPIES[name](model)
        x = batch(4, 3)
        assert torch.equal(twin(x), model(x))
        assert not has_taps(twin(x))
        assert_works(Engine(twin, batch_dim=0), twin, x)
        assert_works(engine, model, x)

    def test_can_be_read_without_autogram(self) -> None:
        """A file of a hooked model names nothing of this library."""
        model = mlp()
        engine = Engine(model)
        assert b"autogram" not in pickle.dumps(model)
        assert_works(engine, model, batch(4, 3))

    def test_state_can_be_read_as_weights_alone(self) -> None:
        """A state dictionary is that of a model without hooks."""
        model = mlp()
        engine = Engine(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert list(torch.load(file, weights_only=True)) == list(mlp().state_dict())
        assert_works(engine, model, batch(4, 3))

    def test_an_engine_that_is_copied_with_its_owner(self) -> None:
        """A trainer that holds both: the copy's engine has no modules, and says so."""
        model = mlp()
        trainer = {"model": model, "engine": Engine(model)}
        for twin in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            losses = losses_of(twin["model"](batch(4, 3)))
            with pytest.raises(RemovedEngineError, match="is a copy or a pickle"):
                twin["engine"].compute_gramian(losses)
        assert_works(trainer["engine"], model, batch(4, 3))

    @pytest.mark.slow
    def test_a_spawned_process(self) -> None:
        """A worker gets the model, and runs it."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            output = pool.apply(run_as_array, (model, x.tolist()))
        assert_close_to_reference(torch.tensor(output, dtype=x.dtype), model(x).detach())
        assert_works(engine, model, x)


def run_as_array(model: nn.Module, x: list[list[float]]) -> list[list[float]]:
    """The output of a model, as a process without our settings computes it."""
    return model(torch.tensor(x, dtype=next(model.parameters()).dtype)).tolist()


def assert_works_after(change: Callable[[nn.Sequential], None], *, is_first: bool) -> None:
    """Assert that an engine is exact after its model was changed, at its first call or later."""
    model = mlp()
    engine = Engine(model, batch_dim=0)
    if not is_first:
        assert_works(engine, model, batch(4, 3))
    change(model)
    assert_works(engine, model, batch(4, 3))
    assert_works(engine, model, batch(4, 3))


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(batch(5, 3))


def replace_data(model: nn.Sequential) -> None:
    model[0].weight.data = batch(5, 3)


def assign_state(model: nn.Sequential) -> None:
    model.load_state_dict(mlp().state_dict(), assign=True)
    model.requires_grad_(True)


def add_module(model: nn.Sequential) -> None:
    model.add_module("late", nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))


def replace_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 2, bias=False)


def remove_module(model: nn.Sequential) -> None:
    del model[2]


def register_parameter(model: nn.Sequential) -> None:
    model.register_parameter("scale", nn.Parameter(batch(2)))
    model.register_forward_hook(lambda module, _, output: output * module.scale)


def weight_norm(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


def orthogonal(model: nn.Sequential) -> None:
    parametrizations.orthogonal(model[2])


def remove_parametrization(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])
    model(batch(4, 3))
    parametrize.remove_parametrizations(model[0], "weight")


def tie(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 5)
    model.append(nn.Linear(5, 5))
    model[3].weight = model[2].weight


CHANGES = [
    replace_parameter,
    replace_data,
    assign_state,
    add_module,
    replace_module,
    remove_module,
    register_parameter,
    weight_norm,
    orthogonal,
    remove_parametrization,
    tie,
]


class TestChanges:
    """What may change in a model after the engine was made."""

    @pytest.mark.parametrize("is_first", [True, False], ids=["at first", "later"])
    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
    def test_is_exact_afterwards(
        self, change: Callable[[nn.Sequential], None], is_first: bool
    ) -> None:
        assert_works_after(change, is_first=is_first)

    def test_hooks_on_modules_are_recorded(self) -> None:
        """What they read is seen, also if they come after the engine."""
        model = mlp()
        engine = Engine(model, batch_dim=0, unseen="error")
        register_parameter(model)
        model.register_forward_pre_hook(lambda module, args: (args[0] + module[0].bias[:3],))
        for _ in range(2):
            assert_works(engine, model, batch(4, 3))

    @pytest.mark.parametrize("change", [replace_parameter, assign_state, replace_module])
    def test_losses_from_before_the_change(self, change: Callable[[nn.Sequential], None]) -> None:
        """Their Gramian is that of the parameters that they were computed with."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        before = copy.copy(model)
        before._modules = dict(model._modules)
        parameters = list(model.parameters())
        losses = losses_of(model(batch(4, 3)))
        rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        change(model)
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_another_dtype(self, dtype: torch.dtype) -> None:
        """`.to(dtype)` and back: what the Gramian is computed in follows."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)
        expected = engine.compute_gramian(losses_of(model(x)))
        gramian = engine.compute_gramian(losses_of(model.to(dtype)(x.to(dtype))))
        assert gramian.dtype == torch.float32
        assert float((gramian - expected).abs().max() / expected.abs().max()) < 0.1
        model.to(x.dtype)
        assert_works(engine, model, x)

    def test_another_device(self) -> None:
        """`.to(device)` to that of the environment, and back."""
        model = mlp().cpu()
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3)
        assert_works(engine, model, x.cpu())
        model.to(x.device)
        assert_works(engine, model, x)
        model.cpu()
        assert_works(engine, model, x.cpu())

    def test_a_device_without_data(self) -> None:
        """On the meta device there are shapes alone; afterwards all is as before."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        state = copy.deepcopy(model.state_dict())
        assert model.to("meta")(batch(4, 3).to("meta")).shape == (4, 2)
        model.to_empty(device=state["0.weight"].device).load_state_dict(state)
        assert_works(engine, model, batch(4, 3))

    def test_lazy_layers(self) -> None:
        """Parameters without a shape, which the first call of their layer gives them."""
        hidden, head = nn.LazyLinear(4), nn.LazyLinear(2)
        model = nn.Sequential(hidden, nn.Tanh(), head, nn.LazyLinear(1))
        engine = Engine(model, verify="never")
        for stop in (1, 1, 3, 3):  # the last layer never runs
            losses = losses_of(model[:stop](batch(4, 3)))
            assert_exact(engine, losses, model[:stop])
            n = sum(p.numel() for p in model[:stop].parameters())
            assert engine.jacobian(losses).dense().shape == (4, n)

    def test_a_cached_parametrization(self) -> None:
        """One tensor for several forward passes."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        parametrizations.weight_norm(model[0])
        with parametrize.cached():
            losses = losses_of(model(batch(4, 3))) + losses_of(model(batch(4, 3)))
            assert_exact(engine, losses, model)

    def test_a_model_that_loses_all_its_parameters(self) -> None:
        """Nothing is left to differentiate, and the error says so."""
        model = mlp()
        engine = Engine(model)
        model[0], model[2] = nn.Tanh(), nn.Tanh()
        with pytest.raises(NotConnectedError, match="do not depend on any parameter"):
            engine.compute_gramian(losses_of(model(batch(4, 3).requires_grad_())))
