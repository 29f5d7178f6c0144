"""What nodes of autograd's graph carry, compared with what they do."""

import warnings
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Folded, candidates
from autogram._capture.autograd.graph import kind_of_node, nodes_behind
from autogram._capture.autograd.slices import CHANGE
from autogram._capture.forward.calls import kind_of, run_and_note
from autogram._capture.samples.proofs.carrying import (
    Crossing,
    carried,
    is_elementwise,
)
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
            edge = Crossing(node, place, shape, given)
            wrong += [
                f"{operation}: {dim} of {shape} to {place}, {given}"
                for dim in carried(edge)
                if 1 < shape[dim] < 8 and meet(node, place, shape, dim)
            ]
            is_kept = shape == given and is_elementwise(node)
            if is_kept and leaves_its_place(node, place, shape):
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


def changed_slices() -> Iterator[Tensor]:
    """Tensors of which each operator that works element by element has changed a slice."""
    for operator in operators():
        method = operator.get_inplace()
        if method is None or not kind_of(method).changes_slices:
            continue
        for sample in samples_of(operator, SAMPLES):
            whole = torch.rand(3, *sample.input.shape, 2) * torch.ones(2, requires_grad=True)
            for changed in (whole, whole.detach()):
                try:
                    run_and_note(kind_of(method), (changed[1, ..., 0], *sample.args), sample.kwargs)
                    if changed.requires_grad:
                        changed.grad_fn(torch.zeros_like(changed))
                except (RuntimeError, ValueError, TypeError):
                    continue  # PyTorch does not carry it out, or does not know a derivative
                if changed.requires_grad:
                    yield changed


@pytest.mark.cpu
def test_slices_that_were_changed_keep_samples_apart() -> None:
    claims = {"whole": 0, "other": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for whole in changed_slices():
            node = whole.grad_fn
            assert kind_of_node(type(node)).operation == CHANGE
            assert wrong_claims(whole) == []
            for place, (following, number) in enumerate(node.next_functions):
                if following is not None:
                    given = tuple(following._input_metadata[number].shape)
                    found = carried(Crossing(node, place, tuple(whole.shape), given))
                    claims["other" if place else "whole"] += len(found)
    assert claims["whole"] > 100
    assert claims["other"] > 15


CARRIED: dict[str, Callable[[Tensor], Tensor]] = {
    "log1p": torch.log1p,
    "deg2rad": torch.deg2rad,
    "complex": lambda x: torch.complex(x, x),
    "polar": lambda x: torch.polar(x.detach().abs(), x),
    "nansum": lambda x: x.nansum(1),
    "diag_embed": torch.diag_embed,
    "scatter_reduce": lambda x: torch.scatter_reduce(x, 1, (x > 0).long(), x, "amax"),
    "affine_grid": lambda x: F.affine_grid(x[:, :2], [4, 1, 5, 6], align_corners=False),
    "max_unpool2d": lambda x: F.max_unpool2d(x, torch.arange(9).view(3, 3).expand(4, 3, 3), 1),
    "cdist": lambda x: torch._euclidean_dist(x[:, 0], torch.rand(30, 3)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1).unsqueeze(2), 2),
}


@pytest.mark.parametrize("name", CARRIED)
def test_samples_in_front_are_carried(name: str) -> None:
    node: Any = CARRIED[name](torch.rand(4, 3, 3, requires_grad=True)).grad_fn
    shape = tuple(node._input_metadata[0].shape)
    for place, (following, number) in enumerate(node.next_functions):
        if following is not None:
            given = tuple(following._input_metadata[number].shape)
            assert 0 in carried(Crossing(node, place, shape, given))


@pytest.mark.parametrize(
    ("layout", "result", "given", "expected"),
    [
        (Folded(0, 1, 4, 1), (4, 6), (24,), True),
        (Folded(0, 1, 4, 6), (24,), (4, 6), True),
        (Folded(0, 6, 4, 1), (24,), (6, 4), True),
        (Folded(0, 1, 4, 6), (24,), (4, 2, 3), True),
        (Folded(0, 1, 4, 6), (24,), (2, 12), False),
        (Folded(0, 1, 4, 6), (24,), (6, 4), False),
        (Folded(0, 1, 4, 1), (4, 6), (6, 4), False),
        (Folded(0, 1, 4, 1), (4, 6), (8, 3), True),
        (Folded(1, 1, 4, 1), (6, 4), (3, 2, 4), True),
        (Folded(1, 1, 4, 1), (6, 4), (24,), True),
        (Folded(1, 1, 4, 1), (6, 4, 1), (12, 2), False),
    ],
)
def test_views_of_regular_samples(
    layout: Folded, result: tuple[int, ...], given: tuple[int, ...], expected: bool
) -> None:
    """Compared with the samples of all elements."""
    assert (layout.reshaped(result, given) is not None) == expected
    elements = layout.owners(torch.empty(result)).expand(result).reshape(given)
    places = [
        candidate.owners(elements).expand(given) == elements
        for candidate in candidates(given, tuple(range(len(given))), layout.batch)
    ]
    assert any(bool(place.all()) for place in places) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.layer_norm(x, (5,), torch.rand(5).requires_grad_()), {0, 1}),
        (lambda x: F.layer_norm(x, (4, 5)), {0}),
        (lambda x: x.softmax(1), {0, 2}),
        (lambda x: x.log_softmax(-1), {0, 1}),
    ],
)
def test_functions_that_are_differentiated_again(
    function: Callable[[Tensor], Tensor], expected: set[int]
) -> None:
    """They carry the same dimensions to their argument, and to the cotangent of the first pass."""
    x, cotangent = (torch.rand(3, 4, 5).requires_grad_() for _ in range(2))
    (found,) = torch.autograd.grad(function(x), x, cotangent.sin(), create_graph=True)
    node = found.grad_fn
    for place, (following, number) in enumerate(node.next_functions):
        if following is not None:
            given = tuple(following._input_metadata[number].shape)
            is_of_samples = place < 2
            edge = Crossing(node, place, (3, 4, 5), given)
            assert carried(edge) == (expected if is_of_samples else set())
    for dim in expected:
        one = (torch.arange(found.shape[dim]) == 1).view(-1, *(1,) * (2 - dim))
        for gradient in torch.autograd.grad(found, (x, cotangent), one * found, retain_graph=True):
            assert not (gradient * ~one).any()
            assert gradient.any()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x[:, 1:3], {0, 1, 2}),
        (lambda x: x[1:, :, ::2], {0, 1, 2}),
        (lambda x: x.select(1, 2), {0, 1, 2}),
        (lambda x: x.diagonal(0, 1, 2), {0, 1, 2}),
        (lambda x: x[:, torch.tensor([2, 0])], {0}),
        (lambda x: F.glu(x, 1), {0, 2}),
    ],
)
def test_gradients_of_parts(function: Callable[[Tensor], Tensor], expected: set[int]) -> None:
    x = torch.rand(3, 4, 5).requires_grad_()
    cotangent = torch.rand(function(x).shape).requires_grad_()
    (found,) = torch.autograd.grad(function(x), x, cotangent, create_graph=True)
    node = found.grad_fn
    place = next(i for i, (x, _) in enumerate(node.next_functions) if x is not None)
    assert carried(Crossing(node, place, (3, 4, 5), tuple(cotangent.shape))) == expected
    assert not wrong_claims(found)
