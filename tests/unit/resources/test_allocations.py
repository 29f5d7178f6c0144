"""Memory that runs out at one allocation of a step, whichever it is: right, or an error.

An error leaves `.grad` as it was. In either case, the next step is right.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine, MemoryLimitError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.faults import SHORTAGES, Fault, allocates, count_allocations, weighting

SAMPLES = 4
AMPLE = 2**62  # a limit so far beyond what is needed that it stays so in `FAULTS` shortages
FAULTS = 8


class Convolutions(nn.Sequential):
    """Convolutions, a normalisation and a head."""

    def __init__(self) -> None:
        first, last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, stride=2)
        norm, head = nn.GroupNorm(2, 4), nn.Linear(12, 2)
        super().__init__(first, norm, nn.Tanh(), last, nn.Tanh(), nn.Flatten(), head)


class Experts(nn.Module):
    """A mixture of experts: values decide which tokens each of them gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 2)
        self.experts = nn.ModuleList([mlp(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).tanh().flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        total = tokens
        for number, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == number)
            if len(at):
                found = expert(tokens[at]) * shares[at, slot].unsqueeze(-1)
                total = total.index_add(0, at, found)
        return self.last(total.unflatten(0, (len(x), -1))).mean(1)


class Language(nn.Module):
    """A language model with one layer of attention, whose embedding is tied to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(11, 6), nn.Parameter(batch(5, 6) / 3)
        self.norm, self.queries, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places
        q, k, v = self.queries(self.norm(x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return F.linear(x, self.embedding.weight)


class Recurrent(nn.Module):
    """An LSTM, and a head for its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Loop(nn.Module):
    """Layers that are called for one sample after the other, which differ in length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kernel, self.last = nn.Linear(3, 4), nn.Conv1d(1, 2, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for number, sample in enumerate(x):
            hidden = self.first(sample[: 2 + number % 2]).tanh()
            hidden = self.kernel(hidden.unsqueeze(1)).flatten(1)[:, :4].tanh()
            found.append(self.last(hidden).sum(0))
        return torch.stack(found)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "layers": (mlp, lambda: batch(SAMPLES, 3)),
    "convolutions": (Convolutions, lambda: batch(SAMPLES, 2, 5, 5)),
    "experts": (Experts, lambda: batch(SAMPLES, 4, 3)),
    "language": (Language, lambda: torch.randint(11, (SAMPLES, 5))),
    "recurrent": (Recurrent, lambda: batch(SAMPLES, 4, 3)),
    "loop": (Loop, lambda: batch(SAMPLES, 3, 3)),
}
"""What makes each model, and a batch for it."""

Shortage = AbstractContextManager[object]


def fused(engine: Engine, losses: list[Tensor], shortage: Shortage) -> Tensor:
    with shortage:
        return engine.backward(losses[0], weighting, return_gramian=True)[1]


def in_two_passes(engine: Engine, losses: list[Tensor], shortage: Shortage) -> Tensor:
    with shortage:
        gramian = engine.compute_gramian(losses[0])
    losses[0].backward(weighting(gramian))
    return gramian


def accumulated(engine: Engine, losses: list[Tensor], shortage: Shortage) -> Tensor:
    with shortage, engine.accumulate(weighting) as total:
        for part in losses:
            total.add(part)
    return total.gramian


WAYS = {"fused": fused, "in two passes": in_two_passes, "accumulated": accumulated}
EACH = pytest.mark.parametrize("way", WAYS)
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


class Training:
    """Steps of one kind, whose batches come in turn and whose parameters stay as they are."""

    def __init__(self, name: str, way: str) -> None:
        make, make_batch = MODELS[name]
        self.model, self.outside = make(), nn.Parameter(torch.tensor(1.2))
        self.way, self.parameters = WAYS[way], [*self.model.parameters(), self.outside]
        parts = 2 if way == "accumulated" else 1
        self.batches = [[make_batch() for _ in range(parts)] for _ in range(2)]
        self.expected: list[tuple[Tensor, list[Tensor]]] = []
        twin, outside = copy.deepcopy((self.model, self.outside))
        for inputs in self.batches:
            losses = torch.cat([per_sample(twin(x)) * outside for x in inputs])
            jacobian = reference_jacobian(losses, [*twin.parameters()])
            gramian = jacobian @ jacobian.T
            leaves = [*twin.parameters(), outside]
            weights = weighting(gramian)
            gradients = [*torch.autograd.grad(losses, leaves, weights, retain_graph=True)]
            if way != "in two passes":  # where the sum of the losses counts outside of J
                gradients[-1:] = torch.autograd.grad(losses.sum(), [outside])
            self.expected.append((gramian, gradients))
        self.restart()

    def restart(self) -> None:
        """A new engine, which remembers nothing."""
        self.engine = Engine(self.model, memory_limit_bytes=AMPLE)
        self.steps = 0

    def step(self, shortage: Shortage | None = None) -> None:
        """A step, which is right; or raises an error that leaves `.grad` as it was."""
        number, self.steps = self.steps % 2, self.steps + 1
        before = [None if i % 2 else torch.ones_like(p) for i, p in enumerate(self.parameters)]
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        losses = [per_sample(self.model(x)) * self.outside for x in self.batches[number]]
        gramian, gradients = self.expected[number]
        try:
            found = self.way(self.engine, losses, shortage or nullcontext())
        except RuntimeError:
            for parameter, old in zip(self.parameters, before, strict=True):
                assert (parameter.grad is None) == (old is None)
                assert old is None or torch.equal(parameter.grad, old)
            raise
        assert_close_to_reference(found, gramian)
        for parameter, old, new in zip(self.parameters, before, gradients, strict=True):
            assert_close_to_reference(parameter.grad, new if old is None else old + new)

    def assert_survives(self, skipped: int, times: int, device: str = "CUDA") -> None:
        """Assert that a shortage of memory is survived, and that the step behind it is right."""
        shortage = Fault(SHORTAGES[device], skipped, times, allocates)
        try:
            self.step(shortage)
        except MemoryLimitError:
            pass
        except RuntimeError as error:  # where the engine has no other way, as in the weighting
            assert str(error) == str(SHORTAGES[device]())  # noqa: PT017 - a step may be right
        self.step()


def spread_over(count: int, most: int) -> Iterable[int]:
    """Some numbers below a count, evenly."""
    return sorted({i * count // most for i in range(most)})


@EACH
@EACH_MODEL
def test_at_some_allocations_of_a_first_step(name: str, way: str) -> None:
    """The samples are searched for, and the result is checked."""
    training = Training(name, way)
    training.step()
    training.restart()
    count = count_allocations(training.step)
    for times, skipped in enumerate(spread_over(count, 3), 1):
        training.restart()
        training.assert_survives(skipped, times)


@EACH
@EACH_MODEL
def test_at_some_allocations_of_a_later_step(name: str, way: str) -> None:
    """What is remembered is used."""
    at_allocations_of_a_later_step(Training(name, way), 8)


@pytest.mark.slow
@pytest.mark.nightly
@EACH
@EACH_MODEL
def test_at_each_allocation_of_a_later_step(name: str, way: str) -> None:
    at_allocations_of_a_later_step(Training(name, way))


def at_allocations_of_a_later_step(training: Training, most: int | None = None) -> None:
    """Assert that shortages at some allocations are survived, or at all; now and then two of them.

    By turns, memory of either kind of device runs out.
    """
    for _ in range(4):
        training.step()
    count = count_allocations(training.step)
    for number, skipped in enumerate(spread_over(count, most or count)):
        if number % FAULTS == 0:
            training.restart()
            for _ in range(2):
                training.step()
        training.assert_survives(skipped, 1 + (number % 3 == 0), [*SHORTAGES][number % 2])
