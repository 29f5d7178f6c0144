"""Stacks: small columns contracted together are what they are one by one."""

import pytest
import torch
from torch import Tensor

from autogram._blocks import Block, Columns, Lookup, Region, Stacks, stack, stacked, weighted_sums
from tests.unit.checks import assert_close_to_reference

K, B = 2, 3
LIMIT = 2**40
MATRICES = [torch.zeros(4, 5) for _ in range(3)]
PARAMETERS = {
    "matrices": MATRICES,
    "transposed in memory": [torch.zeros(5, 4).T for _ in range(3)],
    "with a dimension of one": [torch.zeros(4, 1, 5) for _ in range(2)],
    "single elements": [torch.zeros(()) for _ in range(4)],
    "of several forms": [*MATRICES, torch.zeros(6), torch.zeros(6), torch.zeros(5, 4)],
    "alone": MATRICES[:1],
}


@pytest.fixture(params=PARAMETERS.values(), ids=PARAMETERS.keys())
def found(request: pytest.FixtureRequest) -> dict[Tensor, Columns]:
    """The columns of some parameters, with a block of two factors each."""
    return {p: columns_of(p) for p in request.param}


def columns_of(parameter: Tensor) -> Columns:
    """Columns with random rows, in float64."""
    columns = Columns(Region.of_parameter(parameter))
    columns.add(Region.of_parameter(parameter), block_of(parameter))
    return columns


def block_of(parameter: Tensor) -> Block:
    """Random rows as two factors."""
    letters = "acdefg"[: parameter.dim()]
    operands = torch.randn(K, B, 2, *parameter.shape).double(), torch.randn(B, 2).double()
    return Block(f"kbt{letters},bt->kb{letters}", operands)


def kept(columns: Columns) -> tuple[Tensor, ...]:
    """The factors of the only block of some columns."""
    assert columns.single is not None
    return columns.single.operands


def gramian_one_by_one(found: dict[Tensor, Columns]) -> Tensor:
    return sum(columns.gram(LIMIT) for columns in found.values())


def test_gramian(found: dict[Tensor, Columns]) -> None:
    total = sum(columns.gram(LIMIT) for columns in stacked(found.values(), LIMIT))
    assert_close_to_reference(total, gramian_one_by_one(found))


@pytest.mark.parametrize("count", [1, 2])
def test_weighted_sums(found: dict[Tensor, Columns], count: int) -> None:
    weights = torch.randn(count, K, B, dtype=torch.float64)
    expected = {p: columns.weighted_sum(weights, LIMIT) for p, columns in found.items()}
    actual = dict(weighted_sums(found, weights, LIMIT))
    assert set(actual) == set(found)
    for parameter, gradient in actual.items():
        assert gradient[0].shape == parameter.shape
        assert gradient[0].stride() == parameter.stride()
        assert_close_to_reference(gradient, expected[parameter])


def test_equal_forms_make_one_stack() -> None:
    found = [columns_of(p) for p in PARAMETERS["of several forms"]]
    assert sorted(len(columns.parameter.shape) for columns in stacked(found, LIMIT)) == [2, 2, 3]


def test_full_stack_does_not_wait() -> None:
    limit = 2 * sum(x.numel() for x in kept(columns_of(MATRICES[0])))
    stacks = Stacks(limit)
    assert stacks.add(columns_of(MATRICES[0])) is None
    assert stacks.add(columns_of(MATRICES[1])).parameter.shape == (2, 4, 5)
    assert list(stacks.rest()) == []


def test_weighted_sums_keep_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    make = stack._stack
    monkeypatch.setattr(stack, "_stack", lambda some: counts.append(len(some)) or make(some))
    found = {torch.zeros(4, 5): columns_of(MATRICES[0]) for _ in range(5)}
    limit = 2 * sum(x.numel() for x in kept(columns_of(MATRICES[0])))
    weights = torch.randn(1, K, B, dtype=torch.float64)
    assert len(dict(weighted_sums(found, weights, limit))) == 5
    assert counts == [2, 2, 1]


def test_large_factors_with_small_rows_are_stacked_as_rows() -> None:
    found = {p: Columns(Region.of_parameter(p)) for p in (torch.zeros(4), torch.zeros(4))}
    for parameter, columns in found.items():
        factors = [torch.randn(K, B, 2**14, 4).double(), torch.randn(B, 2**14, 4).double()]
        block = Block("kbti,bti->kbi", tuple(factors))
        columns.add(Region.of_parameter(parameter), block)
    expected = gramian_one_by_one(found)
    (only,) = stacked(found.values(), LIMIT)
    assert [x.shape for x in kept(only)] == [(K, B, 2, 4)]
    assert_close_to_reference(only.gram(LIMIT), expected)


def test_large_ones_are_not_copied() -> None:
    large = torch.zeros(2**9, 2**9)
    columns = columns_of(large)
    assert Stacks(LIMIT).add(columns) is columns


def test_others_are_left_alone() -> None:
    """Lookups, parts of a parameter, gaps in its memory, and nothing at all."""
    table, gaps = torch.zeros(4, 5), torch.zeros(4, 6)[:, :5]
    lookup = Lookup(torch.tensor([[0, 1]] * B), torch.randn(K, B, 2, 5))
    others = [Columns(Region.of_parameter(table)) for _ in range(3)]
    others[0].add(Region.of_parameter(table), lookup)
    others[1].add(Region.of(table[:2]), block_of(table[:2]))
    others.append(columns_of(gaps))
    for columns in others:
        assert Stacks(LIMIT).add(columns) is columns
