"""PyTorch's own sample inputs of its operators."""

import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch

try:
    import expecttest  # noqa: F401
except ImportError:  # PyTorch's module asks for it, and nothing here uses it
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["OpInfo", "SampleInput", "name_of", "operators", "samples_of"]

DTYPE = torch.float64


def operators() -> Iterator[OpInfo]:
    """Those with a gradient in float64."""
    for operator in op_db:
        if operator.supports_autograd and DTYPE in operator.supported_backward_dtypes("cpu"):
            yield operator


def name_of(operator: OpInfo) -> str:
    """The name of an operator, with that of its variant."""
    return ".".join(part for part in (operator.name, operator.variant_test_name) if part)


def samples_of(operator: OpInfo, most: int) -> list[SampleInput]:
    """Its first samples, with inputs that require a gradient."""
    samples: list[Any] = []
    for sample in operator.sample_inputs("cpu", DTYPE, requires_grad=True):
        samples.append(sample)
        if len(samples) == most:
            break
    return samples
