"""PyTorch's own sample inputs of its operators."""

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

# The import takes seconds, and would forbid to set flags of backends from then on.
with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags"):
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["OpInfo", "SampleInput", "name_of", "operators", "samples_of", "set_rng_seed"]

DTYPE = torch.float64


def operators(dtype: torch.dtype = DTYPE) -> Iterator[OpInfo]:
    """Those with a gradient in a dtype."""
    for operator in op_db:
        if operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu"):
            yield operator


def name_of(operator: OpInfo) -> str:
    """The name of an operator, with that of its variant."""
    return ".".join(part for part in (operator.name, operator.variant_test_name) if part)


def samples_of(
    operator: OpInfo, most: int, dtype: torch.dtype = DTYPE, **options: Any
) -> list[SampleInput]:
    """Its first samples, with inputs that require a gradient."""
    samples: list[Any] = []
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=True, **options):
        samples.append(sample)
        if len(samples) == most:
            break
    return samples
