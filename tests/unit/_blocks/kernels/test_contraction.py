"""Einsums along paths."""

import pytest
import torch

from autogram._blocks.kernels.contraction import Shapes, find_path
from tests.unit._blocks.blocks import SIZES, kernels
from tests.unit.checks import assert_close_to_reference

EQUATIONS = [
    "bt->bt",
    "bt->tb",
    "bto->b",
    "bto,bti->boi",
    "bto,bto->bo",
    "bto,bto->b",
    "bts,bts->",
    "bt,o->bto",
    "bto,t->bo",
    "to,bto->ob",
    "bto,b->tob",
    "bto,bti,btj->boij",
    "bto,bti,sjo,sji->bs",
    "kbto,bti,qpso,psi->kbqp",
    "b,b,b->b",
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_result_is_that_of_torch(equation: str) -> None:
    inputs = equation.split("->")[0].split(",")
    operands = [torch.randn([SIZES[label] for label in labels]) for labels in inputs]
    assert_close_to_reference(
        kernels().einsum(equation, operands), torch.einsum(equation, *operands)
    )


def test_dimensions_of_size_one() -> None:
    operands = [torch.randn(1, 4, 1), torch.randn(1, 4, 3)]
    expected = torch.einsum("bto,bti->boi", *operands)
    assert_close_to_reference(kernels().einsum("bto,bti->boi", operands), expected)


@pytest.mark.parametrize("equation", ["kbt,bti->kbi", "kbt,ti->bki", "kbt,bti->ikb"])
def test_indices_of_equal_sizes(equation: str) -> None:
    """A result in another order may have the shape of the product."""
    inputs = equation.split("->")[0].split(",")
    operands = [torch.randn([3] * len(labels)) for labels in inputs]
    found = kernels().einsum(equation, operands)
    assert_close_to_reference(found, torch.einsum(equation, *operands))


def test_cost_of_a_matrix_product() -> None:
    path = find_path("to,ti->oi", ((5, 2), (5, 3)))
    assert len(path.steps) == 1
    assert path.multiplications == 5 * 2 * 3
    assert path.largest == 2 * 3


def test_largest_counts_a_product_before_its_sum() -> None:
    """No matrix product is to be had, so the elementwise product is formed."""
    assert find_path("bto,bto->b", ((2, 50, 60), (2, 50, 60))).largest == 2 * 50 * 60


def test_cheapest_order() -> None:
    """A chain is contracted from its narrow end."""
    shapes = ((100, 1), (1, 100), (100, 1))
    assert find_path("ab,bc,cd->ad", shapes).largest == 100


def test_paths_are_found_once() -> None:
    shapes = ((5, 2), (5, 3))
    assert find_path("to,ti->oi", shapes) is find_path("to,ti->oi", shapes)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("kbct,bct->kbc", ((1, 6, 200, 500), (6, 200, 500))),  # parts of the samples
        ("kbct,bct->kct", ((2, 3, 200, 500), (3, 200, 500))),  # of a sum over them
        ("bct,ct->bc", ((6, 200, 500), (200, 500))),  # one side is broadcast
        ("tbc,tbc->c", ((500, 2, 300), (500, 2, 300))),
        ("ta,ta->", ((500, 600), (500, 600))),
    ],
)
def test_a_large_product_is_summed_in_parts(equation: str, shapes: Shapes) -> None:
    operands = [torch.randn(shape) for shape in shapes]
    assert_close_to_reference(
        kernels().einsum(equation, operands), torch.einsum(equation, *operands)
    )


def test_operands_are_copied_where_they_do_not_lie_in_order() -> None:
    """Overlapping windows, and one that no view can flatten; the operands stay as they were."""
    signal = torch.randn(3, 40)
    windows, other = signal.unfold(1, 5, 2), torch.randn(5, 18, 3).permute(2, 1, 0)
    before = windows.clone(), other.clone()
    expected = torch.einsum("bti,btj->bij", windows, other)
    assert_close_to_reference(kernels().einsum("bti,btj->bij", (windows, other)), expected)
    assert torch.equal(windows, before[0])
    assert torch.equal(other, before[1])
