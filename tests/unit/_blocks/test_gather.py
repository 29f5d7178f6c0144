"""Blocks of some samples, made blocks of all."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from autogram._blocks import Block, Columns, Lookup, Region, Subset
from autogram._blocks.gather import Gathering
from tests.unit._blocks.blocks import dense, gramian_of, kernels
from tests.unit.checks import assert_close_to_reference
from tests.unit.faults import SHORTAGES, Fault, allocates, count_allocations

K, B = 2, 5
REGION = Region.contiguous((3, 4))
ROWS, WIDTH = 3, 4

# Of a call for one sample, and of one for two of them, whose second operand has the samples or not.
EQUATIONS = [
    pytest.param("kbo,i->kboi", "kbo,bi->kboi", id="linear"),
    pytest.param("kbto,ti->kboi", "kbto,bti->kboi", id="linear with positions"),
    pytest.param("kbtso,tsi->kboi", "kbtso,btsi->kboi", id="linear with two kinds of positions"),
    pytest.param("kboi->kboi", "kboi->kboi", id="rows"),
    pytest.param("kbtoi->kboi", "kbtoi->kboi", id="rows to be added up"),
    pytest.param("kbto,oi->kboi", "kbto,oi->kboi", id="factor without samples"),
]
CALLS = [
    pytest.param([(0,), (1,), (2,), (3,), (4,)], id="one for each, in order"),
    pytest.param([(3,), (0,), (4,), (2,), (1,)], id="in another order"),
    pytest.param([(3,), (1,)], id="some without"),
    pytest.param([(1,), (4,), (1,), (0,)], id="one with two calls"),
    pytest.param([(2,)] * 9 + [(0,)], id="one with many calls"),
    pytest.param([(0, 1), (2,), (4, 3), (1,), (0, 1)], id="groups"),
]


def make_block(equations: Sequence[str], samples: int, positions: int) -> Block:
    """A block of random factors."""
    equation = equations[samples > 1]
    sizes = {"k": K, "b": samples, "o": ROWS, "i": WIDTH, "t": positions, "s": 3 - positions % 2}
    inputs = equation.split("->")[0].split(",")
    return Block(equation, tuple(torch.randn([sizes[x] for x in labels]) for labels in inputs))


def spread(found: Sequence[tuple[Subset, Tensor]]) -> Tensor:
    """The rows of some samples as rows of all."""
    total = torch.zeros(K, B, *found[0][1].shape[2:])
    for subset, rows in found:
        total = total.index_add(1, torch.tensor(subset.samples), rows)
    return total


@pytest.mark.parametrize("positions", [[2], [1, 4, 2], [30, 1]], ids=str)
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize(("single", "group"), EQUATIONS)
def test_blocks(
    single: str, group: str, calls: list[tuple[int, ...]], positions: list[int]
) -> None:
    gathering, expected = Gathering(kernels()), []
    for i, samples in enumerate(calls):
        block = make_block((single, group), len(samples), positions[i % len(positions)])
        gathering.add(REGION, Subset(samples, B), block)
        expected.append((Subset(samples, B), dense(block)))
    blocks = [x for _, x in gathering.blocks(None)]
    assert_close_to_reference(torch.stack([dense(x) for x in blocks]).sum(0), spread(expected))
    there = sorted({sample for samples in calls for sample in samples})
    some = [x for _, x in gathering.blocks(there)]
    narrow = torch.stack([dense(x) for x in some]).sum(0)
    assert_close_to_reference(narrow, spread(expected)[:, there])


def test_factors_of_a_loop_are_those_of_a_batch() -> None:
    """One call for each sample costs the same memory as one for all."""
    gathering = Gathering(kernels())
    whole = make_block(("", "kbto,bti->kboi"), B, 1)
    g, x = whole.operands
    for b in range(B):
        gathering.add(REGION, Subset((b,), B), Block("kbto,ti->kboi", (g[:, b : b + 1], x[b])))
    ((_, block),) = gathering.blocks(None)
    assert block.equation == whole.equation
    assert all(torch.equal(p, q) for p, q in zip(block.operands, whole.operands, strict=True))


def test_rows_of_a_sample_are_added_up_as_they_come() -> None:
    gathering = Gathering(kernels())
    for _ in range(10):
        gathering.add(REGION, Subset((1,), B), make_block(("kbto,ti->kboi", ""), 1, 40))
    assert len(gathering._blocks) == 1


def test_uneven_calls_are_not_filled_up_beyond_rows() -> None:
    """One sample with hundreds of calls: its rows are less than zeros for all others."""
    gathering = Gathering(kernels())
    for b in [0] * 300 + list(range(B)):
        gathering.add(REGION, Subset((b,), B), make_block(("kbo,i->kboi", ""), 1, 1))
    ((_, block),) = gathering.blocks(None)
    assert sum(x.numel() for x in block.operands) == K * B * ROWS * WIDTH


def test_rows_take_the_place_of_factors_that_would_be_mostly_filled_up() -> None:
    """Two kinds of positions, of which each part has many of another kind."""
    gathering, expected = Gathering(kernels()), []
    for samples, sizes in (((0, 1, 2), (4, 1)), ((3, 4), (1, 4))):
        g, x = torch.randn(K, *sizes, len(samples), 7), torch.randn(*sizes, len(samples), 8)
        block = Block("ktsbo,tsbi->kboi", (g, x))
        gathering.add(Region.contiguous((7, 8)), Subset(samples, B), block)
        expected.append((Subset(samples, B), dense(block)))
    ((_, block),) = gathering.blocks(None)
    assert_close_to_reference(dense(block), spread(expected))
    assert block.is_rows


@pytest.mark.parametrize("calls", CALLS)
def test_lookups(calls: list[tuple[int, ...]]) -> None:
    gathering, expected = Gathering(kernels()), []
    for i, samples in enumerate(calls):
        t, b = 1 + i % 3, len(samples)
        lookup = Lookup(torch.randint(0, 6, (b, t)), torch.randn(K, b, t, 4))
        gathering.add(REGION, Subset(samples, B), lookup)
        expected.append((Subset(samples, B), lookup.rows(6)))
    assert_close_to_reference(gathering.lookups(None)[0].rows(6), spread(expected))
    there = sorted({sample for samples in calls for sample in samples})
    narrow = gathering.lookups(there)[0].rows(6)
    assert_close_to_reference(narrow, spread(expected)[:, there])


def test_columns_of_all_kinds() -> None:
    """Blocks of all samples, of some, and lookups of either, by rows and by columns."""
    table = torch.zeros(6, 4)
    region, columns, expected = (
        Region.of(table),
        Columns(Region.of(table), kernels()),
        torch.zeros(K, B, 6, 4),
    )
    for samples in (None, (1,), (4, 0)):
        b = B if samples is None else len(samples)
        block = Block("kbtv,btd->kbvd", (torch.randn(K, b, 2, 6), torch.randn(b, 2, 4)))
        lookup = Lookup(torch.randint(0, 6, (b, 3)), torch.randn(K, b, 3, 4))
        subset = None if samples is None else Subset(samples, B)
        by_columns = Lookup(torch.randint(0, 4, (b, 3)), torch.randn(K, b, 3, 6))
        columns.add(region, block, subset)
        columns.add(region, lookup, subset)
        columns.add(Region.of(table.T), by_columns, subset)
        rows = dense(block) + lookup.rows(6) + by_columns.rows(4).mT
        expected = expected + (rows if subset is None else spread([(subset, rows)]))
    assert columns.narrow() is None
    assert_close_to_reference(columns.gram(), gramian_of(expected))


def columns_of_some_samples() -> Columns:
    """The same at each call: blocks of a table and of half of it, and lookups, of some samples."""
    torch.manual_seed(0)
    table = torch.zeros(6, 4)
    columns = Columns(Region.of(table), kernels())
    for samples in ((1,), (4, 0)):
        b, subset = len(samples), Subset(samples, B)
        for region, rows, positions in ((columns.parameter, 6, 2), (Region.of(table[3:]), 3, 1)):
            factors = torch.randn(K, b, positions, rows), torch.randn(b, positions, 4)
            columns.add(region, Block("kbtv,btd->kbvd", factors), subset)
        lookup = Lookup(torch.randint(0, 6, (b, 3)), torch.randn(K, b, 3, 4))
        columns.add(columns.parameter, lookup, subset)
    return columns


def kept(columns: Columns) -> Tensor:
    """All rows, behind a call that keeps these."""
    columns.keep("rows", lambda *_: True)
    return columns.dense()


def narrowed(columns: Columns) -> Tensor:
    """The rows of the samples that have any."""
    columns.narrow()
    return columns.dense()


PRODUCTS: dict[str, Callable[[Columns], Tensor]] = {
    "gram": lambda columns: columns.gram(),
    "norms": lambda columns: columns.square_norms(),
    "cross": lambda columns: columns.cross_gram(columns_of_some_samples()),
    "cross, of the other": lambda columns: columns_of_some_samples().cross_gram(columns),
    "sum": lambda columns: columns.weighted_sum(torch.ones(1, K, B)),
    "direction": lambda columns: columns.directional(torch.ones(6, 4)),
    "rows": lambda columns: columns.rows(torch.tensor([1, 3])),
    "kept": kept,
    "narrowed": narrowed,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_behind_a_shortage_of_memory(name: str) -> None:
    """Wherever memory runs out in a product, the same product is right afterwards."""
    product = PRODUCTS[name]
    expected = product(columns_of_some_samples())
    for skipped in range(count_allocations(partial(product, columns_of_some_samples()))):
        columns = columns_of_some_samples()
        with (
            Fault(SHORTAGES["CPU"], skipped, fails=allocates),
            pytest.raises(RuntimeError, match="can't allocate memory"),
        ):
            product(columns)
        assert_close_to_reference(product(columns), expected)


def test_columns_of_some_samples() -> None:
    weight = torch.zeros(ROWS, WIDTH)
    columns, expected = Columns(Region.of(weight), kernels()), []
    for samples in ((3,), (1,)):
        block = make_block(("kbto,ti->kboi", ""), 1, 2)
        columns.add(Region.of(weight), block, Subset(samples, B))
        expected.append((Subset(samples, B), dense(block)))
    subset = columns.narrow()
    assert subset == Subset((1, 3), B)
    assert_close_to_reference(columns.dense(), spread(expected)[:, [1, 3]].flatten(2))


def test_nothing_to_narrow() -> None:
    assert Columns(Region.of(torch.zeros(2, 2)), kernels()).narrow() is None


def test_change_in_place_is_seen() -> None:
    weight = torch.zeros(ROWS, WIDTH)
    columns = Columns(Region.of(weight), kernels())
    block = make_block(("kbo,i->kboi", ""), 1, 1)
    columns.add(Region.of(weight), block, Subset((1,), B))
    block.operands[1].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        columns.gram()
