"""Ranks that are in different calls, or leave one: an error on all of them, and no rank waits."""

import random
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from autogram import Engine, RankError
from autogram._blocks import Columns
from autogram._distributed.ranks import Ranks
from autogram._jacobian import Jacobian
from tests.unit._distributed.worlds import (
    World,
    assert_close,
    assert_step,
    two_of_each,
    weighting,
)
from tests.unit.engines import batch, per_sample
from tests.unit.processes import RANKS, Scenario

pytestmark = pytest.mark.slow

Call = Callable[[Engine, Tensor, Callable[[Tensor], Tensor]], object]


def accumulate(engine: Engine, losses: Tensor, weighting: Callable[[Tensor], Tensor]) -> None:
    with engine.accumulate(weighting) as batches:
        batches.add(losses)


CALLS: dict[str, Call] = {
    "compute_gramian": lambda engine, losses, _: engine.compute_gramian(losses),
    "weights": lambda engine, losses, weighting: engine.weights(losses, weighting),
    "backward": lambda engine, losses, weighting: engine.backward(losses, weighting),
    "accumulate": accumulate,
}
INTERRUPTS = (KeyboardInterrupt(), SystemExit(7), GeneratorExit())


class Run:
    """An engine, a model of which it makes steps, and a twin that autograd differentiates."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world, self.step = rank, World(), 0
        self.model, self.twin = self.world.model(), self.world.model()
        self.engine = Engine(self.model, distributed=True)

    def losses(self) -> Tensor:
        return self.world.losses(self.model(self.world.batch(self.rank, self.step)))

    def assert_works(self) -> None:
        """Nothing was written, and the next steps are right."""
        assert all(p.grad is None for p in self.model.parameters())
        for _ in range(2):
            self.step += 1
            assert_step(self.engine, self.world, self.model, self.twin, self.step)
        self.model.zero_grad()


def different_methods(rank: int) -> None:
    """At the first call, and at later ones, in which ranks foresee what they have."""
    run = Run(rank)
    for first, second in [(a, b) for a in CALLS for b in CALLS if a != b]:
        with pytest.raises(
            RankError,
            match=rf"rank 0 is in the middle of `engine\.{first}`.*rank 1 in the middle of "
            rf"`engine\.{second}`.*Call the same methods of the engine in the same order",
        ) as raised:
            CALLS[second if rank else first](run.engine, run.losses(), weighting)
        assert raised.value.ranks == [1]
        run.assert_works()


def different_numbers_of_calls(rank: int) -> None:
    """One rank calls once more, and the other one goes on to something else."""
    run = Run(rank)
    for more in CALLS:
        for other in [name for name in CALLS if name != more]:
            CALLS[more](run.engine, run.losses(), weighting)
            with pytest.raises(RankError, match="The ranks are out of step"):
                CALLS[other if rank else more](run.engine, run.losses(), weighting)
            run.model.zero_grad()
            run.assert_works()


def a_rank_that_left_without_a_word(rank: int) -> None:
    """Its next call is not the one in which the other rank waits for it."""
    run = Run(rank)
    run.assert_works()
    if rank:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "_exchanged", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                run.engine.compute_gramian(run.losses())
    with pytest.raises(RankError, match=r"call number (\d+).*call number (?!\1)\d+"):
        run.engine.compute_gramian(run.losses())
    run.assert_works()


def losses_of_different_shapes(rank: int) -> None:
    """Nothing is out of step where ranks have other objectives, or other options of their own."""
    world = World()
    model, twin = world.model(), world.model()
    limit = 2**29 if rank else 2**16
    dim = 0 if rank else "auto"
    engine = Engine(model, distributed=True, batch_dim=dim, memory_limit_bytes=limit)
    own = World(losses=two_of_each) if rank else world
    for step in range(3):
        jacobian, _ = own.expected(twin, step)
        found = engine.compute_gramian(own.losses(model(own.batch(rank, step))))
        assert_close(found, jacobian @ jacobian.T)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def assert_told(run: Run, rank: int, error: BaseException, call: Callable[[], object]) -> None:
    """A rank leaves a call by an error, and all others learn of it."""
    if run.rank == rank:
        with pytest.raises(type(error)) as raised:
            call()
        assert raised.value is error
    else:
        text = rf"(?s)The step failed on rank {rank}.*says: {type(error).__name__}"
        with pytest.raises(RankError, match=text) as told:
            call()
        assert told.value.ranks == [rank]


def interrupts_in_the_weighting(rank: int) -> None:
    run = Run(rank)
    for error in INTERRUPTS:
        for name in ("weights", "backward", "accumulate"):
            call = partial(CALLS[name], run.engine, run.losses(), raising(error))
            assert_told(run, 0, error, call)
            run.assert_works()


class Interrupted(torch.autograd.Function):
    """The identity, whose backward pass is interrupted."""

    error: BaseException | None = None

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, cotangent: Tensor) -> Tensor:
        if Interrupted.error is not None:
            raise Interrupted.error
        return cotangent


def interrupts_in_the_pass(rank: int) -> None:
    """Of a new engine, and of one whose rows would leave during the pass."""
    run = Run(rank)
    for error in INTERRUPTS:
        for call in CALLS.values():
            hidden = Interrupted.apply(run.model[0](run.world.batch(rank, run.step)))
            losses = run.world.losses(run.model[1:](hidden))
            Interrupted.error = error if rank == 1 else None
            assert_told(run, 1, error, partial(call, run.engine, losses, weighting))
            Interrupted.error = None
            run.assert_works()


def interrupts_in_our_own_code(rank: int) -> None:
    """While rows and factors travel, and behind the weights."""
    run = Run(rank)
    error = INTERRUPTS[0]
    for way, owner, method, names in (
        ("rows", Columns, "slice", CALLS),
        ("ring", Columns, "cross_gram", CALLS),
        (None, Jacobian, "vjp", ("backward", "accumulate")),
    ):
        run.engine._ranks.way = way
        run.engine._ranks._plans.clear()
        failing = 0 if way == "ring" else 1  # who contracts in a ring
        for name in names:
            call = partial(CALLS[name], run.engine, run.losses(), weighting)
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(owner, method, raising(error))
                assert_told(run, failing, error, call)
            run.assert_works()


def blocks_that_are_left(rank: int) -> None:
    """Before, between and behind micro-batches: also by a generator that is closed."""
    run = Run(rank)

    def batches(error: BaseException, left: int) -> Iterator[None]:
        with run.engine.accumulate(weighting) as block:
            for i in range(3):
                if rank == 1 and i == left:
                    yield
                    raise error
                if i < 2:
                    block.add(run.losses())

    for error in INTERRUPTS:
        for left in range(3):

            def call(error: BaseException = error, left: int = left) -> None:
                for _ in (steps := batches(error, left)):
                    if isinstance(error, GeneratorExit):
                        steps.close()
                        raise error

            assert_told(run, 1, error, call)
            run.assert_works()


def hooks_that_raise(rank: int) -> None:
    """Behind all exchanges: gradients are there, and the other ranks are told nevertheless."""
    run = Run(rank)
    for error in (*INTERRUPTS, ValueError("of the user")):
        for name in ("backward", "accumulate"):
            handle = run.model[2].weight.register_hook(raising(error) if rank else lambda _: None)
            call = partial(CALLS[name], run.engine, run.losses(), weighting)
            if isinstance(error, ValueError):
                with pytest.raises(RankError, match=r"on rank 1.*ValueError: of the user"):
                    call()
            else:
                assert_told(run, 1, error, call)
            handle.remove()
            run.model.zero_grad()
            run.assert_works()


def signals_at_any_time(rank: int) -> None:
    """Either all ranks have made the step, or none has; signals that come too late come behind."""
    run = Run(rank)
    run.assert_works()
    draw, agreement = random.Random(rank), run.engine._ranks.agreement
    before = signal.signal(signal.SIGALRM, raising(KeyboardInterrupt()))
    outcomes: list[str] = []
    try:
        for number in range(60):
            run.step = number
            name = [*CALLS][number % len(CALLS)]
            losses, begun, outcome = run.losses(), agreement._number, "made"
            try:
                if rank == 1:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 2e-2))
                CALLS[name](run.engine, losses, weighting)
            except RankError:
                outcome = "told"
            except KeyboardInterrupt:
                outcome = "interrupted"
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if rank == 1 and outcome == "interrupted" and agreement._number == begun:
                    CALLS[name](run.engine, run.losses(), weighting)  # it had not begun
                    outcome = "made"
            except KeyboardInterrupt:
                outcome = "interrupted"
            found: list[Any] = [None] * RANKS
            distributed.all_gather_object(found, outcome)
            assert found in (["made", "made"], ["told", "interrupted"], ["made", "interrupted"])
            outcomes.append("".join(found))
            run.model.zero_grad()
            if number % 6 == 5:
                run.assert_works()
        assert len(set(outcomes)) > 1, outcomes
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def messages_of_a_step(rank: int) -> None:
    """Ranks tell one another their calls in messages that there are anyway."""
    del rank
    model = World().model()
    engine = Engine(model, distributed=True)
    agreement = engine._ranks.agreement
    for name, expected in {"compute_gramian": 2, "weights": 3, "backward": 4}.items():
        for _ in range(3):  # from the second one on, rows leave during the pass
            before = agreement.calls
            CALLS[name](engine, per_sample(model(batch(4, 6))), weighting)
        assert agreement.calls - before == expected, name


def scenarios() -> Mapping[str, Scenario]:
    """All of them, by name."""
    found = (
        different_methods,
        different_numbers_of_calls,
        a_rank_that_left_without_a_word,
        losses_of_different_shapes,
        interrupts_in_the_weighting,
        interrupts_in_the_pass,
        interrupts_in_our_own_code,
        blocks_that_are_left,
        hooks_that_raise,
        signals_at_any_time,
        messages_of_a_step,
    )
    return {scenario.__name__: scenario for scenario in found}


@pytest.mark.parametrize("name", scenarios())
def test_in_two_processes(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes.get(name, "was not begun") == [""] * RANKS, "\n".join(outcomes.get(name, []))
