"""Many steps of each kind of loop: as many tensors and bytes at the end as at the beginning."""

import gc
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from autogram import Engine
from tests.unit._blocks.programs.at_once import write_programs_at_once
from tests.unit.checks import features
from tests.unit.engines import batch, per_sample

STEPS = 200
WARM = 40  # steps in which caches are filled

pytestmark = pytest.mark.usefixtures("without_collector")


class Small(nn.Module):
    """Rules, a derived weight, a call without a rule, a shared layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.shared, self.points = nn.Linear(3, 3), nn.Parameter(batch(3, 3))
        self.slopes = nn.PReLU(3)  # a formula for each call

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        x = self.shared(self.slopes(self.first(x)).tanh())
        if fails:
            raise InterruptedError("half-way")
        distances = (x.unsqueeze(1) - self.points).square().sum(2)
        return self.shared(nn.functional.dropout(distances, 0.2))


def _raise(_: Tensor) -> None:
    raise InterruptedError("half-way")


class Loop:
    """A model in training, one step after the other."""

    def __init__(self) -> None:
        self.model = Small()
        self.engine = Engine(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.kept: list[Tensor] = []
        self.steps = count()

    def losses(self) -> Tensor:
        return per_sample(self.model(batch(4, 3)))

    def update(self, losses: Tensor, weights: Tensor) -> None:
        losses.backward(weights)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def separate(self) -> None:
        """The Gramian, and then an ordinary backward pass."""
        losses = self.losses()
        gramian = self.engine.compute_gramian(losses)
        self.update(losses, gramian.mean(0) / gramian.trace())

    def fused(self) -> None:
        """The Gramian and the gradients from one pass."""
        self.engine.backward(self.losses(), lambda gramian: gramian.mean(0) / gramian.trace())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def jacobian(self) -> None:
        """Some products, the last of which go to the gradients."""
        jacobian = self.engine.jacobian(self.losses())
        jacobian.accumulate_grad(1 / jacobian.row_norms())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def several_objectives(self) -> None:
        losses = features(self.model(batch(4, 3)), 2)
        gramian = self.engine.compute_gramian(losses)
        self.update(losses, gramian.mean(0).view(4, 2) / gramian.trace())

    def another_shape_each_time(self) -> None:
        """More of them than there are in a data set, up to a repetition."""
        step = next(self.steps)
        losses = per_sample(self.model(batch(2 + step % 7, 3)))
        if step < WARM:
            self.engine.verify(losses)  # fills the caches of checks, which come at some steps only
        gramian = self.engine.compute_gramian(losses)
        self.update(losses, gramian.mean(0) / gramian.trace())

    def without_the_gramian(self) -> None:
        losses = self.losses()
        self.update(losses, torch.ones_like(losses))

    def a_forward_pass_without_a_tap(self) -> None:
        """Of a derived weight alone, at whose node the forward pass is noted."""
        weight = self.model.first.parametrizations.weight()
        losses = per_sample(batch(4, 3) @ weight.T)
        gramian = self.engine.compute_gramian(losses)
        self.update(losses, gramian.mean(0) / gramian.trace())

    def without_a_backward_pass(self) -> None:
        self.engine.compute_gramian(self.losses())

    def forward_alone(self) -> None:
        self.losses()

    def exception_in_the_forward_pass(self) -> None:
        try:
            self.model(batch(4, 3), fails=True)
        except InterruptedError:
            self.separate()

    def exception_in_the_gramian(self) -> None:
        """A hook of the user raises in the middle of the engine's backward pass."""
        output = self.model(batch(4, 3))
        output.register_hook(_raise)
        try:
            self.engine.compute_gramian(per_sample(output))
        except InterruptedError:
            return
        raise AssertionError("nothing was raised")

    def evaluation_in_between(self) -> None:
        losses = self.losses()
        with torch.no_grad():
            self.losses()
        self.losses()
        with self.engine.paused():
            self.losses()
        gramian = self.engine.compute_gramian(losses)
        self.update(losses, gramian.mean(0) / gramian.trace())

    def losses_of_earlier_steps(self) -> None:
        """Three of them are kept, with their graphs."""
        self.kept = [*self.kept[-2:], self.losses()]
        self.engine.compute_gramian(self.kept[0])
        self.engine.compute_gramian(self.kept[-1])

    def a_new_engine_each_time(self) -> None:
        with Engine(self.model, batch_dim=None) as engine:
            engine.compute_gramian(self.losses())


STYLES: list[Callable[[Loop], None]] = [
    Loop.separate,
    Loop.fused,
    Loop.jacobian,
    Loop.several_objectives,
    Loop.another_shape_each_time,
    Loop.without_the_gramian,
    Loop.a_forward_pass_without_a_tap,
    Loop.without_a_backward_pass,
    Loop.forward_alone,
    Loop.exception_in_the_forward_pass,
    Loop.exception_in_the_gramian,
    Loop.evaluation_in_between,
    Loop.losses_of_earlier_steps,
    Loop.a_new_engine_each_time,
]


def in_use() -> tuple[int, int, int]:
    """How many of our objects and how many tensors are alive, and the bytes of their memory.

    Found among what the collector tracks, whether it runs or not. A graph that stays behind shows
    as the objects that its taps hold, where no Python code holds its tensors.
    """
    objects = gc.get_objects()
    ours = sum(str(type(x).__module__).startswith("autogram") for x in objects)
    tensors = [x for x in objects if issubclass(type(x), Tensor)]
    storages = dict(found for x in tensors if (found := _memory(x)) is not None)
    return ours, len(tensors), sum(storages.values())


def _memory(tensor: Tensor) -> tuple[int, int] | None:
    """Where the memory of a tensor begins, and its bytes; those of compilers have none."""
    if isinstance(tensor, FakeTensor):
        return None
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # so PyTorch says of wrappers and of sparse tensors
        return None


@pytest.mark.slow
@pytest.mark.parametrize("step", STYLES, ids=lambda step: step.__name__.replace("_", " "))
def test_nothing_grows(step: Callable[[Loop], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first steps, in which caches are filled, and the last."""
    write_programs_at_once(monkeypatch)  # so that all of them are among the caches
    loop = Loop()
    for _ in range(WARM):
        step(loop)
    before = in_use()
    for _ in range(STEPS):
        step(loop)
    assert in_use() == before


def test_growth_is_seen() -> None:
    """What the test above would say of a list that gets longer."""
    before, kept = in_use(), []
    kept.append(torch.zeros(10))
    _, tensors, size = in_use()
    assert (tensors - before[1], size - before[2]) == (1, kept[0].nbytes)
