"""What nodes of autograd's graph carry, compared with what they do."""

import warnings
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from autogram._capture.autograd.graph import kind_of_node, nodes_behind
from autogram._capture.samples.carrying import Edge, carried, moves_nothing
from tests.hunt.samples import OpInfo, operators, samples_of

# How many samples of arguments to try for each operator.
SAMPLES = 2


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors in the result of an operator."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_of(item)


def results(operator: OpInfo) -> Iterator[Tensor]:
    """Results of an operator for PyTorch's own samples of its arguments, that have a graph."""
    for sample in samples_of(operator, SAMPLES):
        try:
            output = operator.op(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, ValueError, TypeError):
            continue  # PyTorch does not carry it out
        yield from (x for x in tensors_of(output) if x.requires_grad)


def wrong_claims(output: Tensor) -> list[str]:
    """The dimensions that nodes behind a tensor are said to carry, and do not."""
    wrong = []
    for node in nodes_behind(output):
        metadata, operation = node._input_metadata, kind_of_node(type(node)).operation
        shape = tuple(metadata[0].shape) if len(metadata) == 1 else ()
        for place, (following, number) in enumerate(node.next_functions):
            if following is None or not shape or metadata[0].dtype != torch.float64:
                continue
            given = tuple(following._input_metadata[number].shape)
            edge = Edge(node, place, shape, given)
            wrong += [
                f"{operation}: {dim} of {shape} to {place}, {given}"
                for dim in carried(edge)
                if 1 < shape[dim] < 8 and meet(node, place, shape, dim)
            ]
            if moves_nothing(edge) and leaves_its_place(node, place, shape):
                wrong.append(f"{operation}: {shape} is said to stay")
    return wrong


def gradient(node: Any, place: int, cotangent: Tensor) -> Tensor:
    """What a node makes of a cotangent, for one of its inputs."""
    with torch.no_grad():
        found = node(cotangent)
    found = found[place] if isinstance(found, tuple) else found
    return torch.zeros(()) if found is None else found.nan_to_num(0.0)  # infinities in samples


def meet(node: Any, place: int, shape: tuple[int, ...], dim: int) -> bool:
    """Whether an element of an input has its cotangent from several places along a dimension."""
    dense = torch.rand(shape) + 0.5
    supports = []
    for index in range(shape[dim]):
        cotangent = torch.zeros(shape)
        cotangent.select(dim, index).copy_(dense.select(dim, index))
        supports.append(gradient(node, place, cotangent) != 0)
    return bool((torch.stack(supports).sum(0) > 1).any())


def leaves_its_place(node: Any, place: int, shape: tuple[int, ...]) -> bool:
    """Whether a cotangent in one half of the places reaches the other half."""
    mask = (torch.arange(prod(shape)) % 2).bool().view(shape)
    found = gradient(node, place, torch.where(mask, 1.0, 0.0))
    return found.shape == mask.shape and bool((found[~mask] != 0).any())


@pytest.mark.slow
def test_no_node_of_an_operator_lets_samples_meet_where_it_is_said_to_carry_them() -> None:
    """For each of PyTorch's operators, every node behind the results for its sample inputs."""
    seen: set[str] = set()
    wrong: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators():
            for output in results(operator):
                seen.update(kind_of_node(type(node)).operation for node in nodes_behind(output))
                wrong.update(wrong_claims(output))
    assert len(seen) > 250
    assert sorted(wrong) == []
