"""The block of an embedding."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from autogram._blocks import Block, Limit, Lookup
from autogram._blocks.kernels import CudaKernels, Kernels
from autogram._blocks.lookup import concatenate_lookups, products_of_lookup
from tests.unit._blocks.blocks import dense, gramian_of, kernels
from tests.unit.checks import assert_close_to_reference
from tests.unit.waits import Waits

K, B, T, V, D = 2, 3, 5, 7, 4


def make_lookup(*, tokens: int = T, rows: int = V, columns: int = D) -> Lookup:
    return Lookup(torch.randint(0, rows, (B, tokens)), torch.randn(K, B, tokens, columns))


def dense_rows(lookup: Lookup, size: int = V) -> Tensor:
    """Row by row."""
    k, b, t, d = lookup.cotangents.shape
    rows = torch.zeros(k, b, size, d)
    for sample in range(b):
        for place in range(t):
            token = lookup.indices[sample, place]
            rows[:, sample, token] += lookup.cotangents[:, sample, place]
    return rows


def dense_block() -> Block:
    """As of an output layer with the same table."""
    return Block("kbtv,btd->kbvd", (torch.randn(K, B, T, V), torch.randn(B, T, D)))


def test_rows() -> None:
    lookup = make_lookup()
    assert_close_to_reference(lookup.rows(V), dense_rows(lookup))


def test_concatenate() -> None:
    lookups = [make_lookup(), make_lookup(tokens=2)]
    expected = sum(map(dense_rows, lookups))
    (together,) = concatenate_lookups(lookups)
    assert_close_to_reference(dense_rows(together), expected)


@pytest.mark.parametrize("limit", [1, 30, 2**40])
@pytest.mark.parametrize("rows", [1, 3, V])
def test_gram(limit: int, rows: int) -> None:
    """Repeated tokens, and tokens of the table that do not occur."""
    lookup = make_lookup(rows=rows)
    assert_close_to_reference(
        products_of_lookup("gram", lookup, V, [], kernels(limit)), gramian_of(dense_rows(lookup))
    )


@pytest.mark.parametrize("limit", [30, 2**40])
@pytest.mark.parametrize("places", [1, 2])
def test_gram_of_few_places(limit: int, places: int) -> None:
    """As of one category for each sample: no rows of a table are made. Infinities stay apart."""
    samples, size = 12, 40
    indices = torch.arange(samples * places).view(samples, places) % 5
    lookup = Lookup(indices, torch.randn(K, samples, places, D))
    by_pairs, by_rows = lookup.multiplications(size)
    assert by_pairs < by_rows
    expected = gramian_of(dense_rows(lookup, size))
    with patch.object(Lookup, "rows", autospec=True, side_effect=Lookup.rows) as made:
        found = products_of_lookup("gram", lookup, size, [], kernels(limit))
    assert_close_to_reference(found, expected)
    assert made.called == (limit == 30)
    lookup.cotangents[:, 0] = torch.inf
    found = products_of_lookup("gram", lookup, size, [], kernels())
    assert found.isfinite().flatten(2).all(2)[:, 3].all() == (places == 1)


@pytest.mark.parametrize("limit", [1, 30, 2**40])
@pytest.mark.parametrize("count", [1, 2])
def test_gram_with_dense_blocks(limit: int, count: int) -> None:
    """Their own products are left out, the cross terms are there twice."""
    lookup, blocks = make_lookup(rows=4), [dense_block() for _ in range(count)]
    whole = gramian_of(dense_rows(lookup), *map(dense, blocks))
    expected = whole - gramian_of(*map(dense, blocks))
    assert_close_to_reference(
        products_of_lookup("gram", lookup, V, blocks, kernels(limit)), expected
    )


def test_one_token_for_all() -> None:
    lookup = Lookup(torch.zeros(B, T, dtype=torch.long), torch.randn(K, B, T, D))
    expected = gramian_of(lookup.cotangents.sum(2))
    assert_close_to_reference(products_of_lookup("gram", lookup, V, [], kernels()), expected)


def test_half_precision_is_added_up_in_single_precision() -> None:
    lookup = Lookup(torch.zeros(B, 300, dtype=torch.long), torch.ones(K, B, 300, D).bfloat16())
    rows = lookup.rows(V)
    assert rows.dtype == torch.float32
    assert (rows[:, :, 0] == 300).all()


@pytest.mark.parametrize("limit", [1, 30, 2**40])
@pytest.mark.parametrize("count", [0, 1])
def test_norms(limit: int, count: int) -> None:
    """Each sample's own, with what products with dense blocks add."""
    lookup, blocks = make_lookup(rows=4), [dense_block() for _ in range(count)]
    rows = [dense_rows(lookup), *map(dense, blocks)]
    expected = sum(rows).square().sum((2, 3)) - sum(x.square().sum((2, 3)) for x in rows[1:])
    found = products_of_lookup("norms", lookup, V, blocks, kernels(limit))
    assert_close_to_reference(found, expected)


@pytest.mark.parametrize("shape", [(1,), (3, 2), (2, 3), (4, 5)])
@pytest.mark.parametrize("size", [1, 5, 6, 7, 50])
def test_distinct_values(shape: tuple[int, ...], size: int) -> None:
    """In order, and each index leads to its own; on a GPU, nothing waits for their number."""
    for values in (torch.randint(size, shape), torch.full(shape, size - 1), torch.zeros(shape)):
        indices = values.long()
        found, places = Kernels(Limit(1)).distinct(indices, size)
        assert torch.equal(found, indices.unique())
        assert torch.equal(found[places], indices)
        with Waits() as waits:
            found, places = CudaKernels(Limit(1)).distinct(indices, size)
        assert waits.names == []
        assert torch.equal(found, found.sort().values)
        assert torch.equal(found[places], indices)
        assert len(found) <= max(indices.numel(), size)
        if indices.numel() < size:  # the others are copies of the last one
            assert torch.equal(found.unique(), indices.unique())
            first = torch.searchsorted(found, indices)
            assert torch.equal(first, places)
