"""Rules by node compared with their nodes, over PyTorch's sample inputs of its operators."""

import warnings
from collections import defaultdict
from collections.abc import Hashable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from autogram.rules._nodes import registered_operations
from tests.hunt.samples import operators, samples_of, set_rng_seed
from tests.unit.rules._nodes.comparing import compared, inputs_of, nodes_behind, operation_of

MOST_SAMPLES = 12
FEWEST = 4  # comparisons of one kind of node
KNOWN = set(registered_operations())
# Kinds that have tests of their own alone: no operator makes them on a CPU in float64, or its
# samples take long, or have sizes that the rule does not know.
ELSEWHERE = {
    "Cdist",
    "ConvolutionOverrideable",
    "CudnnBatchNorm",
    "CudnnRnn",
    "EuclideanDist",
    "FusedRmsNorm",
    "GridSampler2D",
    "GridSampler3D",
    "GroupedMm",
    "Linear",
    "MkldnnRnnLayer",
    "MiopenBatchNorm",
}
OF_COMPLEX = """
    Add Addbmm Addcdiv Addcmul Addmm Addmv Addr Baddbmm Bmm Convolution Div Dot Expand Lerp
    MaskedFill Mm Mul Mv Pow Repeat Rsub Sub Where
"""
MET = KNOWN - ELSEWHERE

pytestmark = pytest.mark.cpu


def form(node: Any, position: int, of_input: Any) -> Hashable:
    """Equal for inputs of which one comparison says as much as the next."""
    saved = [getattr(node, field) for field in dir(type(node)) if field.startswith("_saved_")]
    shapes = [tuple(x.shape) for x in saved if isinstance(x, Tensor)]
    numbers = [x for x in saved if isinstance(x, (int, float, complex, tuple))]
    result, dtypes = node._input_metadata[0], (node._input_metadata[0].dtype, of_input.dtype)
    key = type(node), position, tuple(result.shape), tuple(of_input.shape), dtypes, *shapes
    return key, repr(numbers)


@cache
def comparisons(dtype: torch.dtype) -> dict[str, dict[int, int]]:
    """How many comparisons there were of each input of each kind of node."""
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators(dtype):
            set_rng_seed(0)  # a seed for each sample would take longer than all else
            for sample in samples_of(operator, MOST_SAMPLES, dtype, set_seed=False):
                for node in nodes_behind(operator(sample.input, *sample.args, **sample.kwargs)):
                    operation = operation_of(node)
                    for position, of_input in inputs_of(node) if operation in MET else ():
                        key = form(node, position, of_input)
                        if key not in seen:
                            seen.add(key)
                            counts[operation][position] += compared(node, position)
    return counts


def assert_was_compared(operation: str, dtype: torch.dtype) -> None:
    """Assert that the nodes of an operation were met, and saved what their rule asks for."""
    kinds = [f"{operation}Backward{number}" for number in range(3)]
    known = [getattr(torch._C._functions, kind, None) for kind in (operation, *kinds)]
    assert any(known), f"PyTorch {torch.__version__} has no nodes of `{operation}`."
    fields = [field for kind in known for field in dir(kind) if field.startswith("_saved_")]
    counts = comparisons(dtype)[operation]
    assert sum(counts.values()) >= FEWEST, (
        f"Nodes of `{operation}` of PyTorch {torch.__version__} save {fields}. Comparisons by the "
        f"number of the input: {dict(counts)}."
    )


@pytest.mark.parametrize("operation", sorted(MET))
def test_rows_are_those_of_the_node(operation: str) -> None:
    """For one sample, and for samples along each dimension that the formula allows."""
    assert_was_compared(operation, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OF_COMPLEX.split())
def test_rows_of_complex_tensors_are_those_of_the_node(operation: str) -> None:
    """The last dimension of rows of a complex tensor has its real and its imaginary part."""
    assert_was_compared(operation, torch.complex128)
