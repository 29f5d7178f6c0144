"""Losses as people have them: several dimensions, lists, dicts, one number for each task."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidOperandError,
    gramians_by_task,
)
from autogram.testing import reference_jacobian
from autogram.weightings import UPGrad
from tests.unit.checks import (
    EVERY_KIND,
    Objectives,
    assert_close_to_reference,
    assert_same_gradients,
    features,
    irregular,
)
from tests.unit.engines import assert_exact, batch, mlp


class Tasks(nn.Module):
    """A trunk with two heads, whose losses have one or several objectives for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.heads = nn.ModuleDict({"one": nn.Linear(5, 1), "several": nn.Linear(5, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x)
        return {
            "one": self.heads["one"](hidden).sin().squeeze(1),  # (B,)
            "several": self.heads["several"](hidden).square(),  # (B, 2)
        }


def weighting(gramian: Tensor) -> Tensor:
    """Different for each objective."""
    return gramian.diagonal().rsqrt() * torch.arange(1, len(gramian) + 1)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
def test_weights_fit_the_losses(objectives: Objectives) -> None:
    """The step in two passes, by weights in the losses' shape, and the fused one."""
    model = mlp(4, 3)
    twin = copy.deepcopy(model)
    engine = Engine(model, batch_dim=objectives.batch_dim)
    for size in (4, 4, 4):
        x = batch(size, 4)
        losses = objectives.of(model(x))
        weights = engine.weights(losses, weighting)
        assert weights.shape == losses.shape
        losses.backward(weights)
        expected = objectives.of(twin(x))
        rows = reference_jacobian(expected, twin.parameters())
        assert_close_to_reference(weights.flatten(), weighting(rows @ rows.T))
        expected.backward(weights)
        assert_same_gradients(model, twin)
        fused = engine.backward(objectives.of(model(x)), weighting)
        assert fused.shape == losses.shape
        assert_close_to_reference(fused, weights)
        model.zero_grad()
        twin.zero_grad()


def test_weights_of_losses_in_half_precision() -> None:
    model = mlp(4, 3).bfloat16()
    losses = model(torch.ones(2, 4, dtype=torch.bfloat16)).square()
    weights = Engine(model).weights(losses, weighting)
    assert weights.dtype == torch.float32
    losses.backward(weights)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def in_all(losses: dict[str, Tensor]) -> Tensor:
    """One sample after the other, and all objectives of a sample in the order of the dict."""
    return torch.cat([part.reshape(len(part), -1) for part in losses.values()], 1)


@pytest.mark.parametrize("form", [dict, list, tuple])
def test_several_losses_of_each_sample(form: type) -> None:
    """The batch changes its size, and the step is that of all losses in one tensor."""
    model = Tasks()
    engine = Engine(model)
    for size in (5, 3, 7, 3):
        x = irregular(size, 3) + size
        named = model(x)
        losses = named if form is dict else form(named.values())
        rows = reference_jacobian(in_all(named), model.parameters())
        gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, rows @ rows.T)
        assert_close_to_reference(engine.jacobian(losses).dense(), rows)
        engine.verify(losses)
        expected = weighting(rows @ rows.T)

        weights, again = engine.backward(losses, weighting, return_gramian=True)
        assert_close_to_reference(again, gramian)
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert_close_to_reference(found, expected @ rows)
        if form is dict:
            assert list(weights) == ["one", "several"]
            weights = list(weights.values())
        one, several = weights
        assert one.shape == (size,)
        assert several.shape == (size, 2)
        assert_close_to_reference(torch.cat([one.unsqueeze(1), several], 1).flatten(), expected)

        model.zero_grad()
        named = model(x)
        weights = engine.weights(named, weighting)
        torch.autograd.backward(list(named.values()), list(weights.values()))
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert_close_to_reference(found, expected @ rows)
        model.zero_grad()


@pytest.mark.parametrize("batch_dim", ["auto", None, 0])
@pytest.mark.parametrize("size", [2, 5])
def test_one_number_for_each_task(batch_dim, size: int) -> None:
    """Nobody is told of batch normalisation, also if there are as many tasks as samples."""
    model = Tasks()
    engine = Engine(model, batch_dim=None if batch_dim == 0 else batch_dim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            losses = {name: loss.mean() for name, loss in model(batch(size, 3)).items()}
            rows = reference_jacobian(torch.stack(list(losses.values())), model.parameters())
            weights = engine.backward(losses, UPGrad())
            assert {name: weight.shape for name, weight in weights.items()} == {
                "one": (),
                "several": (),
            }
            expected = torch.stack(list(weights.values())) @ rows
            found = torch.cat([p.grad.flatten() for p in model.parameters()])
            assert_close_to_reference(found, expected)
            model.zero_grad()


def test_losses_of_a_loop_over_samples_stay_per_sample() -> None:
    """Where no pass is made for each loss."""
    model = mlp(3, 1)
    engine = Engine(model, unseen="error")
    losses = [model(x).sin().squeeze() for x in batch(4, 3)]
    rows = reference_jacobian(torch.stack(losses), model.parameters())
    assert_close_to_reference(engine.compute_gramian(losses), rows @ rows.T)
    assert engine.report().samples == 4


def test_several_losses_without_samples_of_their_own() -> None:
    """With the whole batch as one sample, losses may have any shapes."""
    model = Tasks()
    named = model(batch(4, 3))
    losses = [named["one"].sum(), named["several"], named["one"][:3]]
    flat = torch.cat([part.flatten() for part in losses])
    rows = reference_jacobian(flat, model.parameters())
    weights, gramian = Engine(model, batch_dim=None).backward(
        losses, weighting, return_gramian=True
    )
    assert_close_to_reference(gramian, rows @ rows.T)
    assert [w.shape for w in weights] == [(), (4, 2), (3,)]
    expected = weighting(rows @ rows.T) @ rows
    assert_close_to_reference(torch.cat([p.grad.flatten() for p in model.parameters()]), expected)


def test_an_empty_batch() -> None:
    model = Tasks()
    engine = Engine(model)
    losses = model(torch.zeros(0, 3))
    weights = engine.backward(losses, weighting)
    assert {name: w.shape for name, w in weights.items()} == {"one": (0,), "several": (0, 2)}
    several = model(torch.zeros(0, 3))["several"]
    assert engine.weights(several, weighting).shape == (0, 2)
    assert gramians_by_task(engine.compute_gramian(several), several).shape == (2, 0, 0)


@pytest.mark.parametrize(
    ("objectives", "batch_dim"),
    [
        (Objectives("(B,)", lambda y: features(y, 1).squeeze(1)), 0),
        (Objectives("(B, 3)", lambda y: features(y, 3)), 0),
        (Objectives("(3, B)", lambda y: features(y, 3).T, 1), 1),
        (Objectives("(2, B, 2)", lambda y: features(y, 4).view(-1, 2, 2).transpose(0, 1), 1), 1),
        (Objectives("(2,)", lambda y: features(y, 2).mean(0), None), None),
    ],
)
def test_a_gramian_for_each_task(objectives: Objectives, batch_dim: int | None) -> None:
    model = mlp(4, 3)
    engine = Engine(model, batch_dim=objectives.batch_dim)
    losses = objectives.of(model(batch(5, 4)))
    found = gramians_by_task(engine.compute_gramian(losses), losses, batch_dim=batch_dim)
    by_sample = losses.unsqueeze(-1) if batch_dim is None else losses.movedim(batch_dim, -1)
    expected = []
    for task in by_sample.reshape(-1, by_sample.shape[-1]):
        rows = reference_jacobian(task, model.parameters())
        expected.append(rows @ rows.T)
    assert_close_to_reference(found, torch.stack(expected))


def test_a_gramian_for_each_of_several_losses() -> None:
    model = Tasks()
    engine = Engine(model)
    losses = model(batch(4, 3))
    found = gramians_by_task(engine.compute_gramian(losses), losses)
    assert list(found) == ["one", "several"]
    for name, task in losses.items():
        rows = reference_jacobian(task, model.parameters())
        assert_close_to_reference(found[name], rows @ rows.T)
    numbers = [loss.mean() for loss in losses.values()]
    first, second = gramians_by_task(engine.compute_gramian(numbers), numbers)
    assert first.shape == second.shape == (1, 1)


def test_a_gramian_for_each_group_of_an_optimizer() -> None:
    """Parameters that no group has are left out."""
    model = Tasks()
    optimizer = torch.optim.SGD(
        [
            {"params": model.trunk.parameters(), "name": "trunk"},
            {"params": [model.heads["one"].weight, model.heads["several"].weight]},
        ]
    )
    losses = in_all(model(batch(4, 3)))
    found = Engine(model).jacobian(losses).block_gramians(optimizer.param_groups)
    assert list(found) == ["trunk", "1"]
    for group, gramian in zip(optimizer.param_groups, found.values(), strict=True):
        rows = reference_jacobian(losses, group["params"])
        assert_close_to_reference(gramian, rows @ rows.T)


def test_as_many_tasks_as_samples_are_told_what_to_do() -> None:
    """It cannot be known what they are, so that the first thing said is of tasks."""
    model = mlp(3, 4)
    with pytest.warns(
        CoupledObjectivesWarning, match=r"^Pass `batch_dim=None` to `Engine`, or a list"
    ):
        Engine(model).compute_gramian(model(batch(4, 3)).square().mean(0))


def test_tasks_without_labels_for_some_samples() -> None:
    """Losses that are missing are zero, and tasks with batches of their own are one tensor."""
    model = Tasks()
    engine = Engine(model)
    for step in range(3):
        losses = model(batch(4, 3))
        is_labelled = torch.arange(4) != step
        losses = {"one": losses["one"], "two": torch.where(is_labelled, losses["one"].sin(), 0)}
        assert_exact(engine, torch.stack(list(losses.values()), 1), model)
        assert engine.weights(losses, torch.diagonal)["two"].argwhere().flatten().tolist() == [
            sample for sample in range(4) if sample != step
        ]
        one, two = (model(batch(size, 3))["one"] for size in (4, 3))
        with pytest.raises(InvalidLossesError, match=r"use zero.*one tensor \(`torch\.cat`\)"):
            engine.compute_gramian([one, two])
        assert_exact(engine, torch.cat([one, two]), model)


def test_refusals() -> None:
    model = Tasks()
    engine = Engine(model)
    losses = model(batch(4, 3))
    with pytest.raises(
        InvalidLossesError, match=r"\(4,\), \(\), and .*Several losses fit together if"
    ):
        engine.compute_gramian([losses["one"], losses["one"].mean()])
    with pytest.raises(InvalidLossesError, match=r"have the shapes \(4,\), \(4, 2\), and"):
        Engine(model, batch_dim=-1).compute_gramian(losses)
    with pytest.raises(
        InvalidLossesError, match=r"are a float\. Pass a tensor, or a list or a dict of them"
    ):
        engine.compute_gramian(1.0)
    with pytest.raises(
        InvalidLossesError, match=r"a float at 'one'.*Pass a tensor, or a list or a dict of tensors"
    ):
        engine.compute_gramian({"one": 1.0})
    with pytest.raises(
        InvalidLossesError, match=r"There are no losses: the list or dict is empty\."
    ):
        engine.compute_gramian([])
    with pytest.raises(InvalidOperandError, match=r"A vector of shape \(2,\) was given"):
        engine.weights(losses["one"], lambda gramian: gramian[0, :2])
    with pytest.raises(
        InvalidOperandError,
        match=r"\(4, 4\).*12.* losses\. Pass the losses that it was computed from",
    ):
        gramians_by_task(torch.eye(4), losses)
    for batch_dim in ("auto", 2):
        with pytest.raises(InvalidBatchDimError, match=r"\(4, 2\)\. Pass the dimension"):
            gramians_by_task(torch.eye(8), losses["several"], batch_dim=batch_dim)  # type: ignore[arg-type]
