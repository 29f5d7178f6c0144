"""What Python costs where a device waits for it: microseconds of a call, a use, and its cotangent.

And how many objects Python's garbage collector knows of. The more there are that live for a while,
the more often it walks through all objects of the process.

Run as ``python -m tests.speed.host``. Tensors are tiny, so that their arithmetic takes no time. A
model with many equal steps is compared with one with few of them: what the further steps cost with
an engine, less what they cost without. Times are those of the processor, and the least of many, so
that other processes count as little as possible.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time

import torch
from torch import Tensor, nn

from autogram import Engine

_FEW, _MANY = 8, 72
_WIDTH, _SAMPLES = 4, 2


@dataclass(frozen=True)
class HostTime:
    """Microseconds that an engine adds on the host.

    Attributes:
        call: To a torch call without parameters.
        use: To a call that reads a weight and a bias, its tap included.
        part: To the backward pass through such a call, for its part of the Gramian.
    """

    call: float
    use: float
    part: float


class Calls(nn.Module):
    """A layer, and many calls that read no parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self._count = count

    def forward(self, x: Tensor) -> Tensor:
        """Maps samples to samples."""
        x = self.layer(x)
        for _ in range(self._count):
            x = torch.neg(x)
        return x


class Uses(nn.Module):
    """Many linear layers, called as functions."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Maps samples to samples."""
        for layer in self.layers:
            x = nn.functional.linear(x, layer.weight, layer.bias)
        return x


def measure(repeats: int = 100) -> HostTime:
    """Measures all steps in turns."""
    steps: dict[tuple[str, int], Callable[[], object]] = {}
    for count in (_FEW, _MANY):
        for make in (Calls, Uses):
            for name, step in _steps(make(count), make(count)).items():
                steps[f"{make.__name__} {name}", count] = step
    seconds = dict.fromkeys(steps, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for key, step in steps.items():
                start = thread_time()
                step()
                seconds[key] = min(seconds[key], thread_time() - start)
    finally:
        gc.enable()

    def added(hooked: str, plain: str) -> float:
        each = [seconds[hooked, count] - seconds[plain, count] for count in (_FEW, _MANY)]
        return (each[1] - each[0]) / (_MANY - _FEW) * 1e6

    return HostTime(
        call=added("Calls forward", "Calls plain"),
        use=added("Uses forward", "Uses plain"),
        part=added("Uses gramian", "Uses backward"),
    )


def _steps(plain: nn.Module, hooked: nn.Module) -> dict[str, Callable[[], object]]:
    """What is timed of two equal models, of which one gets an engine."""
    engine = Engine(hooked, verify="never")
    x = torch.randn(_SAMPLES, _WIDTH, requires_grad=True)
    for _ in range(2):  # the samples are searched for, then their places are remembered
        engine.compute_gramian(_losses(hooked, x))
    total, losses = _losses(plain, x).sum(), _losses(hooked, x)
    return {
        "plain": lambda: plain(x),
        "forward": lambda: hooked(x),
        "backward": lambda: torch.autograd.grad(total, [x], retain_graph=True),
        "gramian": lambda: engine.compute_gramian(losses),
    }


def count_objects() -> tuple[float, float]:
    """How many objects of a use the collector knows: behind the forward pass, and in a fused step.

    There, when its Gramian is known.
    """
    found: dict[int, tuple[int, int]] = {}
    for count in (_FEW, _MANY):
        model = Uses(count)
        engine = Engine(model, verify="never")
        x = torch.randn(_SAMPLES, _WIDTH)
        ends: list[int] = []

        def weigh(gramian: Tensor, ends: list[int] = ends) -> Tensor:
            ends.append(len(gc.get_objects()))
            return gramian.new_ones(_SAMPLES)

        for _ in range(3):
            model.zero_grad()
            gc.collect()
            gc.disable()
            try:
                start = len(gc.get_objects())
                losses = _losses(model, x)
                ends.append(len(gc.get_objects()))
                engine.backward(losses, weigh)
                del losses
            finally:
                gc.enable()
        found[count] = ends[-2] - start, ends[-1] - start
    (few, few_then), (many, many_then) = found[_FEW], found[_MANY]
    return (many - few) / (_MANY - _FEW), (many_then - few_then) / (_MANY - _FEW)


def _losses(model: nn.Module, x: Tensor) -> Tensor:
    """One for each sample."""
    return model(x).square().sum(1)


def main() -> None:
    """Prints what was measured."""
    torch.set_num_threads(1)
    found = measure()
    print(f"call {found.call:.1f} us, use {found.use:.1f} us, part of G {found.part:.1f} us")
    print("objects of a use: {:.0f} behind the forward pass, {:.0f} then".format(*count_objects()))


if __name__ == "__main__":
    main()
