"""Kernels: what contractions are made of, one object for each kind of device."""

from autogram._blocks.kernels.base import Kernels, Limit
from autogram._blocks.kernels.cpu import CpuKernels
from autogram._blocks.kernels.cuda import CudaKernels
from autogram._blocks.kernels.devices import Devices
from autogram._blocks.kernels.traced import TracedCudaKernels
from autogram._blocks.kernels.workspace import Arena, Memory
