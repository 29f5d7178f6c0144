"""Einsums along paths."""

import subprocess
import sys
from collections.abc import Sequence
from math import prod
from textwrap import dedent

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from autogram._blocks.kernels.base import Kernels, Limit
from autogram._blocks.kernels.contraction import repeats
from autogram._blocks.kernels.cpu import CpuKernels
from autogram._blocks.kernels.cuda import CudaKernels
from autogram._blocks.kernels.paths import OperandShapes, find_path
from autogram._blocks.kernels.workspace import Purpose
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
        ("kbct,bct->kbc", ((1, 6, 700, 800), (6, 700, 800))),  # parts of the samples
        ("kbct,bct->kct", ((2, 3, 700, 800), (3, 700, 800))),  # of a sum over them
        ("bct,ct->bc", ((6, 700, 800), (700, 800))),  # one side is broadcast
        ("tbc,tbc->c", ((700, 8, 400), (700, 8, 400))),
        ("ta,ta->", ((1500, 1600), (1500, 1600))),
    ],
)
def test_a_large_product_is_summed_in_parts(equation: str, shapes: OperandShapes) -> None:
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


class Small(CpuKernels):
    """Copies few elements at once, and counts."""

    def __init__(self, at_once: int) -> None:
        super().__init__(Limit(2**40))
        self.most = at_once
        self.copied: list[int] = []

    @override
    def at_once(self, elements: int, like: Tensor) -> int:
        return min(elements, self.most)

    @override
    def scratch(self, shape: Sequence[int], like: Tensor, purpose: Purpose = "rows") -> Tensor:
        self.copied.append(prod(shape))
        return super().scratch(shape, like, purpose)


@pytest.mark.parametrize("of", [Kernels, CpuKernels, CudaKernels])
@pytest.mark.parametrize(
    ("equation", "in_memory"),
    [
        ("j,jbt,j->bt", ("j", "bjt", "j")),
        ("bt,obtj,tbo->tj", ("bt", "tobj", "otb")),
        ("btj,jt,jt->tbj", ("bjt", "tj", "tj")),
        ("t,bjto,tob->jb", ("t", "bojt", "bto")),
    ],
)
def test_results_are_read_as_they_lie(
    of: type[Kernels], equation: str, in_memory: Sequence[str]
) -> None:
    """A product of operands that do not lie in order lies as they do, and is multiplied again."""
    sizes = {"b": 4, "o": 2, "t": 3, "j": 5}
    operands = [
        torch.randn([sizes[x] for x in order]).permute([order.index(x) for x in labels])
        for labels, order in zip(equation.split("->")[0].split(","), in_memory, strict=True)
    ]
    found = of(Limit(2**40)).einsum(equation, operands)
    assert_close_to_reference(found, torch.einsum(equation, *operands))


class Calls(TorchFunctionMode):
    """Notes the names of calls that compute a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.names.append(func.__name__)
        return found


@pytest.mark.parametrize(
    ("equation", "shapes", "names"),
    [
        ("bit,bto->bio", ((2, 3, 4), (2, 4, 5)), ["bmm"]),
        ("kbit,bto->kbio", ((1, 2, 3, 4), (2, 4, 5)), ["as_strided", "bmm", "view"]),
        ("bto,bto->bo", ((2, 3, 4), (2, 3, 4)), ["to", "mul", "sum"]),
        ("bto->bo", ((2, 3, 4),), ["sum"]),
    ],
)
def test_what_lies_in_order_is_not_viewed(
    equation: str, shapes: OperandShapes, names: list[str]
) -> None:
    operands = [torch.randn(shape) for shape in shapes]
    of_cpu = kernels()
    of_cpu.einsum(equation, operands)  # which may ask how they lie
    with Calls() as calls:
        of_cpu.einsum(equation, operands)
    assert calls.names == names


def test_the_first_step_imports_no_compiler() -> None:
    """It takes a second or two, and what is imported keeps the frames that are running."""
    code = """
        import sys
        import torch
        from torch import nn
        from autogram import Engine

        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Linear(6, 2))
        engine = Engine(model)
        engine.compute_gramian(model(torch.randn(2, 3, 8, 8)).square().sum((1, 2, 3)))
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", dedent(code)], check=True)


