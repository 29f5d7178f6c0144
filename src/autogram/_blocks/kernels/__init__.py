"""Kernels: the operations of contractions, with one object for each kind of device."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from autogram._blocks.kernels.base import Kernels, Limit
from autogram._blocks.kernels.cpu import CpuKernels
from autogram._blocks.kernels.cuda import CudaKernels
from autogram._blocks.kernels.traced import TracedCpuKernels, TracedCudaKernels, TracedKernels
from autogram._blocks.kernels.workspace import Arena, Memory
from autogram._blocks.programs.known import Programs


class Devices:
    """Gives the kernels for a device. Those that are traced are for a compiler."""

    def __init__(self, limit: Limit, *, is_traced: bool = False) -> None:
        self.limit = limit
        self.programs = Programs()
        own = limit, self.programs
        self._cpu = (TracedCpuKernels if is_traced else CpuKernels)(*own)
        self.cuda = (TracedCudaKernels if is_traced else CudaKernels)(*own)
        self._other = (TracedKernels if is_traced else Kernels)(*own)

    def on(self, device: torch.device | str) -> Kernels:
        kind = device if isinstance(device, str) else device.type
        if kind == "cpu":
            return self._cpu
        return self.cuda if kind == "cuda" else self._other

    def free(self) -> None:
        """Frees the memory that is kept between contractions."""
        self._cpu.workspace.free()

    def step(self) -> AbstractContextManager[Arena | None]:
        """Memory for the rows of one step; ``None`` if another step in this thread has it."""
        return self._cpu.workspace.arena.borrowed()
