"""Projections: the same map for rows, for factors and for lookups."""

import pytest
import torch

from autogram._blocks import Block, Lookup, Projection, Region
from tests.unit.checks import assert_close_to_reference

CPU = torch.device("cpu")
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("equation", "shapes", "parameter"),
    [
        ("kbo,bi->kboi", [(2, 3, 7), (3, 5)], (7, 5)),
        ("kbto,bti->kboi", [(2, 3, 4, 7), (3, 4, 5)], (7, 5)),
        ("kbto,btiyz->kboiyz", [(2, 3, 4, 7), (3, 4, 5, 2, 3)], (7, 5, 2, 3)),
        ("kbto,btyiz->kboiyz", [(2, 3, 4, 7), (3, 4, 2, 5, 3)], (7, 5, 2, 3)),
        ("kbto,ti,bt->kboi", [(2, 3, 4, 7), (4, 5), (3, 4)], (7, 5)),
        ("kbti,bto->kboi", [(2, 3, 4, 5), (3, 4, 7)], (7, 5)),
    ],
)
def test_factors_and_rows(equation: str, shapes: list[tuple[int, ...]], parameter) -> None:
    block = Block(equation, tuple(torch.randn(shape) for shape in shapes))
    projection = Projection(Region.contiguous(parameter), 3, 17, CPU)
    assert projection.is_outer(block)
    rows = torch.einsum(equation, *block.operands)
    expected = projection.of_rows(rows.flatten(2).flatten(0, 1)).view(2, 3, 3)
    assert_close_to_reference(projection.of_factors(block, torch.float64), expected)


@pytest.mark.parametrize(
    ("equation", "shapes", "parameter"),
    [
        ("kbo->kbo", [(2, 3, 7)], (7,)),
        ("kboi->kboi", [(2, 3, 7, 5)], (7, 5)),
        ("kbto,bto->kbo", [(2, 3, 4, 7), (3, 4, 7)], (7,)),
        ("kbto,btoi->kboi", [(2, 3, 4, 7), (3, 4, 7, 5)], (7, 5)),
        ("kbtoi,bt->kboi", [(2, 3, 4, 7, 5), (3, 4)], (7, 5)),
        ("kbti,btok->kboik", [(2, 3, 4, 5), (3, 4, 7, 2)], (7, 5, 2)),
    ],
)
def test_what_is_no_outer_product_has_rows(equation: str, shapes, parameter) -> None:
    block = Block(equation, tuple(torch.randn(shape) for shape in shapes))
    projection = Projection(Region.contiguous(parameter), 1, 17, CPU)
    assert not projection.is_outer(block)
    assert not projection.suits(block)


def test_factors_of_many_positions_have_rows() -> None:
    """To project them would be more work: 2 d numbers for each vector of each factor."""
    region = Region.contiguous((7, 5))
    for positions, suits in ((1, True), (2, False)):
        shapes = (1, 3, positions, 7), (3, positions, 5)
        block = Block("kbto,bti->kboi", tuple(torch.randn(shape) for shape in shapes))
        assert Projection(region, 8, 17, CPU).suits(block) is suits


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("is_stored_by_columns", [False, True])
def test_lookups_and_rows(order: tuple[int, int], is_stored_by_columns: bool) -> None:
    """Reads by rows and by columns, of a parameter that is stored by rows or by columns."""
    table = torch.zeros(4, 6).T if is_stored_by_columns else torch.zeros(6, 4)
    read, region = table.permute(order), Region.of(table)
    indices = torch.tensor([[0, 2, 2], [3, 1, 0]])
    lookup = Lookup(indices, torch.randn(3, 2, 3, read.shape[1]))
    lookup = lookup.on(Region.of(read), region.canonical)
    assert isinstance(lookup, Lookup)
    projection = Projection(region, 5, 17, CPU)
    block = lookup.block(region.canonical.shape)
    rows = torch.einsum(block.equation, *block.operands).flatten(2)
    expected = projection.of_rows(rows.flatten(0, 1)).view(3, 2, 5)
    assert_close_to_reference(projection.of_lookup(lookup, torch.float64), expected)


def test_seeds() -> None:
    """The map follows from the seed, and is another for another."""
    rows = torch.eye(12)
    region = Region.contiguous((3, 4))
    one, same, other = (Projection(region, 8, seed, CPU).of_rows(rows) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one.abs().sum(1), torch.ones(12))  # each element goes to one place