# Where the batch lies in patches: first, behind another index, and beside a second one.
COPIES = [
    ("kbot,btxi->kboix", ((1, 7, 2, 8), (7, 8, 3, 5))),
    ("kbot,tbxi->kbxoi", ((2, 7, 3, 8), (8, 7, 3, 5))),
    ("btxi,bot->boxi", ((7, 8, 3, 5), (7, 2, 8))),
    ("kbqot,btxqi->kbqoix", ((1, 7, 2, 3, 8), (7, 8, 3, 2, 5))),
]


@pytest.mark.parametrize("at_once", [1, 8 * 3 * 5 * 2, 500, 2**20])
@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize(("equation", "shapes"), COPIES)
def test_factors_are_copied_for_some_samples_at_a_time(
    equation: str, shapes: OperandShapes, has_memory: bool, at_once: int
) -> None:
    """The product is whole, with the strides that it has in one piece."""
    terms = equation.split("->")[0].split(",")
    operands = [
        patches(shape, labels) if "x" in labels else torch.randn(shape)
        for labels, shape in zip(terms, shapes, strict=True)
    ]
    small, memory = Small(at_once), (lambda shape, like: like.new_empty(shape))
    found = small.einsum(equation, operands, memory if has_memory else None)
    assert_close_to_reference(found, torch.einsum(equation, *operands))
    whole = kernels().einsum(equation, operands)
    assert found.stride() == whole.stride()
    of_sample = max(x.numel() for x in operands if repeats(x)) // 7
    assert max(small.copied) <= max(at_once, of_sample)


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("equation", ["kbqot,btxqi->kbqoix", "btxqi,kbqot->kbqoix"])
def test_factors_of_one_sample_are_copied_for_some_groups_at_a_time(
    equation: str, has_memory: bool
) -> None:
    shapes = {"kbqot": (1, 3, 4, 2, 8), "btxqi": (3, 8, 3, 4, 5)}
    operands = [
        patches(shapes[labels], labels) if "x" in labels else torch.randn(shapes[labels])
        for labels in equation.split("->")[0].split(",")
    ]
    small, memory = Small(2 * 8 * 3 * 5), (lambda shape, like: like.new_empty(shape))
    found = small.einsum(equation, operands, memory if has_memory else None)
    assert_close_to_reference(found, torch.einsum(equation, *operands))
    assert max(small.copied) <= small.most


@pytest.mark.parametrize(
    "shapes", [((1, 7, 2, 0, 8), (7, 8, 3, 2, 5)), ((1, 7, 2, 3, 8), (7, 8, 3, 2, 0))]
)
def test_products_without_elements_are_made_in_parts(shapes: OperandShapes) -> None:
    """Of the other operand, too much would be copied at once."""
    operands = [torch.randn(shapes[0]), torch.randn(shapes[1])]
    operands = [x.transpose(1, -1).contiguous().transpose(1, -1) for x in operands]
    found = Small(10).einsum("kbqot,btxqi->kbqoix", operands)
    assert found.shape == (1, 7, 2, shapes[0][3], shapes[1][4], 3)


def patches(shape: tuple[int, ...], labels: str) -> Tensor:
    """Windows along ``t``, whose positions are counted by ``x``."""
    sizes = dict(zip(labels, shape, strict=True))
    others = [label for label in labels if label not in "tx"]
    signal = torch.randn([*[sizes[label] for label in others], sizes["t"] + sizes["x"] - 1])
    order = [*others, "t", "x"]
    return signal.unfold(-1, sizes["x"], 1).permute([order.index(label) for label in labels])
