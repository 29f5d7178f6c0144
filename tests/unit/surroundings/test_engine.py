"""The engine in training loops: forward passes, modules, parameters and containers of all kinds."""

import copy
import gc
import io
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torchjd import autogram as torchjd_autogram
from torchjd.aggregation import UPGradWeighting

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import (
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
    assert_same_gradients,
    features,
)
from tests.unit.engines import (
    assert_exact,
    assert_nothing_is_left,
    assert_works,
    batch,
    mlp,
    per_sample,
)
from tests.unit.environment import device_of_threads

PER_SAMPLE = Objectives("(B,)", per_sample, 0)
EACH_WAY = [
    Objectives("(B,)", per_sample, "auto"),
    Objectives("(B, K)", lambda y: features(y, 3), 0),
    Objectives("as one sample", per_sample, None),
]


class TestForwardPasses:
    """Several forward passes, in any order, used or not."""

    def test_losses_of_several_passes_added(self) -> None:
        """Cross terms between the passes are part of the Gramian."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        for count in (1, 2, 3):
            losses = sum(per_sample(model(batch(4, 3))) for _ in range(count))
            assert_exact(engine, losses, model)

    def test_passes_of_different_shapes_added(self) -> None:
        """Other positions in each pass."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        losses = per_sample(model(batch(4, 2, 3))) + per_sample(model(batch(4, 5, 3)))
        assert_exact(engine, losses, model)

    @pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
    @pytest.mark.parametrize("batch_dim", ["auto", None])
    @pytest.mark.parametrize("sizes", [(4, 4), (4, 2), (1, 3)])
    def test_losses_of_several_passes_in_a_row(
        self, sizes: tuple[int, int], batch_dim: Any
    ) -> None:
        """No pass has as many samples as there are losses."""
        model = mlp()
        engine = Engine(model, batch_dim=batch_dim)
        losses = torch.cat([per_sample(model(batch(size, 3))) for size in sizes])
        assert_exact(engine, losses, model)

    def test_an_output_as_the_next_input(self) -> None:
        """A model applied to its own output."""
        model = mlp(3, 3)
        engine = Engine(model, batch_dim=0)
        assert_exact(engine, per_sample(model(model(model(batch(4, 3))))), model)

    def test_two_calls_on_one_graph(self) -> None:
        """The graph is kept, and two losses of it have their own Gramians."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        output = model(batch(4, 3))
        first, second = per_sample(output), per_sample(output.cos())
        assert_exact(engine, first, model)
        assert_exact(engine, second, model)
        assert_exact(engine, first, model)

    def test_a_pass_that_the_losses_do_not_use(self) -> None:
        """Its graph is alive, and takes no part."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        before = model(batch(4, 3))
        losses = per_sample(model(batch(4, 3)))
        after = model(batch(4, 3))
        assert_exact(engine, losses, model)
        assert_exact(engine, per_sample(before), model)
        assert_exact(engine, per_sample(after), model)

    def test_interleaved_passes(self) -> None:
        """Two graphs, whose losses are used in the other order."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        first = per_sample(model(batch(4, 3)))
        second = per_sample(model(batch(5, 3)))
        assert_exact(engine, second, model)
        assert_exact(engine, first, model)

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_passes_without_gradients_in_between(self, context: Callable[[], Any]) -> None:
        """An evaluation between the forward pass and the call."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        losses = per_sample(model(batch(4, 3)))
        with context():
            evaluated = model(batch(4, 3))
        assert not evaluated.requires_grad
        assert_exact(engine, losses, model)

    def test_made_in_inference_mode(self) -> None:
        """The engine, and a part of the model that runs without gradients."""
        with torch.inference_mode():
            encoder = mlp()

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder, self.head = encoder, nn.Linear(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    hidden = self.encoder(x)
                return self.head(hidden)

        model = Model()
        with torch.inference_mode():
            engine = Engine(model)
        for _ in range(2):
            losses = per_sample(model(batch(4, 3)))
            jacobian = reference_jacobian(losses, model.head.parameters())
            assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)

    def test_a_part_without_gradients(self) -> None:
        """A frozen teacher, or targets of another network, inside the forward pass."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.student, self.shared = nn.Linear(3, 4), nn.Linear(4, 2)

            def forward(self, x: Tensor) -> Tensor:
                hidden = self.student(x).tanh()
                with torch.no_grad():
                    target = self.shared(self.student(x))
                return self.shared(hidden) - target

        assert_gramian_is_exact(Model, batch(4, 3), objectives=PER_SAMPLE)

    def test_gradients_enabled_inside_a_pass_without(self) -> None:
        """Only what runs with gradients enabled is part of the losses."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

            @torch.no_grad()
            def forward(self, x: Tensor) -> Tensor:
                hidden = self.first(x)
                with torch.enable_grad():
                    return self.last(hidden)

        assert_gramian_is_exact(Model, batch(4, 3), objectives=PER_SAMPLE)

    def test_a_state_kept_between_passes(self) -> None:
        """A hidden state that the module remembers, through which later losses reach back."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(5, 2)
                self.state: Tensor | None = None

            def forward(self, x: Tensor) -> Tensor:
                state = torch.zeros(len(x), 2) if self.state is None else self.state
                self.state = self.layer(torch.cat([x, state], 1)).tanh()
                return self.state

        model = Model()
        engine = Engine(model, batch_dim=0)
        for _ in range(2):
            model.state = None
            for _ in range(3):
                output = model(batch(4, 3))
            assert_exact(engine, per_sample(output), model)

    def test_a_derived_weight_kept_between_passes(self) -> None:
        """A normalised weight that the first pass computes and the second one reads."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.raw = nn.Parameter(torch.randn(2, 3))
                self.cached: Tensor | None = None

            def forward(self, x: Tensor) -> Tensor:
                if self.cached is None:
                    self.cached = self.raw.softmax(1)
                return nn.functional.linear(x, self.cached)

        model = Model()
        engine = Engine(model, batch_dim=0)
        losses = per_sample(model(batch(4, 3))) + per_sample(model(batch(4, 3)))
        assert_exact(engine, losses, model)

    @pytest.mark.parametrize("method", ["raises", "interrupted"])
    @pytest.mark.parametrize("depth", ["outside", "inside"])
    def test_an_exception_half_way_through_a_forward(self, method: str, depth: str) -> None:
        """Also Ctrl-C: the next pass is recorded as if nothing had been."""
        error = RuntimeError if method == "raises" else KeyboardInterrupt

        class Failing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 3)
                self.fails = True

            def forward(self, x: Tensor) -> Tensor:
                x = self.layer(x)
                if self.fails:
                    raise error
                return x

        failing = Failing()
        model = failing if depth == "outside" else nn.Sequential(nn.Linear(3, 3), failing)
        engine = Engine(model, batch_dim=0)
        with pytest.raises(error):
            model(batch(4, 3))
        failing.fails = False
        losses = per_sample(model(batch(4, 3)))
        assert_exact(engine, losses, model)
        assert_works(engine, model, batch(4, 3))

    def test_an_exception_that_the_model_catches(self) -> None:
        """A module fails inside of another, which goes on without it."""

        class Failing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                raise ValueError(str(self.layer(x).shape))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.failing, self.last = nn.Linear(3, 3), Failing(), nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x).tanh()
                try:
                    x = self.failing(x)
                except ValueError:
                    x = self.last(x)
                return x

        assert_gramian_is_exact(Model, batch(4, 3), objectives=PER_SAMPLE)

    def test_a_hook_of_the_user_that_raises(self) -> None:
        """Before the module runs, in a hook that was there before the engine's."""
        model = mlp()
        is_failing = [True]

        def refuse(_: nn.Module, __: Any) -> None:
            if is_failing[0]:
                raise ValueError("refused")

        model[2].register_forward_pre_hook(refuse)
        engine = Engine(model, batch_dim=0)
        with pytest.raises(ValueError, match="refused"):
            model(batch(4, 3))
        is_failing[0] = False
        assert_works(engine, model, batch(4, 3))


