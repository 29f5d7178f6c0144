"""What no key of a layout shows is found by the scheduled check, at the latest 64 calls later."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import CoupledObjectivesWarning, Engine, MixedSamplesError, VerificationError
from autogram.testing import reference_jacobian
from tests.unit.checks import TOLERANCES, irregular
from tests.unit.engines import mlp, per_sample
from tests.unit.faults import SHORTAGES, Fault, allocates

LONGEST = 64  # calls between two checks
SHIFTED = torch.eye(4).roll(1, 0)
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
BATCH_DIMS = pytest.mark.parametrize("batch_dim", ["auto", 0])
# Before the first scheduled checks, between two of them, and where powers of two are far apart.
CHANGES = pytest.mark.parametrize("change", [6, 40, 130])


class Averaged(nn.Module):
    """Samples that mix once a number is no longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("share", torch.tensor(1.0))

    def change(self) -> None:
        self.share.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return self.last(self.share * y + (1 - self.share) * y.mean(0))


class Exchanged(nn.Module):
    """Samples that change places once a matrix is another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("matrix", torch.eye(4))

    def change(self) -> None:
        self.matrix.copy_(SHIFTED)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.matrix @ self.first(x).tanh())


class Rolled:
    """Moves the cotangents of samples by a number that no node of the graph has: in a hook."""

    shift = 0

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        y = x.view_as(x)
        y.register_hook(lambda g: g.roll(-Rolled.shift, 0))
        return y


class Unseen(nn.Module):
    """Samples whose cotangents change places by what nothing shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def change(self) -> None:
        Rolled.shift = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Rolled.apply(self.first(x).tanh()))


MODELS: dict[str, Callable[[], Any]] = {
    "averaged": Averaged,
    "exchanged": Exchanged,
    "unseen": Unseen,
}


@pytest.fixture(autouse=True)
def _no_shift() -> None:
    Rolled.shift = 0


@dataclass
class Calls:
    """The numbers of the calls that were wrong, and what was told at which call."""

    wrong: list[int]
    told: dict[int, str]


def _run(engine: Engine, model: Any, calls: int, change: int, *, fused: bool) -> Calls:
    """Runs a loop in which the model changes in front of a call."""
    found = Calls([], {})
    parameters = list(model.parameters())
    for call in range(1, calls + 1):
        if call == change:
            model.change()
        losses = per_sample(model(irregular(4, 3) + call % 3))
        jacobian = reference_jacobian(losses, parameters)
        expected = jacobian @ jacobian.T
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if fused:
                    _, gramian = engine.backward(
                        losses, lambda _: torch.ones(4), return_gramian=True
                    )
                else:
                    gramian = engine.compute_gramian(losses)
            except (VerificationError, MixedSamplesError) as error:
                found.told[call] = str(error)
                continue
        for warning in caught:
            assert warning.category is CoupledObjectivesWarning
            found.told[call] = str(warning.message)
        if (gramian - expected).abs().max() > TOLERANCES[gramian.dtype] * expected.abs().max():
            found.wrong.append(call)
    return found


@FUSED
@BATCH_DIMS
@CHANGES
@pytest.mark.parametrize("name", MODELS)
def test_what_is_remembered_is_verified(
    name: str, change: int, batch_dim: Any, fused: bool
) -> None:
    """Each wrong call is followed by an error or a warning, after which calls are right."""
    model = MODELS[name]()
    engine = Engine(model, batch_dim=batch_dim)
    found = _run(engine, model, change + LONGEST + 3, change, fused=fused)
    if not found.wrong:
        return  # seen at once, and treated as it must be
    assert min(found.wrong) >= change
    assert found.told, f"nothing was said of the wrong calls {found.wrong}"
    first = min(found.told)
    assert change <= first <= change + LONGEST
    assert max(found.wrong) < first, "wrong results after the error or the warning"


@FUSED
@pytest.mark.parametrize("change", [6, 70, 130])
def test_the_error_says_since_when(change: int, fused: bool) -> None:
    """Results are in doubt from the call behind the last check."""
    model = Unseen()
    engine = Engine(model, batch_dim=0)
    found = _run(engine, model, change + LONGEST + 1, change, fused=fused)
    assert found.told, "nothing was said"
    message = found.told[min(found.told)]
    named = [int(number) for number in re.findall(r"\bcalls? (\d+)\b", message)]
    assert named, f"no call is named: {message}"
    assert min(named) <= change
    assert min(named) > change - LONGEST - 1


def test_the_check_of_a_new_graph_behind_a_shortage_of_memory() -> None:
    """The call begins again, and so does its check: it finds gradients that are no sums of rows."""

    def new_graph() -> Callable[[], Tensor]:
        model = mlp()
        engine = Engine(model, batch_dim=0)
        for _ in range(4):  # no other check is due before the eighth call
            engine.compute_gramian(per_sample(model(irregular(4, 3))))
        hidden = model[:2](irregular(4, 3)).sin()
        hidden.register_hook(lambda cotangent: cotangent.clamp(-0.1, 0.1))
        return partial(engine.compute_gramian, per_sample(model[2](hidden)))

    for _ in range(2):  # what is kept for all engines is there the second time
        call = new_graph()
        with (
            Fault(SHORTAGES["CPU"], times=0, fails=allocates) as counted,
            pytest.raises(VerificationError),
        ):
            call()
    for skipped in range(0, counted.calls, counted.calls // 8):
        call = new_graph()
        with (
            Fault(SHORTAGES["CPU"], skipped, fails=allocates) as shortage,
            pytest.raises(VerificationError),
        ):
            call()
        assert shortage.failures == 1


def test_a_remembered_layout_of_the_losses() -> None:
    """What is behind the model is verified alike, and refused once it was wrong."""
    model = mlp(3, 4)
    engine = Engine(model, batch_dim=0)
    told = []
    for call in range(1, 140):
        Rolled.shift = int(call >= 70)
        y, z = (Rolled.apply(model(irregular(4, 3) * scale)) for scale in (1, 2))
        try:
            engine.compute_gramian((y * z).sum(1) + model(irregular(4, 3)).sum(1))
        except VerificationError:
            told.append(call)
        except MixedSamplesError:  # from then on
            assert told
    assert len(told) == 1
    assert 70 <= told[0] <= 70 + LONGEST


@FUSED
@BATCH_DIMS
def test_checks_go_on_at_a_steady_pace(batch_dim: Any, fused: bool) -> None:
    """Each 64th call is checked."""
    layers = nn.Linear(3, 4), nn.Linear(4, 2)
    passes: list[int] = []

    def count(_: Tensor) -> None:
        passes[-1] += 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            hidden.register_hook(count)
            return self.last(hidden)

    model = Model()
    engine = Engine(model, batch_dim=batch_dim)
    for _ in range(400):
        losses = per_sample(model(irregular(4, 3)))
        passes.append(0)
        if fused:
            engine.backward(losses, lambda _: torch.ones(4))
        else:
            engine.compute_gramian(losses)
    dearer = [call for call, count in enumerate(passes, 1) if count > 1]
    checked = [1, 2, 4, 8, 16, 32, *range(64, 401, LONGEST)]
    assert dearer == checked
    assert sum(passes[64:]) <= 1.05 * len(passes[64:])
