"""Faults of PyTorch's operators, to see what an engine does then."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SHORTAGES: dict[str, Callable[[], RuntimeError]] = {
    "CUDA": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    "CPU": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
}
"""How PyTorch says that memory ran out, by the kind of device."""

_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.mul, torch.ops.aten.stack}


def is_product(function: Any) -> bool:
    """Whether an operator computes products, or prepares them."""
    return function.overloadpacket in _PRODUCTS


@cache
def allocates(function: Any) -> bool:
    """Whether an operator has a result with memory of its own, which it asks an allocator for."""
    results = function._schema.returns
    return any("Tensor" in str(x.type) and x.alias_info is None for x in results)


class Fault(TorchDispatchMode):
    """Makes operators of one kind fail, or only counts them.

    Args:
        make_error: Makes what they raise.
        skipped: How many of them go well before.
        times: How many of them fail.
        fails: Whether an operator is of the kind.
    """

    def __init__(
        self,
        make_error: Callable[[], BaseException],
        skipped: int = 0,
        times: float = 1,
        fails: Callable[[Any], bool] = is_product,
    ) -> None:
        super().__init__()
        self.make_error, self.skipped, self.times, self.fails = make_error, skipped, times, fails
        self.calls = self.failures = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if self.fails(function):
            self.calls += 1
            if self.calls > self.skipped and self.failures < self.times:
                self.failures += 1
                raise self.make_error()
        return function(*args, **(kwargs or {}))


def count_allocations(call: Callable[[], Any]) -> int:
    """How many operators of a call allocate memory."""
    with Fault(SHORTAGES["CPU"], times=0, fails=allocates) as counted:
        call()
    assert counted.calls > 0
    return counted.calls


def spread(prepare: Callable[[], Callable[[], Any]], most: int) -> Iterator[int]:
    """Numbers of products of a call after which one may fail, from the first one to the last.

    Args:
        prepare: Gives the call, with a new engine: what one has seen, it may not compute again.
        most: How many numbers.
    """
    for _ in range(2):  # what is kept for all engines is there the second time
        call = prepare()
        with Fault(SHORTAGES["CPU"], times=0) as counted:
            call()
    assert counted.calls > 0
    yield from sorted({round(i * (counted.calls - 1) / (most - 1)) for i in range(most)})


def weighting(gramian: Tensor) -> Tensor:
    """Some weights, without a product that could fail."""
    return (gramian @ torch.arange(1.0, len(gramian) + 1).sin()).detach()
