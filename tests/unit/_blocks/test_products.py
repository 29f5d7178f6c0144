"""Products of blocks: whatever the plan, the result is that of the rows."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autogram._blocks import Block
from autogram._blocks.kernels import cpu
from autogram._blocks.plan import Plan, cross, plans, rows
from autogram._blocks.products import explicit, merge, products
from tests.unit._blocks.blocks import EQUATIONS, dense, gramian_of, kernels, make_block
from tests.unit.checks import assert_close_to_reference


class Copies(TorchDispatchMode):
    """Counts the elements of what is computed and is no view."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        del types
        output = function(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and not function.is_view:
            self.elements += output.numel()
        return output


def best(block: Block, limit: int = 2**40) -> Plan:
    """The plan that is chosen for a block."""
    return plans("gram", [block], (), kernels(limit))[0]


LIMITS = [1, 10, 100, 2**40]
OF_A_MATRIX = [param for param in EQUATIONS if len(param.values[0].split("->")[1]) == 4]
PAIRS = [
    pytest.param(p.values[0], q.values[0], id=f"{p.id} and {q.id}")
    for p, q in itertools.product(OF_A_MATRIX, OF_A_MATRIX)
    if p.values[0][-1] == q.values[0][-1]
]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_gram(equation: str, limit: int) -> None:
    block = make_block(equation)
    assert_close_to_reference(
        products("gram", [block], (), kernels(limit)), gramian_of(dense(block))
    )


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_gram_of_a_sum(first: str, second: str, limit: int) -> None:
    """The cross terms of two uses are part of it, of equal and of different forms."""
    blocks = [make_block(first), make_block(second)]
    assert_close_to_reference(
        products("gram", blocks, (), kernels(limit)), gramian_of(*map(dense, blocks))
    )


@pytest.mark.parametrize("limit", LIMITS)
def test_gram_of_many(limit: int) -> None:
    equations = ["kbto,bti->kboi", "kbo,bi->kboi", "kbto,bti->kboi", "kboi->kboi"]
    blocks = [make_block(equation) for equation in equations]
    assert_close_to_reference(
        products("gram", blocks, (), kernels(limit)), gramian_of(*map(dense, blocks))
    )


# For the first, factors are cheaper, and for the second, rows are.
FEW = ("kbo,bi->kboi", ((1, 4, 80), (4, 90)))
MANY = ("kbto,bti->kboi", ((1, 4, 60, 5), (4, 60, 6)))


@pytest.mark.parametrize(
    ("signature", "method"),
    [
        pytest.param(FEW, "factors", id="few positions"),
        pytest.param(MANY, "rows", id="many positions"),
    ],
)
def test_method_follows_cost(signature, method: str) -> None:
    equation, shapes = signature
    assert best(Block(equation, tuple(map(torch.empty, shapes)))).method == method


@pytest.mark.parametrize(
    ("signature", "limit"),
    [
        pytest.param(FEW, 1, id="factors, sample by sample"),
        pytest.param(FEW, 8, id="factors, two samples at a time"),
        pytest.param(MANY, 1, id="rows, line by line"),
        pytest.param(MANY, 60, id="rows, some lines at a time"),
    ],
)
def test_both_methods_in_parts(signature, limit: int) -> None:
    equation, shapes = signature
    block = Block(equation, tuple(torch.randn(shape) for shape in shapes))
    assert best(block, limit).pieces > 1
    assert_close_to_reference(
        products("gram", [block], (), kernels(limit)), gramian_of(dense(block))
    )


def test_parts_are_at_most_as_many_as_there_are_places() -> None:
    block = make_block("kbo->kbo")
    plan = best(block, 1)
    assert plan.pieces <= max(block.sizes.values())


@pytest.mark.parametrize("chunks", [1, 2, 3, 50])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_cross(first: str, second: str, chunks: int) -> None:
    p, q = make_block(first), make_block(second)
    expected = torch.einsum("kboi,lcoi->kblc", dense(p), dense(q))
    assert_close_to_reference(cross(p, q, kernels(), pieces=chunks), expected)


def test_rows() -> None:
    blocks = [make_block("kbto,bti->kboi"), make_block("kbo,bi->kboi")]
    assert_close_to_reference(rows(blocks, kernels()), sum(map(dense, blocks)))


@pytest.mark.parametrize("equation", EQUATIONS)
def test_explicit_rows(equation: str) -> None:
    block = make_block(equation)
    found = explicit([block], kernels())
    assert found.is_rows
    assert found.operands[0].is_contiguous()
    assert_close_to_reference(dense(found), dense(block))


def test_explicit_rows_of_a_sum() -> None:
    blocks = [make_block("kbqot,bqipt->kbqoip"), make_block("kbqoip->kbqoip")]
    assert_close_to_reference(dense(explicit(blocks, kernels())), sum(map(dense, blocks)))


def test_explicit_rows_are_taken_as_a_product_leaves_them() -> None:
    """Patches with their channels last: no transposing copy of the rows."""
    found = explicit([make_block("kbto,btji->kboij")], kernels())
    assert found.equation == "kboji->kboij"


@pytest.mark.parametrize("equation", ["kboij->kboij", "kboji->kboij"])
def test_explicit_rows_are_there_already(equation: str) -> None:
    """They are not formed again, nor cut into parts that would have to be copied."""
    block = make_block(equation)
    plan = best(block, 1)
    assert plan.method == "rows"
    with Copies() as copies:
        found = products("gram", [block], (), kernels(1))
    assert 0 < copies.elements < block.operands[0].numel()
    assert_close_to_reference(found, gramian_of(dense(block)))


def test_blocks_of_equal_form_are_merged() -> None:
    blocks = [make_block("kbto,bti->kboi") for _ in range(3)] + [make_block("kbo,bi->kboi")]
    merged = merge(blocks, kernels())
    assert len(merged) == 2
    assert_close_to_reference(sum(map(dense, merged)), sum(map(dense, blocks)))


def test_positions_of_any_number_are_joined() -> None:
    block = make_block("kbto,bti->kboi")
    g, x = block.operands
    short = Block("kbto,bti->kboi", (g[:, :, :1], x[:, :1]))
    (joined,) = merge([block, short], kernels())
    torch.testing.assert_close(
        rows([joined], kernels()), rows([block], kernels()) + rows([short], kernels())
    )


def test_shapes_tell_forms_apart() -> None:
    block = Block("kbo,bi->kboi", (torch.randn(2, 3, 6), torch.randn(3, 7)))
    other = Block("kbo,bi->kboi", (torch.randn(2, 3, 6), torch.randn(1, 7)))
    assert len(merge([block, other], kernels())) == 2


def test_plans_are_found_once() -> None:
    block = make_block("kbo->kbo")
    assert best(block, 100) is best(block, 100)


@pytest.mark.parametrize("samples", [33, 64])
@pytest.mark.parametrize("elements", [16384, 16381])
def test_long_rows_are_multiplied_in_parts(samples: int, elements: int) -> None:
    """Of which one half is the mirror of the other."""
    dense_rows = torch.randn(1, samples, elements)
    block = Block("kbo->kbo", (dense_rows,))
    expected = (dense_rows[0] @ dense_rows[0].T).view(1, samples, 1, samples)
    assert_close_to_reference(products("gram", [block], (), kernels()), expected)


def test_factors_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_WORTH_MIRRORING", 0)
    block = Block("kbo,bi->kboi", (torch.randn(2, 70, 6), torch.randn(70, 7)))
    assert best(block, 2**30).method == "factors"
    flat = rows([block], kernels()).reshape(140, -1)
    assert_close_to_reference(
        products("gram", [block], (), kernels()), (flat @ flat.T).view(2, 70, 2, 70)
    )


def test_factors_that_repeat_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expanded cotangent and patches of an image: memory for one copy is not enough for two."""
    monkeypatch.setattr(cpu, "_WORTH_MIRRORING", 0)
    monkeypatch.setattr(cpu, "_FEWEST_SAMPLES", 2)
    cotangent = torch.randn(1, 4, 1, 3).expand(1, 4, 5, 3)
    patches = torch.randn(4, 7, 2).unfold(1, 3, 1)
    block = Block("kbto,btix->kboix", (cotangent, patches))
    by_factors = next(
        plan for plan in plans("gram", [block], (), kernels()) if plan.method == "factors"
    )
    found = by_factors([block], (), kernels())
    assert_close_to_reference(found, gramian_of(dense(block)))


@pytest.mark.parametrize("is_first", [True, False])
def test_factors_are_multiplied_by_rows_as_rows(is_first: bool) -> None:
    """Rows that are there cost nothing, and the others get their order."""
    operands = torch.randn(1, 30, 5, 6), torch.randn(30, 5, 7)
    factors = Block("kbto,bti->kboi", operands)
    rows_there = Block("kbio->kboi", (torch.randn(1, 20, 7, 6),))
    pair = [factors, rows_there] if is_first else [rows_there, factors]
    plan, other = plans("cross", pair[:1], pair[1:], kernels())
    assert (plan.method, other.method) == ("rows", "factors")
    assert plan.cost == other.cost
    with Copies() as copies:
        found = plan(pair[:1], pair[1:], kernels())
    with Copies() as others:
        other(pair[:1], pair[1:], kernels())
    assert 0 < copies.elements < others.elements
    first, second = [dense(block).flatten(2).flatten(0, 1) for block in pair]
    assert_close_to_reference(found.flatten(0, 1).flatten(1), first @ second.T)