def assert_no_engine_was_there(losses: Tensor) -> None:
    """Assert that a graph has no tap: it was recorded by nobody."""
    seen, pending = set(), [losses.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            assert "Tap" not in type(node).__name__
            pending.extend(following for following, _ in node.next_functions)


class Dropped(nn.Module):
    """A block with dropout and a residual connection."""

    def __init__(self, d: int = 4, p: float = 0.5) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.LayerNorm(d), nn.Linear(d, d), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.layer(self.norm(x)).tanh())


@pytest.mark.parametrize("objectives", EACH_WAY, ids=repr)
class TestActivations:
    """What may happen to activations between two uses."""

    def test_dropout_in_training_mode(self, objectives: Objectives) -> None:
        """Nothing runs twice, so the Gramian is that of the masks that were drawn."""
        model = lambda: nn.Sequential(Dropped(), nn.Dropout(0.3), Dropped())  # noqa: E731
        assert_gramian_is_exact(model, batch(5, 4), objectives=objectives)

    def test_attention_with_dropout(self, objectives: Objectives) -> None:
        """Dropout of attention weights inside a composite function."""
        model = lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.5, batch_first=True)  # noqa: E731
        assert_gramian_is_exact(model, batch(3, 4, 4), objectives=objectives)

    def test_in_place_activations(self, objectives: Objectives) -> None:
        """They change the output of a use, which the tap has returned."""

        def model() -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(2, 3, 2),
                nn.ReLU(inplace=True),
                nn.GroupNorm(3, 3),
                nn.LeakyReLU(0.1, inplace=True),
                nn.Flatten(),
                nn.Linear(12, 4),
                nn.ELU(inplace=True),
                nn.Linear(4, 2),
                nn.Dropout(0.2, inplace=True),
                nn.Hardtanh(inplace=True),
            )

        assert_gramian_is_exact(model, batch(4, 2, 3, 3), objectives=objectives)

    def test_views_and_slices_changed_in_place(self, objectives: Objectives) -> None:
        """Parameters written into parts of an activation, and activations added in place."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
                self.token, self.shift = nn.Parameter(batch(4)), nn.Parameter(batch(4))

            def forward(self, x: Tensor) -> Tensor:
                hidden = torch.zeros(len(x), 3, 4)
                hidden[:, 0] = self.first(x)
                hidden[:, 1] = self.token
                hidden[:, 2] += self.shift
                hidden.view(-1, 4).add_(self.shift).tanh_()
                residual = hidden.clone()
                residual += self.last.bias.sum() * hidden
                return self.last(residual)

        assert_gramian_is_exact(Model, batch(4, 3), objectives=objectives)

    def test_several_outputs_of_one_call(self, objectives: Objectives) -> None:
        """Chunks, unbound and split tensors, and a function that returns a tuple."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.recurrent = nn.Linear(3, 6), nn.GRU(2, 2, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                a, b = self.layer(x).chunk(2, -1)
                first, second, third = (a * b.sigmoid()).unbind(-1)
                outputs, last = self.recurrent(torch.stack([first, second + third], -1))
                return outputs.sum(1) + last.transpose(0, 1).sum(1)

        assert_gramian_is_exact(Model, batch(4, 5, 3), objectives=objectives)

    def test_detached_activations(self, objectives: Objectives) -> None:
        """Straight-through estimators, stopped gradients and running averages."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.codes = nn.Linear(3, 4), nn.Parameter(batch(6, 4))
                self.register_buffer("mean", torch.zeros(4))

            def forward(self, x: Tensor) -> Tensor:
                hidden = self.first(x)
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
                found = self.codes[torch.cdist(hidden, self.codes).argmin(1)]
                passed = hidden + (found - hidden).detach()
                return torch.cat([passed - self.mean, found - hidden.detach()], 1)

        assert_gramian_is_exact(Model, batch(4, 3), objectives=objectives)

    def test_checkpointed_model(self, objectives: Objectives) -> None:
        """The whole model runs again in the backward pass, with the same dropout."""
        model = nn.Sequential(Dropped(), Dropped())
        assert_checkpointing_is_exact(
            model, lambda x: checkpoint(model, x, use_reentrant=False), objectives
        )

    @pytest.mark.parametrize("has_root_parameter", [False, True])
    def test_checkpointed_blocks(self, objectives: Objectives, has_root_parameter: bool) -> None:
        """Blocks run again alone, while the root, which has parameters of its own, does not."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Dropped(), Dropped()])
                self.token = nn.Parameter(batch(4)) if has_root_parameter else None

            def forward(self, x: Tensor) -> Tensor:
                x = x if self.token is None else x * self.token
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return x if self.token is None else x + self.token

        model = Model()
        assert_checkpointing_is_exact(model, model, objectives)

    def test_checkpointed_segments(self, objectives: Objectives) -> None:
        """Several blocks in one checkpoint."""
        blocks = nn.Sequential(*(Dropped() for _ in range(4)))
        run = lambda x: checkpoint_sequential(blocks, 2, x, use_reentrant=False)  # noqa: E731
        assert_checkpointing_is_exact(blocks, run, objectives)

    def test_checkpointed_dropout_of_a_transposed_tensor(self, objectives: Objectives) -> None:
        """The same numbers are drawn in the same places when the part runs again."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.dropouts = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))

            def forward(self, x: Tensor) -> Tensor:
                hidden = self.layer(x.unsqueeze(0) * torch.arange(1, 4).view(3, 1, 1))
                return checkpoint(self.dropouts, hidden.transpose(0, 1), use_reentrant=False)

        model = Model()
        assert_checkpointing_is_exact(model, model, objectives)

    def test_checkpointed_function(self, objectives: Objectives) -> None:
        """A function that reads parameters of the root, and enters no module."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.last = nn.Parameter(batch(4, 4)), nn.Linear(4, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(checkpoint(self.twice, x, use_reentrant=False))

            def twice(self, x: Tensor) -> Tensor:
                return ((x @ self.weight).tanh() @ self.weight).tanh()

        model = Model()
        assert_checkpointing_is_exact(model, model, objectives)

    def test_saved_tensors_that_are_off_loaded(self, objectives: Objectives) -> None:
        """Taps keep their tensors as autograd does."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = mlp(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                with torch.autograd.graph.save_on_cpu():
                    return self.block(x)

        assert_gramian_is_exact(Model, batch(5, 4), objectives=objectives)


def assert_checkpointing_is_exact(
    model: nn.Module, run: Callable[[Tensor], Tensor], objectives: Objectives
) -> None:
    """Assert that the Gramian is exact, and the gradients are those without an engine."""
    x = batch(5, 4)
    torch.manual_seed(1)
    objectives.of(run(x)).sum().backward()
    expected = {p: p.grad for p in model.parameters()}
    model.zero_grad()

    engine = Engine(model, batch_dim=objectives.batch_dim)
    torch.manual_seed(1)
    losses = objectives.of(run(x))
    assert_exact(engine, losses, model)
    losses.sum().backward()
    assert all(torch.equal(p.grad, expected[p]) for p in model.parameters())


class TestModules:
    """Which modules are given to an engine."""

    def test_two_engines_on_one_model(self) -> None:
        """Neither disturbs the other."""
        model = mlp()
        engines = [Engine(model, batch_dim=0), Engine(model), Engine(model, batch_dim=None)]
        losses = per_sample(model(batch(4, 3)))
        for engine in (*engines, *engines):
            assert_exact(engine, losses, model)

    def test_engines_on_overlapping_modules(self) -> None:
        """The whole and its parts."""
        model = mlp()
        whole, first, last = Engine(model), Engine(model[0]), Engine(model[2])
        losses = per_sample(model(batch(4, 3)))
        assert_exact(first, losses, model[0])
        assert_exact(whole, losses, model)
        assert_exact(last, losses, model[2])

    def test_two_engines_and_gradients(self) -> None:
        """Bit for bit those of a model without engines."""
        model = mlp()
        twin = copy.deepcopy(model)
        engines = [Engine(model), Engine(model)]
        x = batch(4, 3)
        losses = per_sample(model(x))
        for engine in engines:
            engine.compute_gramian(losses)
        losses.sum().backward()
        per_sample(twin(x)).sum().backward()
        assert_same_gradients(model, twin)

    @pytest.mark.parametrize("place", [0, 2])
    def test_a_part_of_a_model(self, place: int) -> None:
        """The rest is not given to the engine, though it has parameters too."""
        model = mlp()
        engine = Engine(model[place], batch_dim=0)
        assert_exact(engine, per_sample(model(batch(4, 3))), model[place])

    def test_several_modules(self) -> None:
        """One Gramian for the parameters of all of them."""
        encoder, middle, head = mlp(3, 4), nn.Linear(4, 4), mlp(4, 2)
        engine = Engine(encoder, head, batch_dim=0)
        losses = per_sample(head(middle(encoder(batch(4, 3)))))
        assert_exact(engine, losses, encoder, head)

    def test_modules_that_share_a_parameter(self) -> None:
        """A parameter is counted once, with the uses in both."""
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        engine = Engine(first, second, batch_dim=0)
        assert_exact(engine, per_sample(second(first(batch(4, 3)).tanh())), first, second)

    def test_a_parameter_shared_with_a_module_that_is_not_given(self) -> None:
        """Only what the given modules do with it is seen, if the other one is not part of them."""
        inner = nn.Linear(3, 3)
        outer = nn.Sequential(inner, nn.Tanh(), inner)
        engine = Engine(inner, batch_dim=0)
        assert_exact(engine, per_sample(outer(batch(4, 3))), inner)

    def test_a_module_without_parameters(self) -> None:
        """Beside one that has some."""
        activation, layer = nn.Tanh(), nn.Linear(3, 2)
        engine = Engine(activation, layer, batch_dim=0)
        assert_exact(engine, per_sample(layer(activation(batch(4, 3)))), layer)

    def test_a_module_added_later(self) -> None:
        """It is inside of a module that was given, so its parameters count."""
        model = nn.Sequential(nn.Linear(3, 4))
        engine = Engine(model, batch_dim=0)
        model.append(nn.Linear(4, 2))
        assert_works(engine, model, batch(4, 3))

    def test_a_module_with_hooks_of_the_user(self) -> None:
        """Forward hooks that change the input and the output, and full backward hooks."""
        model = mlp()
        model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        model[0].register_forward_hook(lambda _, args, output: output + args[0].sum())
        model[2].register_full_backward_hook(lambda *_: None)
        engine = Engine(model, batch_dim=0)
        model[2].register_forward_hook(lambda _, __, output: output * output)
        assert_exact(engine, per_sample(model(batch(4, 3))), model)

    def test_a_scripted_part(self) -> None:
        """TorchScript runs without calls that a recorder could see."""
        scripted = torch.jit.script(nn.Linear(3, 4))
        model = nn.Sequential(nn.Linear(3, 3), scripted, nn.Tanh(), nn.Linear(4, 2))
        engine = Engine(model, batch_dim=0)
        assert_exact(engine, per_sample(model(batch(4, 3))), model)

    def test_a_copy_of_the_model(self) -> None:
        """A copy, for averages of weights say, runs as usual, and can have an engine of its own."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        twin = copy.deepcopy(model)
        x = batch(4, 3)
        assert torch.equal(twin(x), model(x))
        assert_exact(Engine(twin, batch_dim=0), per_sample(twin(x)), twin)
        assert_exact(engine, per_sample(model(x)), model)

    def test_a_model_that_is_saved(self) -> None:
        """Checkpoints of a whole model, and worker processes, need to pickle it."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        read = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        x = batch(4, 3)
        assert torch.equal(read(x), model(x))
        assert_exact(Engine(read, batch_dim=0), per_sample(read(x)), read)
        assert_works(engine, model, x)

    def test_nothing_is_written_onto_the_model(self) -> None:
        """Its state and its attributes are as before, hooks aside."""
        model = mlp()
        attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        state = copy.deepcopy(model.state_dict())
        engine = Engine(model)
        engine.compute_gramian(per_sample(model(batch(4, 3))))
        for name, module in model.named_modules():
            assert set(vars(module)) - {"_compiled_call_impl"} == attributes[name]  # the hooks
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    def test_hooks_go_with_the_engine(self) -> None:
        """An engine that is dropped leaves nothing on its modules."""
        model = mlp()
        engine = Engine(model)
        assert model._compiled_call_impl is not None
        del engine
        gc.collect()
        for module in model.modules():
            assert module._compiled_call_impl is None
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        assert_no_engine_was_there(model(batch(4, 3)))

    def test_an_engine_does_not_keep_its_modules_alive(self) -> None:
        """It may outlive them, and hold no parameter of theirs."""
        model = mlp()
        weight = weakref.ref(model[0].weight)
        engine = Engine(model)
        engine.compute_gramian(per_sample(model(batch(4, 3))))
        del model
        gc.collect()
        assert weight() is None
        del engine


class TestParameters:
    """Which parameters count."""

    def test_a_frozen_parameter(self) -> None:
        """It has no columns."""
        model = mlp()
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        engine = Engine(model, batch_dim=0)
        assert_exact(engine, per_sample(model(batch(4, 3))), model)

    def test_parameters_frozen_and_trained_between_calls(self) -> None:
        """What counts is the moment of the forward pass."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        for frozen in ([], [0], [0, 2], [2], []):
            for i in (0, 2):
                model[i].weight.requires_grad_(i not in frozen)
            assert_exact(engine, per_sample(model(batch(4, 3))), model)

    def test_a_parameter_that_is_not_used(self) -> None:
        """Its columns are zero."""
        model = mlp()
        model.unused = nn.Linear(3, 2)
        model.forward = lambda x: model[2](model[1](model[0](x)))
        engine = Engine(model, batch_dim=0)
        assert_exact(engine, per_sample(model(batch(4, 3))), model)

    def test_a_parameter_that_only_an_unused_output_depends_on(self) -> None:
        """Its use is recorded, and no cotangent arrives."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.trunk, self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                hidden = self.trunk(x).tanh()
                return self.one(hidden), self.other(hidden)

        model = Model()
        engine = Engine(model, batch_dim=0)
        for i in (0, 1, 0):
            assert_exact(engine, per_sample(model(batch(4, 3))[i]), model)

    def test_parameters_that_are_used_at_some_calls(self) -> None:
        """A stochastic depth: other blocks each time."""
        model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        root = nn.Sequential(*model)
        root.forward = lambda x, chosen: [x := model[i](x).tanh() for i in chosen][-1]
        engine = Engine(root, batch_dim=0)
        for chosen in ([0, 1, 2], [1], [2, 0], [0, 0], [0, 1, 2]):
            assert_exact(engine, per_sample(root(batch(4, 3), chosen)), root)

    def test_replaced_parameters(self) -> None:
        """Another parameter under the old name, and new values in the old parameter."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        assert_works(engine, model, batch(4, 3))
        model[0].weight = nn.Parameter(batch(5, 3))
        assert_works(engine, model, batch(4, 3))
        model[0].weight.data = batch(5, 3)
        assert_works(engine, model, batch(4, 3))
        model[2] = nn.Linear(5, 2, bias=False)
        assert_works(engine, model, batch(4, 3))

    def test_inputs_that_require_a_gradient(self) -> None:
        """They are no parameters, and nothing is accumulated in them."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        x = batch(4, 3).requires_grad_()
        assert_exact(engine, per_sample(model(x)), model)
        assert x.grad is None

    def test_a_parameter_of_the_user_as_input(self) -> None:
        """A learnt prompt that is not the engine's."""
        model = mlp()
        prompt = nn.Parameter(batch(1, 3))
        engine = Engine(model, batch_dim=0)
        assert_exact(engine, per_sample(model(batch(4, 3) + prompt)), model)
        assert prompt.grad is None

    def test_a_training_loop(self) -> None:
        """Weights change in place at each step, and gradients are bit for bit the usual ones."""
        model = mlp()
        twin = copy.deepcopy(model)
        engine = Engine(model)
        optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (model, twin)]
        for _ in range(4):
            x = batch(4, 3)
            losses = per_sample(model(x))
            assert_exact(engine, losses, model)
            losses.backward(torch.full((4,), 0.25))
            per_sample(twin(x)).backward(torch.full((4,), 0.25))
            assert_same_gradients(model, twin)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def test_accumulated_gradients(self) -> None:
        """Two backward passes add up in `.grad` as usual."""
        model = mlp()
        twin = copy.deepcopy(model)
        engine = Engine(model)
        for _ in range(2):
            x = batch(4, 3)
            losses = per_sample(model(x))
            engine.compute_gramian(losses)
            losses.sum().backward()
            per_sample(twin(x)).sum().backward()
        assert_same_gradients(model, twin)

    def test_a_backward_pass_before_the_call(self) -> None:
        """With the graph kept, the order does not matter."""
        model = mlp()
        engine = Engine(model, batch_dim=0)
        losses = per_sample(model(batch(4, 3)))
        losses.sum().backward(retain_graph=True)
        before = [p.grad.clone() for p in model.parameters()]
        assert_exact(engine, losses, model)
        assert all(map(torch.equal, before, (p.grad for p in model.parameters())))

    def test_second_derivatives_go_through_taps(self) -> None:
        """`create_graph=True` gives what it gives without an engine."""
        model = mlp()
        twin = copy.deepcopy(model)
        engine = Engine(model)
        x = batch(4, 3)
        for m in (model, twin):
            losses = per_sample(m(x))
            gradients = torch.autograd.grad(losses.sum(), list(m.parameters()), create_graph=True)
            sum(g.square().sum() for g in gradients).backward()
        assert_same_gradients(model, twin)
        model.zero_grad()
        assert_works(engine, model, x)


