"""Options: values of another kind are refused, numbers of NumPy are taken, and typos are named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autogram import (
    AutogramError,
    Engine,
    InvalidBatchDimError,
    InvalidOperandError,
    InvalidOptionError,
    gramians_by_task,
)
from autogram.monitor import ConflictMonitor
from autogram.weightings import DualProj, GradVac, PCGrad, Projector, UPGrad
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch, mlp, per_sample

NOT_INTEGERS = [True, False, np.True_, 1.5, np.float64(2.0), torch.nan, torch.inf, "2", None, [2]]
NOT_NUMBERS = [True, False, np.True_, torch.nan, np.float32("nan"), -1, -0.5, "2", None, [2.0]]
NEITHER = [x for x in NOT_INTEGERS if x is not None]  # where `None` has a meaning
NOT_POSITIVE = [0, -1, np.int64(0), np.int32(-3)]


def losses_of(model: nn.Module) -> Tensor:
    return per_sample(model(batch(4, 3)))


def engine(**options: Any) -> Engine:
    return Engine(mlp(), **options)


def sketch(**options: Any) -> Tensor:
    model = mlp()
    return Engine(model).sketch(losses_of(model), **options).rows


def solved(**options: Any) -> Any:
    model = mlp()
    return Engine(model).jacobian(losses_of(model)).least_squares(torch.ones(4), **options)


def monitor_of(**options: Any) -> float:
    return ConflictMonitor().noise_scale(**options)


def by_task(batch_dim: Any) -> Tensor:
    return gramians_by_task(torch.eye(4), torch.ones(2, 2), batch_dim=batch_dim)


Make = Callable[..., Any]
# What takes the option, its name, what is refused, and what of NumPy is taken.
OPTIONS: list[tuple[Make, str, list[Any], list[Any]]] = [
    (engine, "memory_limit_bytes", NOT_INTEGERS + NOT_POSITIVE, [np.int64(2**20), np.uint32(64)]),
    (engine, "batch_dim", NEITHER, [np.int64(0), np.int8(-1)]),
    (engine, "verify", [True, 1, None, [], ["first"], np.array(["first", "never"])], []),
    (engine, "unseen", [True, 1, None, [], ["rows"], torch.zeros(2)], []),
    (engine, "distributed", [1, 0, np.True_, "True", 1.0], []),
    (sketch, "dimensions", NOT_INTEGERS + NOT_POSITIVE, [np.int64(8)]),
    (sketch, "seed", NOT_INTEGERS, [np.int64(8), np.int32(-3)]),
    (solved, "damping", [*NOT_NUMBERS, 1j, torch.ones(2), torch.tensor(1j)], [np.float32(0.5)]),
    (by_task, "batch_dim", [True, False, 1.0, 2, "auto", torch.nan], [np.int64(1)]),
    (ConflictMonitor, "every", NOT_INTEGERS + NOT_POSITIVE, [np.int64(2)]),
    (ConflictMonitor, "length", NOT_INTEGERS + NOT_POSITIVE, [np.int64(2)]),
    (monitor_of, "last", NEITHER + NOT_POSITIVE, [np.int8(2)]),
    (Projector, "norm_eps", NOT_NUMBERS, [np.float32(1e-3), 0, 1]),
    (Projector, "reg_eps", [*NOT_NUMBERS, 0], [np.float64(1e-3), 1]),
    (Projector, "tolerance", [*NOT_NUMBERS, 0], [np.float64(1e-3)]),
    (Projector, "most", NOT_INTEGERS + NOT_POSITIVE, [np.int64(2)]),
    (
        Projector,
        "iterations",
        NEITHER + NOT_POSITIVE,
        [np.int8(2)],
    ),
    (GradVac, "beta", [*NOT_NUMBERS, 1.5], [np.float32(0.5), 0, 1]),
    (GradVac, "eps", NOT_NUMBERS, [np.float32(0.5), 0]),
    (UPGrad, "projector", [True, 3, "x"], []),
    (DualProj, "pref_vector", [True, 3, [1.0], torch.ones(2, 2), torch.ones(2) * 1j], []),
    (UPGrad, "pref_vector", [torch.ones(2, device="meta")], []),
]
CASES = [
    pytest.param(make, name, value, id=f"{make.__name__} {name} {value!r}")
    for make, name, values, _ in OPTIONS
    for value in values
]
TAKEN = [
    pytest.param(make, name, value, id=f"{make.__name__} {name} {value!r}")
    for make, name, _, values in OPTIONS
    for value in values
]


@pytest.mark.cpu
@pytest.mark.parametrize(("make", "name", "value"), CASES)
def test_values_of_another_kind(make: Make, name: str, value: Any) -> None:
    """The message names the option, and says what to pass."""
    with pytest.raises(AutogramError, match=rf"(?s){name}.*(Pass|pass) ") as caught:
        make(**{name: value})
    kinds = InvalidOptionError, InvalidBatchDimError, InvalidOperandError
    assert isinstance(caught.value, kinds)


@pytest.mark.cpu
@pytest.mark.parametrize(("make", "name", "value"), TAKEN)
def test_numbers_of_numpy(make: Make, name: str, value: Any) -> None:
    """They are numbers like any others."""
    make(**{name: value})


def test_an_engine_with_numbers_of_numpy() -> None:
    model = mlp()
    engine = Engine(model, batch_dim=np.int64(0), memory_limit_bytes=np.int64(2**20))
    losses = losses_of(model)
    expected = Engine(model).compute_gramian(losses_of(model))
    assert engine.compute_gramian(losses).shape == expected.shape
    jacobian = engine.jacobian(losses)
    rows = jacobian.rows(np.int64(1))["0.bias"]
    assert_close_to_reference(rows[0], jacobian.dense()[1][15:20])


@pytest.mark.parametrize("value", ["False", 2, torch.nan, "yes"])
def test_switches(value: Any) -> None:
    """A text would keep the graph, whatever it says."""
    model = mlp()
    engine = Engine(model)

    def add() -> None:
        with engine.accumulate(torch.diagonal) as step:
            step.add(losses_of(model), retain_graph=value)

    for call in (
        add,
        lambda: engine.backward(losses_of(model), torch.diagonal, retain_graph=value),
    ):
        with pytest.raises(InvalidOptionError, match=r"`retain_graph` is .*Pass `True`"):
            call()
    assert all(p.grad is None for p in model.parameters())
    for fine in (True, False, None, np.True_):
        engine.backward(losses_of(model), torch.diagonal, retain_graph=fine)  # type: ignore[call-overload]


@pytest.mark.parametrize("index", [True, False, np.True_])
def test_a_truth_value_is_no_index(index: Any) -> None:
    """PyTorch would take it for all rows, or none."""
    model = mlp()
    jacobian = Engine(model).jacobian(losses_of(model))
    with pytest.raises(InvalidOperandError, match=r"`objectives` is .*Pass .*mask"):
        jacobian.rows(index)
    mask = torch.tensor([True, False, False, True])
    assert len(jacobian.rows(mask)["0.bias"]) == 2


def test_names_in_a_text() -> None:
    """Its letters would be names."""
    model = mlp()
    jacobian = Engine(model).jacobian(losses_of(model))
    with pytest.raises(InvalidOperandError, match=r"`names` is .*Pass a list of names"):
        jacobian.rows(0, "0.weight")


TYPOS = [
    pytest.param(lambda: Engine(mlp(), batchdim=0), "Engine", "batchdim", "batch_dim", id="Engine"),  # type: ignore[arg-type]
    pytest.param(
        lambda: Engine(mlp(), memory_limit=1, verify="never"),  # type: ignore[arg-type]
        *("Engine", "memory_limit", "memory_limit_bytes"),
        id="another",
    ),
    pytest.param(lambda: UPGrad(pref_vec=None), "UPGrad", "pref_vec", "pref_vector", id="UPGrad"),  # type: ignore[arg-type]
    pytest.param(
        lambda: DualProj(projectors=None),  # type: ignore[arg-type]
        *("DualProj", "projectors", "projector"),
        id="DualProj",
    ),
]


@pytest.mark.parametrize(("make", "kind", "typo", "option"), TYPOS)
def test_a_typo(make: Callable[[], Any], kind: str, typo: str, option: str) -> None:
    """The error names the class that was called, what was meant, and all options."""
    with pytest.raises(TypeError, match=rf"`{kind}` has no option `{typo}`") as caught:
        make()
    assert f"Did you mean `{option}`?" in str(caught.value)
    assert "Hooked" not in str(caught.value)


def test_an_option_that_is_like_no_other() -> None:
    with pytest.raises(TypeError) as caught:
        Engine(mlp(), samples=3)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "`Engine` has no option `samples`. Its options are `batch_dim`, `memory_limit_bytes`, "
        "`verify`, `unseen`, `distributed`."
    )


def test_a_typo_in_a_subclass() -> None:
    class Own(Engine):
        """Of a user."""

    with pytest.raises(TypeError, match=r"`Own` has no option `verfy`. Did you mean `verify`\?"):
        Own(mlp(), verfy="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Engine, UPGrad, DualProj, PCGrad, GradVac, Projector])
def test_no_error_names_a_private_class(kind: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=kind.__name__):
        kind(no_such_option=1)
