"""Blocks built by hand, and what they are in dense form."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autogram._blocks import Block, Kernels, Limit
from autogram._blocks.kernels import CpuKernels


class Operators(TorchDispatchMode):
    """Lists the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


SIZES = dict(zip("kbtsoijqp", (2, 3, 5, 4, 6, 7, 3, 2, 4), strict=True))

# Every form of block that a rule makes.
EQUATIONS = [
    pytest.param("kbo,bi->kboi", id="linear"),
    pytest.param("kbto,bti->kboi", id="linear with positions"),
    pytest.param("kbtso,btsi->kboi", id="linear with two dimensions of positions"),
    pytest.param("ktbo,tbi->kboi", id="linear, sequence first"),
    pytest.param("kbto->kbo", id="bias"),
    pytest.param("kbo->kbo", id="addend"),
    pytest.param("kbto->kb", id="scalar"),
    pytest.param("kbto,bto->kbo", id="scale"),
    pytest.param("kbo,o->kbo", id="scale by a constant"),
    pytest.param("kbqot,bqipt->kbqoip", id="grouped convolution"),
    pytest.param("kbto,bti,btj->kboij", id="bilinear"),
    pytest.param("kboij->kboij", id="rows"),
    pytest.param("kboji->kboij", id="rows, in another order"),
    pytest.param("bkoi->kboi", id="rows, samples first"),
    pytest.param("kbto,tj->kboj", id="factor without samples"),
]


def kernels(limit: int = 2**40) -> Kernels:
    """Those of the CPU, with a number of elements that one result may have."""
    return CpuKernels(Limit(limit))


def make_block(equation: str) -> Block:
    """A block of random operands."""
    inputs = equation.split("->")[0].split(",")
    return Block(equation, tuple(torch.randn([SIZES[x] for x in labels]) for labels in inputs))


def dense(block: Block) -> Tensor:
    """The rows of a block, ``(k, b, *tensor)``."""
    return torch.einsum(block.equation, *block.operands)


def gramian_of(*rows: Tensor) -> Tensor:
    """The inner products of the sum of some rows, ``(k, b, k, b)``."""
    total = sum(rows)
    k, b = total.shape[:2]
    flat = total.reshape(k * b, math.prod(total.shape[2:]))
    return (flat @ flat.T).view(k, b, k, b)
