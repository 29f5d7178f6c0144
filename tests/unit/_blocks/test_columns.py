"""The columns of one parameter, from blocks on different regions of it."""

import pytest
import torch
from torch import Tensor

from autogram import ChangedTensorError
from autogram._blocks import Block, Columns, Lookup, Region
from tests.unit._blocks.blocks import gramian_of, kernels
from tests.unit.checks import assert_close_to_reference

K, B = 2, 3
BASE = torch.zeros(6, 4)
LIMITS = [1, 50, 2**40]


def whole(w: Tensor) -> Tensor:
    return w


VIEWS = [
    pytest.param([], id="nothing else"),
    pytest.param([whole, whole], id="whole, three times"),
    pytest.param([lambda w: w.T], id="transpose"),
    pytest.param([lambda w: w[:3], lambda w: w[3:]], id="whole and halves"),
    pytest.param([lambda w: w[2]], id="row"),
    pytest.param([lambda w: w[1, 2]], id="element"),
    pytest.param([lambda w: w.view(2, 3, 4).permute(2, 0, 1)], id="permuted"),
    pytest.param([lambda w: w[:1].expand(5, 4)], id="expanded"),
    pytest.param([lambda w: w.view(-1)], id="flat"),
]
PARTS = [
    pytest.param([lambda w: w[:3], lambda w: w[3:]], id="disjoint"),
    pytest.param([lambda w: w[:4], lambda w: w[2:]], id="overlapping"),
    pytest.param([lambda w: w[:3], lambda w: w[:3].T], id="equal, transposed"),
    pytest.param([lambda w: w[::2], lambda w: w[1::2], lambda w: w[0]], id="interleaved"),
    pytest.param([lambda w: w[1], lambda w: w[:, 2]], id="crossing"),
    pytest.param([lambda w: w[:2], lambda w: w[4:], lambda w: w[4:, :1]], id="with a hole"),
]


def block_on(view: Tensor) -> Block:
    """Random rows for a view, as two factors."""
    letters = "acdefg"[: view.dim()]
    operands = torch.randn(K, B, 2, *view.shape), torch.randn(B, 2)
    return Block(f"kbt{letters},bt->kb{letters}", operands)


def on_parameter(block: Block, view, base: Tensor = BASE) -> Tensor:
    """The rows of a block on a view as rows on the parameter, by autograd through the view."""
    rows = torch.einsum(block.equation, *block.operands)
    parameter = base.to(rows.dtype, copy=True).requires_grad_()
    seen = view(parameter)
    flat = [
        torch.autograd.grad(seen, parameter, r, retain_graph=True)[0] for r in rows.flatten(0, 1)
    ]
    return torch.stack(flat).view(*rows.shape[:2], -1)


def fill(columns: Columns, views) -> Tensor:
    """Adds a block for each view, and returns the sum of their rows."""
    total = torch.zeros(K, B, BASE.numel())
    for view in views:
        block = block_on(view(BASE))
        columns.add(Region.of(view(BASE)), block)
        total = total + on_parameter(block, view)
    return total


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("views", [*PARTS, *VIEWS])
def test_gram(views, limit: int) -> None:
    columns = Columns(Region.of(BASE), kernels(limit))
    expected = fill(columns, views or [whole])
    assert_close_to_reference(columns.gram(), gramian_of(expected))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("views", VIEWS)
def test_gram_beside_the_whole(views, limit: int) -> None:
    columns = Columns(Region.of(BASE), kernels(limit))
    expected = fill(columns, [whole, *views])
    assert_close_to_reference(columns.gram(), gramian_of(expected))


def transposed(w: Tensor) -> Tensor:
    return w.T


READ = [
    pytest.param([whole], id="read by rows"),
    pytest.param([transposed], id="by columns"),
    pytest.param([whole, transposed, whole, transposed], id="by rows and columns"),
]


def look_up(columns: Columns, views) -> Tensor:
    """Adds a lookup in each view of the table, and returns the sum of their rows."""
    total = torch.zeros(K, B, *BASE.shape)
    for count, view in enumerate(views, 3):
        (size, width), region = view(BASE).shape, Region.of(view(BASE))
        lookup = Lookup(torch.randint(0, size, (B, count)), torch.randn(K, B, count, width))
        columns.add(region, lookup)
        rows = lookup.rows(size)
        total = total + (rows if view is whole else rows.mT)
    return total.flatten(2)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("views", [*PARTS, *VIEWS])
