"""Objectives of the whole batch: rows by an ordinary backward pass for each, where they are few."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    FreedGraphError,
    UnseenUseError,
    VerificationError,
)
from autogram._blocks import Rows
from autogram._capture.backward import driver
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable
from tests.unit.engines import assert_exact, batch, counted_passes

pytestmark = pytest.mark.cpu  # what costs less is another question on a GPU
TASKS = 3


class Trunk(nn.Module):
    """Convolutions whose rows are cheap, for several heads."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.first, self.second = wrap(nn.Conv2d(2, 3, 3)), wrap(nn.Conv2d(3, 4, 3))
        self.norm = nn.GroupNorm(2, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(TASKS))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Each head's result for images ``(n, 2, height, width)``."""
        x = self.second(self.first(x).tanh()).relu()
        features = self.norm(x).mean((2, 3))
        return [head(features) for head in self.heads]


def images(n: int = 4, size: int = 8) -> Tensor:
    return batch(n, 2, size, size)


def tasks(outputs: list[Tensor]) -> Tensor:
    """A loss of the whole batch for each head."""
    return torch.stack([(x.square() + x).mean() for x in outputs])


@contextmanager
def ordinary_steps() -> Iterator[list[Any]]:
    """The runs that made ordinary passes."""
    runs: list[Any] = []
    assemble_rows = driver.assemble_rows

    def assemble_and_tell(run: Any) -> None:
        runs.append(run)
        assemble_rows(run)

    with mock.patch.object(driver, "assemble_rows", assemble_and_tell):
        yield runs


@pytest.mark.parametrize("verify", ["first", "never"])
def test_series_of_steps(verify: Any) -> None:
    """With other sizes, frozen parameters, a penalty and a shared layer on the way, and back."""
    model = Trunk()
    engine = Engine(model, batch_dim=None, verify=verify)
    with ordinary_steps() as runs:
        for n, size in ((4, 8), (4, 8), (5, 8), (5, 7), (5, 8), (4, 8)):
            assert_exact(engine, tasks(model(images(n, size))), model)
    assert len(runs) == 6
    model.first.weight.requires_grad_(requires_grad=False)
    with ordinary_steps() as runs:
        for _ in range(3):
            assert_exact(engine, tasks(model(images())), model)
        model.second = nn.Sequential(model.second, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
        model.second[2].weight = model.second[1].weight
        for _ in range(3):
            assert_exact(engine, tasks(model(images())), model)
    assert len(runs) == 6


def test_parameters_outside_of_modules() -> None:
    """In a penalty, and where a layer is differentiated again."""
    model = Trunk()
    engine = Engine(model, batch_dim=None)

    def losses() -> Tensor:
        x = images().requires_grad_()
        found = tasks(model(x))
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return torch.cat([found + model.first.weight.square().sum(), slope.square().sum()[None]])

    with ordinary_steps() as runs:
        for _ in range(3):
            assert_exact(engine, losses(), model)
    assert len(runs) == 3


def test_a_step_that_must_not_see_parameters_elsewhere() -> None:
    model = Trunk()
    engine = Engine(model, batch_dim=None, unseen="error")
    for _ in range(2):
        assert_exact(engine, tasks(model(images())), model)
    for _ in range(2):
        with pytest.raises(UnseenUseError):
            engine.compute_gramian(tasks(model(images())) + model.first.weight.sum())


def test_the_other_ways_to_call_an_engine() -> None:
    """Jacobians and steps have the same rows."""
    model = Trunk()
    engine = Engine(model, batch_dim=None)
    weights = torch.tensor([0.5, -1.0, 2.0])
    with ordinary_steps() as runs:
        for _ in range(2):
            losses = tasks(model(images()))
            jacobian = reference_jacobian(losses, trainable(model))
            found = engine.jacobian(losses)
            assert_close_to_reference(found.gramian(), jacobian @ jacobian.T)
            assert_close_to_reference(found.row_norms(), jacobian.norm(dim=1))
        for _ in range(2):
            losses = tasks(model(images()))
            jacobian = reference_jacobian(losses, trainable(model))
            engine.backward(losses, lambda _: weights)
            gradient = torch.cat([p.grad.flatten() for p in trainable(model) if p.grad is not None])
            assert_close_to_reference(gradient, weights @ jacobian)
            model.zero_grad()
    assert len(runs) == 4


def test_layers_without_rows() -> None:
    """Few vectors in wide layers: inner products of factors are cheaper than any row."""
    model = nn.Sequential(nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 768))
    engine = Engine(model, batch_dim=None)
    with ordinary_steps() as runs:
        for _ in range(3):
            output = model(batch(2, 768))
            assert_exact(engine, torch.stack([output.sum(), output.square().sum()]), model)
    assert not runs


def test_one_pass_for_each_objective() -> None:
    model = Trunk()
    engine = Engine(model, batch_dim=None, verify="never")
    for _ in range(2):
        losses = tasks(model(images()))
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
    assert len(passes) == TASKS


