"""Bundles: small columns contracted together are what they are one by one."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autogram._blocks import (
    Block,
    Bundles,
    Columns,
    Lookup,
    Region,
    bundle,
    bundled,
    gram_of_bundle,
    weighted_sums,
)
from autogram._errors import ChangedTensorError
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


def factors(columns: Columns) -> tuple[Tensor, ...]:
    """The factors of the only block of some columns."""
    assert columns.single is not None
    return columns.single.operands


def gramian_one_by_one(found: dict[Tensor, Columns]) -> Tensor:
    return sum(columns.gram(LIMIT) for columns in found.values())


def numbers_of_factors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each Gramian and each weighted sum is of, from now on."""
    counts: list[int] = []
    make = bundle._stacks

    def stacks(blocks: list[Block]) -> Iterator[tuple[Block, list[int]]]:
        for block, members in make(blocks):
            counts.append(len(members))
            yield block, members

    monkeypatch.setattr(bundle, "_stacks", stacks)
    return counts


def test_gramian(found: dict[Tensor, Columns]) -> None:
    total = sum(gram_of_bundle(some, LIMIT) for some in bundled(found.values(), LIMIT))
    assert_close_to_reference(total, gramian_one_by_one(found))


@pytest.mark.parametrize("tiny", [0, 2**13])
@pytest.mark.parametrize("count", [1, 2])
def test_weighted_sums(
    found: dict[Tensor, Columns], count: int, tiny: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_TINY", tiny)
    weights = torch.randn(count, K, B, dtype=torch.float64)
    expected = {p: columns.weighted_sum(weights, LIMIT) for p, columns in found.items()}
    actual = dict(weighted_sums(found, weights, LIMIT))
    assert set(actual) == set(found)
    for parameter, gradient in actual.items():
        assert gradient[0].shape == parameter.shape
        assert gradient[0].stride() == parameter.stride()
        assert_close_to_reference(gradient, expected[parameter])
    for parameter, gradient in weighted_sums(found, weights[0], LIMIT):
        assert gradient.shape == parameter.shape
        assert gradient.stride() == parameter.stride()
        assert_close_to_reference(gradient, expected[parameter][0])
        one_by_one = found[parameter].weighted_sum(weights[0], LIMIT)
        assert_close_to_reference(one_by_one, expected[parameter][0])


@pytest.mark.parametrize(("tiny", "counts"), [(2**13, [1, 2, 3]), (0, [1] * 6)])
def test_equal_forms_are_stacked_if_tiny(
    tiny: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_TINY", tiny)
    seen = numbers_of_factors(monkeypatch)
    found = {p: columns_of(p) for p in PARAMETERS["of several forms"]}
    (together,) = bundled(found.values(), LIMIT)
    assert_close_to_reference(gram_of_bundle(together, LIMIT), gramian_one_by_one(found))
    assert sorted(seen) == counts


def test_gradients_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they are equal."""
    monkeypatch.setattr(bundle, "_TINY", 0)
    parameters = [torch.zeros(4), torch.zeros(4)]
    cotangent = torch.randn(K, B, 4).double()
    found = {}
    for p in parameters:
        found[p] = Columns(Region.of_parameter(p))
        found[p].add(Region.of_parameter(p), Block("kbo->kbo", (cotangent,)))
    weights = torch.randn(1, K, B, dtype=torch.float64)
    for _ in range(2):  # as computed, and as repeated
        first, second = dict(weighted_sums(found, weights, LIMIT)).values()
        assert torch.equal(first, second)
        first.zero_()
        assert second.any()


def test_bundle_is_closed_before_what_does_not_fit() -> None:
    """However large that is."""
    limit = 2 * sum(x.numel() for x in factors(columns_of(MATRICES[0])))
    *found, larger = [columns_of(p) for p in (*MATRICES[:2], torch.zeros(60, 70))]
    bundles = Bundles(limit)
    assert [bundles.add(columns) for columns in found] == [[], []]
    assert bundles.add(larger) == found
    assert list(bundles.rest()) == [[larger]]


def test_dtypes_are_kept_apart() -> None:
    exact, single = columns_of(MATRICES[0]), Columns(Region.of_parameter(MATRICES[1]))
    single.add(Region.of_parameter(MATRICES[1]), block_of(MATRICES[1]).to(torch.float32))
    assert list(bundled([exact, single], LIMIT)) == [[single], [exact]]


def test_weighted_sums_keep_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    sums = bundle._sums_of_all
    monkeypatch.setattr(
        bundle,
        "_sums_of_all",
        lambda blocks, *args: counts.append(len(blocks)) or sums(blocks, *args),
    )
    found = {torch.zeros(4, 5): columns_of(MATRICES[0]) for _ in range(5)}
    limit = 2 * (20 + sum(x.numel() for x in factors(columns_of(MATRICES[0]))))
    weights = torch.randn(1, K, B, dtype=torch.float64)
    assert len(dict(weighted_sums(found, weights, limit))) == 5
    assert counts == [2, 2]  # and one alone


def test_large_factors_with_small_rows_wait_as_rows() -> None:
    found = {p: Columns(Region.of_parameter(p)) for p in (torch.zeros(4), torch.zeros(4))}
    for parameter, columns in found.items():
        operands = [torch.randn(K, B, 2**14, 4).double(), torch.randn(B, 2**14, 4).double()]
        block = Block("kbti,bti->kbi", tuple(operands))
        columns.add(Region.of_parameter(parameter), block)
    expected = gramian_one_by_one(found)
    (together,) = bundled(found.values(), LIMIT)
    assert [factors(columns)[0].shape for columns in together] == [(K, B, 4)] * 2
    assert_close_to_reference(gram_of_bundle(together, LIMIT), expected)


def test_large_ones_do_not_wait() -> None:
    columns = columns_of(torch.zeros(2**9, 2**9))
    assert Bundles(LIMIT).add(columns) == [columns]


def test_what_was_changed_is_refused() -> None:
    found = {p: columns_of(p) for p in MATRICES}
    factors(found[MATRICES[1]])[0].add_(1)
    with pytest.raises(ChangedTensorError):
        gram_of_bundle(list(found.values()), LIMIT)
    with pytest.raises(ChangedTensorError):
        list(weighted_sums(found, torch.ones(1, K, B, dtype=torch.float64), LIMIT))


def test_others_are_left_alone() -> None:
    """Lookups, parts of a parameter, gaps in its memory, several dtypes, and nothing at all."""
    table, gaps = torch.zeros(4, 5), torch.zeros(4, 6)[:, :5]
    lookup = Lookup(torch.tensor([[0, 1]] * B), torch.randn(K, B, 2, 5))
    others = [Columns(Region.of_parameter(table)) for _ in range(4)]
    others[0].add(Region.of_parameter(table), lookup)
    others[1].add(Region.of(table[:2]), block_of(table[:2]))
    mixed = Block("kbo,bi->kboi", (torch.randn(K, B, 4).double(), torch.randn(B, 5).float()))
    others[2].add(Region.of_parameter(table), mixed)
    others.append(columns_of(gaps))
    for columns in others:
        assert Bundles(LIMIT).add(columns) == [columns]
