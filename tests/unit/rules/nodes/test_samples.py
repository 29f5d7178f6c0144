"""Rules by node, over the sample inputs of PyTorch's operators."""

import warnings
from collections import Counter

import pytest
import torch

from autogram import UnsupportedError
from autogram.rules.nodes import registered_operations
from tests.hunt.samples import operators, samples_of
from tests.unit.rules.nodes.comparing import compared, inputs_of, nodes_behind, operation_of

MOST_SAMPLES = 40
# Kinds of node that no operator makes on this kind of device, or only with other dtypes.
ELSEWHERE = {
    "ConvolutionOverrideable": "other devices",
    "CudnnBatchNorm": "a GPU",
    "FusedRmsNorm": "a GPU",
    "GroupedMm": "half precision",
    "Linear": "other devices",
    "MiopenBatchNorm": "a GPU",
}


@pytest.fixture(scope="module")
def comparisons() -> Counter[tuple[str, int]]:
    """How many comparisons there were of each input of each kind of node."""
    counts: Counter[tuple[str, int]] = Counter()
    for operator in operators():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in samples_of(operator, MOST_SAMPLES):
                output = operator(sample.input, *sample.args, **sample.kwargs)
                for node in nodes_behind(output):
                    for position, _ in inputs_of(node):
                        counts[operation_of(node), position] += compared(node, position)
    return counts


@pytest.mark.parametrize("operation", [x for x in registered_operations() if x not in ELSEWHERE])
def test_each_rule_gives_the_rows_of_its_node(operation, comparisons) -> None:
    """For one sample, and for samples along each dimension that the formula allows."""
    print({p: n for (o, p), n in comparisons.items() if o == operation})
    assert sum(n for (o, p), n in comparisons.items() if o == operation) >= 5