def test_the_graph_is_freed() -> None:
    model = Trunk()
    engine = Engine(model, batch_dim=None, verify="never")
    for _ in range(2):
        losses = tasks(model(images()))
        engine.backward(losses, lambda gramian: gramian.new_ones(len(gramian)))
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


def test_nothing_else_notices() -> None:
    """No `.grad` is added to, and no hook on a parameter runs."""
    model = Trunk()
    calls: list[Tensor] = []
    model.first.weight.register_hook(calls.append)
    engine = Engine(model, batch_dim=None)
    with ordinary_steps() as runs:
        for _ in range(3):
            losses = tasks(model(images()))
            engine.compute_gramian(losses)
            assert not calls
            assert all(p.grad is None for p in model.parameters())
    assert len(runs) == 3


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parameters_that_are_transformed(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Trunk(wrap)
    engine = Engine(model, batch_dim=None)
    for _ in range(3):
        assert_exact(engine, tasks(model(images())), model)


def test_checkpoints() -> None:
    class Checkpointed(Trunk):
        def forward(self, x: Tensor) -> list[Tensor]:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed()
    engine = Engine(model, batch_dim=None)
    with ordinary_steps() as runs:
        for _ in range(3):
            assert_exact(engine, tasks(model(images())), model)
    assert len(runs) == 3


def test_tensors_in_the_place_of_parameters() -> None:
    """Those that are computed from parameters."""
    model = Trunk()
    engine = Engine(model, batch_dim=None)
    for _ in range(3):
        fast = {name: p - 0.1 * p.sin() for name, p in model.named_parameters()}
        losses = tasks(functional_call(model, fast, images()))
        assert_exact(engine, losses, model)


def test_samples_that_batch_normalisation_mixes() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    engine = Engine(model)
    with pytest.warns(CoupledObjectivesWarning):
        assert_exact(engine, model(images()).square().mean(1), model)
    with ordinary_steps() as runs:
        for _ in range(2):
            assert_exact(engine, model(images()).square().mean(1), model)
    assert len(runs) == 2


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes through the uses instead, and so do all steps from then on."""
    model = Trunk()
    engine = Engine(model, batch_dim=None)

    def fail(run: Any) -> None:
        del run
        attempts.append(None)
        raise torch.OutOfMemoryError("no memory")

    attempts: list[None] = []
    monkeypatch.setattr(driver, "assemble_rows", fail)
    for _ in range(4):
        assert_exact(engine, tasks(model(images())), model)
    assert len(attempts) == 1


def test_rows_that_are_too_large() -> None:
    """Many weights for small activations: rows of all objectives would need more memory."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(batch(40, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,tij,bj->tb", x, self.table, x).tanh()

    model = Rows()
    engine = Engine(model, batch_dim=None, memory_limit_bytes=1024)
    with ordinary_steps() as runs:
        for _ in range(3):
            assert_exact(engine, model(batch(2, 8)).sum(1), model)
    assert not runs