@dataclass
class Pair:
    """A dataclass of tensors."""

    first: Tensor
    second: Tensor


class Named(NamedTuple):
    """A named tuple of tensors."""

    first: Tensor
    second: Tensor


class Custom:
    """An object with tensors in slots of its own."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.inside = {"first": [first], "second": (second, None)}


class Iterated:
    """An object that gives its tensors one after the other."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self._tensors = (first, second)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda a, b: (a, b), lambda v: v),
    "list": (lambda a, b: [a, b], lambda v: v),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda v: v.values()),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), lambda v: v.values()),
    "named tuple": (Named, lambda v: v),
    "dataclass": (Pair, lambda v: (v.first, v.second)),
    "nested": (lambda a, b: {"a": ([a, 3], "x"), "b": {"c": (b, None)}}, lambda v: _unnest(v)),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b=b), lambda v: (v.a, v.b)),
    "custom": (Custom, lambda v: (v.inside["first"][0], v.inside["second"][0])),
    "iterated": (Iterated, lambda v: v),
}


def _unnest(value: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return value["a"][0][0], value["b"]["c"][0]


class Container(nn.Module):
    """Takes two tensors in a container and returns two in a container of the same kind.

    The second is made from parameters alone if it is told so: it is tapped where it leaves.
    """

    def __init__(self, name: str, is_derived: bool) -> None:
        super().__init__()
        self.pack, self.unpack = CONTAINERS[name]
        self.is_derived = is_derived
        self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, inputs: Any) -> Any:
        a, b = self.unpack(inputs)
        first = self.left(a).tanh()
        second = self.left.weight.sum() * self.right.weight if self.is_derived else self.right(b)
        return self.pack(first, second)


