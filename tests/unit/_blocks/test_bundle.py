"""Bundles: small columns contracted together are what they are one by one."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autogram._blocks import (
    Block,
    Bundles,
    Columns,
    Limit,
    Lookup,
    Region,
    bundle,
    bundled,
    gram_of_bundle,
    weighted_sums,
)
from autogram._blocks.kernels import CudaKernels
from autogram._blocks.programs import Program, known
from autogram.errors import ChangedTensorError
from tests.unit._blocks.blocks import Operators, kernels
from tests.unit.checks import assert_close_to_reference

K, B = 2, 3
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


def columns_of(parameter: Tensor, limit: int = 2**40) -> Columns:
    """Columns with random rows, in float64."""
    columns = Columns(Region.of_parameter(parameter), kernels(limit))
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
    return sum(columns.gram() for columns in found.values())


def test_gramian(found: dict[Tensor, Columns]) -> None:
    total = sum(gram_of_bundle(some) for some in bundled(found.values()))
    assert_close_to_reference(total, gramian_one_by_one(found))


@pytest.mark.parametrize("count", [1, 2])
def test_weighted_sums(found: dict[Tensor, Columns], count: int) -> None:
    weights = torch.randn(count, K, B, dtype=torch.float64)
    expected = {p: columns.weighted_sum(weights) for p, columns in found.items()}
    actual = weighted_sums(found, weights)
    assert set(actual) == set(found)
    for parameter, gradient in actual.items():
        assert gradient[0].shape == parameter.shape
        assert gradient[0].stride() == parameter.stride()
        assert_close_to_reference(gradient, expected[parameter])
    for parameter, gradient in weighted_sums(found, weights[0]).items():
        assert gradient.shape == parameter.shape
        assert gradient.stride() == parameter.stride()
        assert_close_to_reference(gradient, expected[parameter][0])


def test_weighted_sums_by_one_program(
    found: dict[Tensor, Columns], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is written when the same columns have come often, and is right for others of them."""
    monkeypatch.setattr(known, "_WORTH_WRITING", 2)
    monkeypatch.setattr(known, "_WORTH_WRITING_TOGETHER", 2)
    runs: list[Program] = []
    call = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *x: runs.append(self) or call(self, *x))
    for count in (1, 2, 1, 2):  # each of these is another form
        before = [weighted_sums(found, torch.ones(count, K, B).double()) for _ in range(2)]
        assert all(before)
        for columns in found.values():
            for x in factors(columns):
                x.copy_(torch.randn_like(x))
                columns.single._versions = None  # as those of a new step
        weights = torch.randn(count, K, B, dtype=torch.float64)
        runs.clear()
        actual = weighted_sums(found, weights)
        assert len(runs) == 1
        for parameter, columns in found.items():
            assert actual[parameter].untyped_storage().nbytes() == actual[parameter].nbytes
            assert_close_to_reference(actual[parameter], columns.weighted_sum(weights))


def test_equal_forms_are_together() -> None:
    found = {p: columns_of(p) for p in PARAMETERS["of several forms"]}
    bundles = list(bundled(found.values()))
    assert sorted(map(len, bundles)) == [1, 2, 3]
    total = sum(gram_of_bundle(some) for some in bundles)
    assert_close_to_reference(total, gramian_one_by_one(found))


def test_gradients_share_no_memory() -> None:
    """Though they are equal."""
    parameters = [torch.zeros(4), torch.zeros(4)]
    cotangent = torch.randn(K, B, 4).double()
    found = {}
    for p in parameters:
        found[p] = Columns(Region.of_parameter(p), kernels())
        found[p].add(Region.of_parameter(p), Block("kbo->kbo", (cotangent,)))
    weights = torch.randn(1, K, B, dtype=torch.float64)
    first, second = weighted_sums(found, weights).values()
    assert_close_to_reference(first, second)
    first.zero_()
    assert second.any()