def test_products_beside_a_lookup(views, read, limit: int) -> None:
    columns = Columns(Region.of(BASE), kernels(limit))
    expected = fill(columns, views) + look_up(columns, read)
    for _ in range(2):
        assert_close_to_reference(columns.gram(), gramian_of(expected))
        assert_close_to_reference(columns.square_norms(), expected.square().sum(2))
        assert_close_to_reference(columns.dense(), expected)
    some = torch.tensor([2, 0])
    assert_close_to_reference(columns.at(some).dense(), expected[:, some])
    for other_views in ([], [whole]):
        for other_read in ([whole], [transposed]):
            other = Columns(Region.of(BASE), kernels(limit))
            rows = fill(other, other_views) + look_up(other, other_read)
            product = torch.einsum("kbi,lci->kblc", expected, rows)
            assert_close_to_reference(columns.cross_gram(other), product)


@pytest.mark.parametrize("read", READ)
def test_lookups_that_are_changed_in_place(read) -> None:
    """The tokens of a batch, between two products."""
    columns = Columns(Region.of(BASE), kernels())
    look_up(columns, read[:2])
    columns.gram()
    _, lookup = columns.found()[-1]
    lookup.operands[0].zero_()
    with pytest.raises(ChangedTensorError):
        columns.gram()


@pytest.mark.parametrize("views", [*PARTS, *VIEWS])
def test_dense(views) -> None:
    columns = Columns(Region.of(BASE), kernels())
    expected = fill(columns, [whole, *views])
    assert_close_to_reference(columns.dense(), expected)


@pytest.mark.parametrize("views", [*PARTS, *VIEWS])
@pytest.mark.parametrize("read", [pytest.param([], id="no lookup"), *READ])
def test_slices(views, read) -> None:
    """Each is the part of all rows, also where these are the sum of several blocks."""
    columns = Columns(Region.of(BASE), kernels())
    expected = fill(columns, [whole, *views]) + look_up(columns, read)
    for start, stop in ((0, 6), (0, 1), (2, 5), (5, 6)):
        assert_close_to_reference(columns.slice(start, stop), expected[..., 4 * start : 4 * stop])


def test_dense_with_a_lookup() -> None:
    columns = Columns(Region.of(BASE), kernels())
    lookup = Lookup(torch.randint(0, 6, (B, 5)), torch.randn(K, B, 5, 4))
    columns.add(Region.of(BASE), lookup)
    assert_close_to_reference(columns.dense(), lookup.rows(6).flatten(2))


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(torch.zeros(30)[6:].view(6, 4), id="not at the start of its storage"),
        pytest.param(torch.zeros(4, 6).T, id="transposed"),
        pytest.param(torch.zeros(6, 9)[:, 1:5], id="with holes"),
    ],
)
def test_parameter_with_another_storage(base: Tensor) -> None:
    """A view of part of it and a lookup in all of it."""
    columns = Columns(Region.of(base), kernels())
    view = block_on(base[1:3])
    lookup = Lookup(torch.randint(0, 6, (B, 5)), torch.randn(K, B, 5, 4))
    columns.add(Region.of(base[1:3]), view)
    columns.add(Region.of(base), lookup)
    expected = on_parameter(view, lambda w: w[1:3]) + lookup.rows(6).flatten(2)
    assert_close_to_reference(columns.gram(), gramian_of(expected))


def test_lookup_in_a_table_of_matrices() -> None:
    base = torch.zeros(6, 2, 2)
    columns = Columns(Region.of(base), kernels())
    lookup = Lookup(torch.randint(0, 6, (B, 5)), torch.randn(K, B, 5, 4))
    columns.add(Region.of(base), lookup)
    assert_close_to_reference(columns.gram(), gramian_of(lookup.rows(6)))


def test_block_of_lookup() -> None:
    lookup = Lookup(torch.randint(0, 6, (B, 5)), torch.randn(K, B, 5, 4))
    block = lookup.block((6, 2, 2))
    rows = torch.einsum(block.equation, *block.operands)
    assert_close_to_reference(rows, lookup.rows(6).view(K, B, 6, 2, 2))


def test_nothing_added() -> None:
    assert Columns(Region.of(BASE), kernels()).gram() is None