@pytest.mark.parametrize("is_derived", [False, True], ids=["batched", "from parameters alone"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str, is_derived: bool) -> None:
    """Tensors are found in inputs and outputs of every kind, which keep their kind."""
    model = Container(name, is_derived)
    pack, unpack = CONTAINERS[name]
    engine = Engine(model, batch_dim=None if is_derived else 0)
    output = model(pack(batch(2, 3), batch(2, 2)))
    assert type(output) is type(pack(batch(1), batch(1)))
    first, second = unpack(output)
    joined = first @ second.sin() if is_derived else first * second.sin()
    assert_exact(engine, per_sample(joined), model)


class Keywords(nn.Module):
    """Keyword arguments only, some of which are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(
        self, *, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0, name: str = ""
    ) -> dict[str, Any]:
        hidden = self.table(ids) * scale
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return {"name": name, "logits": self.layer(hidden.tanh())}


def test_keyword_arguments_and_integer_inputs() -> None:
    """As language models are called."""
    model = Keywords()
    engine = Engine(model, batch_dim=0)
    ids, mask = torch.randint(0, 7, (4, 5)), torch.rand(4, 5) > 0.3
    assert_exact(engine, per_sample(model(ids=ids)["logits"]), model)
    output = model(ids=ids, mask=mask, scale=0.5, name="masked")
    assert output["name"] == "masked"
    assert_exact(engine, per_sample(output["logits"]), model)


@pytest.mark.parametrize("first", [torch.ones(()), torch.ones(1), torch.arange(5).unsqueeze(0)])
def test_an_input_without_samples_before_the_one_with(first: Tensor) -> None:
    """A time, or position indices, come first."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 4), nn.Linear(3, 4)

        def forward(self, first: Tensor, x: Tensor) -> Tensor:
            added = first if first.is_floating_point() else self.table(first)
            return (self.layer(x) + added).tanh()

    assert_gramian_is_exact(Model, first, batch(4, 5, 3), objectives=PER_SAMPLE)


def test_a_model_without_inputs() -> None:
    """Nothing is batched: the losses are functions of the parameters."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.points = nn.Parameter(batch(4, 3))

        def forward(self) -> Tensor:
            return self.points.tanh()

    assert_gramian_is_exact(Model, objectives=Objectives("(B,)", per_sample, None))
    assert_gramian_is_exact(Model, objectives=Objectives("(B,)", per_sample, 0))


def test_a_model_that_returns_a_parameter() -> None:
    """A temperature beside the output, which the losses use."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.scale

    objectives = Objectives("(B,)", lambda output: per_sample(output[0]) * output[1], None)
    assert_gramian_is_exact(Model, batch(4, 3), objectives=objectives)


class TestDropIn:
    """In place of the engine of torchjd."""

    @pytest.mark.parametrize("batch_dim", [0, None])
    def test_same_gramian(self, batch_dim: int | None) -> None:
        """Same arguments, same answer."""
        model = mlp()
        twin = copy.deepcopy(model)
        ours, theirs = (
            make(m, batch_dim=batch_dim)
            for make, m in ((Engine, model), (torchjd_autogram.Engine, twin))
        )
        for _ in range(3):
            x = batch(4, 3)
            expected = theirs.compute_gramian(per_sample(twin(x)))
            assert_close_to_reference(ours.compute_gramian(per_sample(model(x))), expected)

    def test_training_loop_with_a_weighting(self) -> None:
        """The loop of the documentation, with both engines side by side."""
        model = mlp()
        twin = copy.deepcopy(model)
        engines = Engine(model, batch_dim=0), torchjd_autogram.Engine(twin, batch_dim=0)
        weighting = UPGradWeighting()
        data = [batch(4, 3) for _ in range(3)]
        for m, engine in zip((model, twin), engines, strict=True):
            optimizer = torch.optim.SGD(m.parameters(), 0.1)
            for x in data:
                losses = per_sample(m(x))
                losses.backward(weighting(engine.compute_gramian(losses)))
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close_to_reference(ours.detach(), theirs.detach())


def test_the_gramian_is_detached() -> None:
    """It is no part of a graph, and the call leaves no mode behind."""
    model = mlp()
    engine = Engine(model)
    gramian = engine.compute_gramian(per_sample(model(batch(4, 3))))
    assert not gramian.requires_grad
    assert_nothing_is_left(model.parameters())


def test_losses_that_need_no_more_than_the_output() -> None:
    """The output itself, and a view of it, are losses too."""
    model = mlp(3, 1)
    engine = Engine(model, batch_dim=0)
    assert_exact(engine, model(batch(4, 3)), model)
    assert_exact(engine, model(batch(4, 3)).squeeze(1), model)


def test_two_threads() -> None:
    """Each thread has its own recording."""

    models = [mlp() for _ in range(2)]
    engines = [Engine(model, batch_dim=0) for model in models]
    inputs = [[batch(4, 3) for _ in range(5)] for _ in models]

    def run(i: int) -> None:
        for x in inputs[i]:
            assert_exact(engines[i], per_sample(models[i](x)), models[i])

    with ThreadPoolExecutor(2, initializer=device_of_threads()) as pool:
        for done in [pool.submit(run, i) for i in range(2)]:
            done.result()


@pytest.mark.parametrize("batch_dim", ["auto", None])
@pytest.mark.parametrize("outputs", [1, 3])
def test_retained_gradients_of_activations(outputs: int, batch_dim: Any) -> None:
    """After the backward pass, `.grad` of an activation is what it is without an engine."""
    model = mlp(outputs=outputs)
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model[0].register_forward_hook(keep)
    x = batch(4, 3)
    model(x).square().sum().backward()
    model.zero_grad()
    engine = Engine(model, batch_dim=batch_dim)
    losses = model(x).square()
    engine.compute_gramian(losses)
    losses.sum().backward()
    assert torch.equal(kept[1].grad, kept[0].grad)


@pytest.mark.parametrize("shows", ["retain_grad", "register_hook"])
def test_gradients_shown_of_what_is_derived_from_a_parameter(shows: str) -> None:
    """Nobody is shown a hidden dimension, and no trace of a Gramian is left behind."""
    seen: list[Tensor] = []

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(batch(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.derived = 2 * self.weight
            if shows == "retain_grad":
                self.derived.retain_grad()
            else:
                self.derived.register_hook(seen.append)
            return nn.functional.linear(x, self.derived).tanh()

    model = Doubled()
    engine = Engine(model)
    for _ in range(3):
        assert_exact(engine, per_sample(model(batch(4, 3))), model)
        model.zero_grad()
        per_sample(model(batch(4, 3))).sum().backward()
        kept = model.derived.grad if shows == "retain_grad" else seen[-1]
        assert model.weight.grad is not None
        assert torch.equal(2 * kept, model.weight.grad)
    assert all(type(x) is Tensor and x.shape == (2, 3) for x in seen)