def test_sums_of_a_bundle_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sums of one bundle are parts of is gone when the next bundle is contracted."""
    totals: list[weakref.ref[torch.UntypedStorage]] = []
    contract = bundle.weighted_sum

    def watched(*args: Any) -> Tensor:
        assert all(total() is None for total in totals)
        total = contract(*args)
        totals.append(weakref.ref(total.untyped_storage()))
        return total

    monkeypatch.setattr(bundle, "weighted_sum", watched)
    member = 20 + sum(x.numel() for x in factors(columns_of(MATRICES[0])))
    found = {p: columns_of(p, 2 * member - 1) for p in [torch.zeros(4, 5) for _ in range(6)]}
    sums = weighted_sums(found, torch.randn(K, B, dtype=torch.float64))
    assert len(totals) == 3
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in sums.values())


def test_a_bundle_that_is_full_is_ready() -> None:
    member = 20 + sum(x.numel() for x in factors(columns_of(MATRICES[0])))
    first, second, third = [columns_of(p, limit=3 * member - 1) for p in MATRICES]
    bundles = Bundles()
    assert bundles.add(first) == bundles.add(second) == []
    assert bundles.add(third) == [[first, second, third]]
    assert list(bundles.rest()) == []


def test_dtypes_are_kept_apart() -> None:
    exact = columns_of(MATRICES[0])
    single = Columns(Region.of_parameter(MATRICES[1]), kernels())
    block = block_of(MATRICES[1])
    operands = tuple(x.float() for x in block.operands)
    single.add(Region.of_parameter(MATRICES[1]), Block(block.equation, operands))
    assert list(bundled([exact, single])) == [[single], [exact]]


def test_large_ones_do_not_wait() -> None:
    columns = columns_of(torch.zeros(2**9, 2**9))
    assert Bundles().add(columns) == [[columns]]


def test_what_was_changed_is_refused() -> None:
    found = {p: columns_of(p) for p in MATRICES}
    factors(found[MATRICES[1]])[0].add_(1)
    with pytest.raises(ChangedTensorError):
        gram_of_bundle(list(found.values()))
    with pytest.raises(ChangedTensorError):
        weighted_sums(found, torch.ones(1, K, B, dtype=torch.float64))


def test_others_are_left_alone() -> None:
    """Lookups, parts of a parameter, gaps in its memory, and nothing at all."""
    table, gaps = torch.zeros(4, 5), torch.zeros(4, 6)[:, :5]
    lookup = Lookup(torch.tensor([[0, 1]] * B), torch.randn(K, B, 2, 5))
    others = [Columns(Region.of_parameter(table), kernels()) for _ in range(3)]
    others[0].add(Region.of_parameter(table), lookup)
    others[1].add(Region.of(table[:2]), block_of(table[:2]))
    others.append(columns_of(gaps))
    for columns in others:
        assert Bundles().add(columns) == [[columns]]


def layer(equation: str, cotangent: Tensor, factor: Tensor, limit: int = 2**40) -> list[Columns]:
    """The columns of the weight and the bias of a layer that is not tiny."""
    of_cotangent = equation.split(",")[0]
    of_bias = f"{of_cotangent}->{of_cotangent.replace('t', '')}"
    found = []
    for block in (Block(equation, (cotangent, factor)), Block(of_bias, (cotangent,))):
        region = Region.contiguous(tuple(block.sizes[label] for label in block.parameter))
        found.append(Columns(region, kernels(limit)))
        found[-1].add(region, block)
    return found


@pytest.mark.parametrize("equation", ["kbo,bi->kboi", "kbo,bi->kbio"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weight_and_bias_share_products(equation: str, dtype: torch.dtype) -> None:
    cotangent, factor = torch.randn(K, 5, 90).to(dtype), torch.randn(5, 1700).to(dtype)
    found = layer(equation, cotangent, factor)
    (bundle,) = Bundles().add(*found)
    gram_of_bundle(bundle)  # how to contract is found once, on tensors without data
    with Operators() as seen:
        total = gram_of_bundle(bundle)
    assert seen.names.count("aten::mm") == 2
    assert_close_to_reference(total, sum(columns.gram() for columns in found))


@pytest.mark.parametrize(
    ("equation", "positions", "limit"),
    [("kbto,bti->kboi", (3,), 2**40), ("kbo,bi->kboi", (), 30)],
    ids=["sums over positions", "in pieces"],
)
def test_others_share_no_products(equation: str, positions: tuple[int, ...], limit: int) -> None:
    cotangent = torch.randn(K, 5, *positions, 90).double()
    weight, bias = layer(equation, cotangent, torch.randn(5, *positions, 1700).double(), limit)
    assert [weight] in Bundles().add(weight, bias)


def test_equal_rows_of_another_layer_share_no_products() -> None:
    cotangents, factor = torch.ones(2, K, 5, 90), torch.randn(5, 1700)
    (weight, _), (_, bias) = (layer("kbo,bi->kboi", x, factor) for x in cotangents)
    assert [weight] in Bundles().add(weight, bias)


@pytest.mark.parametrize(("elements", "products"), [(2**17, 1), (2**21, 3)])
def test_rows_are_weighed_together_where_a_launch_takes_longer(
    elements: int, products: int
) -> None:
    """On a GPU, rows of adapters are copied side by side, and larger ones are not."""
    region, shared = Region.contiguous((elements // 8,)), CudaKernels(Limit(2**40))
    rows = [torch.randn(1, 8, elements // 8) for _ in range(3)]
    found = {torch.empty(0): Columns(region, shared) for _ in rows}
    for columns, x in zip(found.values(), rows, strict=True):
        columns.add(region, Block("kbn->kbn", (x,)))
    for _ in range(2):  # how to contract is found in the first call
        weights = torch.rand(1, 8)
        with Operators() as operators:
            sums = weighted_sums(found, weights)
        for parameter, x in zip(found, rows, strict=True):
            assert_close_to_reference(sums[parameter], (weights @ x[0]).squeeze(0))
    assert operators.names.count("aten::mm") + operators.names.count("aten::bmm") == products