class Several(nn.Module):
    """A trunk with kinds of parameters that differ, and heads that are no part of J."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Tanh())
        self.trunk.append(nn.Linear(4, 4))
        self.trunk[3].weight = self.trunk[1].weight
        self.trunk.register_parameter("scale", nn.Parameter(torch.randn(())))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(TASKS))
        self.shift = nn.Embedding(5, 1, sparse=True)
        self.to(dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        """A loss of the whole batch for each head; the last does not depend on the trunk."""
        hidden = self.trunk(x) * self.trunk.scale
        found = [(head(hidden).sin() + self.shift(x)).square().mean() for head in self.heads]
        return [*found, self.shift.weight.square().sum()]


def _steps_of_several(engine: Engine, model: Several, keys: Any) -> None:
    """Steps whose weights and gradients are those of plain autograd."""
    inside, outside = [*model.trunk.parameters()], [*model.heads.parameters(), model.shift.weight]
    for n in (3, 5, 3, 4):
        x = torch.randint(5, (n,))
        losses = model(x)
        both = reference_jacobian(torch.stack(losses), [*inside, *outside])
        rows = both[:, : sum(p.numel() for p in inside)]
        weights = torch.linspace(0.5, 2.0, len(losses), dtype=rows.dtype)
        given = losses if keys is None else dict(zip(keys, losses, strict=True))
        _, gramian = engine.backward(
            given,
            lambda _, w=weights: w,
            gradients_outside="weighted",
            return_gramian=True,
        )
        assert_close_to_reference(gramian, rows @ rows.T)
        gradients = [p.grad for p in (*inside, *outside)]
        flat = torch.cat([x.to_dense().flatten() for x in gradients if x is not None])
        assert_close_to_reference(flat, weights @ both)
        model.zero_grad()


@pytest.mark.parametrize("batch_dim", [None, "auto"])
@pytest.mark.parametrize("keys", [None, "abcd"])
def test_numbers_one_by_one(batch_dim: Any, keys: Any) -> None:
    """Sparse, tied and single parameters, and leaves that are no part of J."""
    model = Several()
    with ordinary_steps() as runs:
        _steps_of_several(Engine(model.trunk, batch_dim=batch_dim), model, keys)
    assert len(runs) == 4


def test_numbers_that_are_scaled() -> None:
    """A gradient scaler multiplies them together."""
    model = Several(torch.float32)
    engine, x = Engine(model.trunk), torch.randint(5, (4,))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain = engine.compute_gramian(model(x))
    weights = torch.ones(4)
    found = engine.backward(model(x), lambda _: weights, scaler=scaler, return_gramian=True)
    torch.testing.assert_close(found[1], plain)
    head = model.heads[0].weight
    (expected,) = torch.autograd.grad(sum(model(x)), [head])
    torch.testing.assert_close(head.grad, 8 * expected)


def test_a_step_of_numbers_makes_a_pass_for_each() -> None:
    """No pass goes through the head of another loss, nor another pass for the heads."""
    model = Several()
    engine = Engine(model.trunk, verify="never")
    losses = model(torch.randint(5, (4,)))[:TASKS]
    seen: list[int] = []
    for number, loss in enumerate(losses):
        loss.register_hook(lambda _, number=number: seen.append(number))
    engine.backward(losses, lambda gramian: gramian.new_ones(len(gramian)))
    assert seen == [0, 1, 2]


def test_gradients_of_other_leaves_stay_sparse() -> None:
    model = Several()
    engine = Engine(model.trunk)
    engine.backward(model(torch.randint(5, (4,)))[:2], lambda gramian: gramian[0])
    assert model.shift.weight.grad is not None
    assert model.shift.weight.grad.is_sparse
    assert model.trunk[0].weight.grad is not None
    assert not model.trunk[0].weight.grad.is_sparse


def test_hooks_on_leaves_run_once_in_a_step() -> None:
    model = Several()
    engine = Engine(model.trunk, verify="never")
    calls: list[int] = []
    for number, leaf in enumerate((model.trunk[1].bias, model.heads[0].weight)):
        leaf.register_hook(lambda _, number=number: calls.append(number))
    engine.backward(model(torch.randint(5, (4,))), lambda gramian: gramian.new_ones(4))
    assert sorted(calls) == [0, 1]


def test_the_graph_of_numbers_is_freed_or_kept() -> None:
    model = Several()
    engine = Engine(model.trunk, verify="never")
    losses = model(torch.randint(5, (4,)))[:TASKS]
    for _ in range(2):
        engine.backward(losses, lambda gramian: gramian[0], retain_graph=True)
    engine.backward(losses, lambda gramian: gramian[0])
    with pytest.raises(
        FreedGraphError, match=r"to the first call, `engine\.backward`, which has freed it"
    ):
        engine.backward(losses, lambda gramian: gramian[0])


def test_a_jacobian_of_rows_has_all_products() -> None:
    model = Several()
    engine = Engine(model.trunk)
    parameters = [*model.trunk.parameters()]
    losses = model(torch.randint(5, (4,)))
    rows = reference_jacobian(torch.stack(losses), parameters)
    jacobian = engine.jacobian(losses)
    assert_close_to_reference(jacobian.gramian(), rows @ rows.T)
    stack = torch.randn(2, 4, dtype=rows.dtype)
    found = [x.reshape(2, -1) for x in jacobian.vjp(stack).values()]
    assert_close_to_reference(torch.cat(found, 1), stack @ rows)
    assert_close_to_reference(jacobian.dense(), rows)


class Added(nn.Module):
    """Leaves outside of J whose gradients autograd gives as one tensor, or as one number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.one, self.other = (nn.Parameter(batch(4, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.trunk(x) + self.one + self.other
        return [hidden.sum(), hidden.square().sum()]


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("memory_limit_bytes", [64, 2**29])
def test_gradients_of_other_leaves_share_no_memory(verify: Any, memory_limit_bytes: int) -> None:
    """With rows that fit and with rows that do not."""
    model = Added()
    engine = Engine(model.trunk, verify=verify, memory_limit_bytes=memory_limit_bytes)
    engine.backward(model(batch(4, 3)), lambda gramian: gramian.new_tensor([1.0, 0.0]))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 4
    assert len({x.untyped_storage().data_ptr() for x in gradients}) == 4
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient.stride() == parameter.stride()


def test_a_check_finds_a_wrong_product_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Trunk()
    engine = Engine(model, batch_dim=None)
    monkeypatch.setattr(Rows, "gramian", lambda rows: 1.001 * gramian(rows))
    with pytest.raises(VerificationError, match="Gramian"):
        engine.compute_gramian(tasks(model(images())))


gramian = Rows.gramian
