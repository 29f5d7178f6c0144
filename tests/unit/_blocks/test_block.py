"""Blocks, and how they are assembled from an equation that does not know the samples."""

import pytest
import torch
from torch import Tensor

from autogram._blocks import Folded, Layout, block_of_equation
from tests.unit._blocks.blocks import EQUATIONS, dense, make_block
from tests.unit.checks import assert_close_to_reference

B, T, K = 3, 4, 2


def masked(layout: Layout, x: Tensor, dim: int, sample: int) -> Tensor:
    """A tensor with zeros at all other samples."""
    places = torch.arange(layout.before * layout.batch * layout.after) // layout.after
    keep = (places % layout.batch == sample).view(-1, *(1,) * (x.dim() - dim - 1))
    return x * keep


# Equation, dimensions of the output, layout, shapes of the output and of the factors.
ASSEMBLIES = [
    pytest.param("to,ti->oi", Folded(0, 1, B, 1), (B, 5), [(B, 6)], id="linear"),
    pytest.param("TSo,TSi->oi", Folded(0, 1, B, 1), (B, T, 5), [(B, T, 6)], id="positions"),
    pytest.param("TSo,TSi->oi", Folded(1, 1, B, 1), (T, B, 5), [(T, B, 6)], id="sequence first"),
    pytest.param("to,ti->oi", Folded(0, 1, B, T), (B * T, 5), [(B * T, 6)], id="tokens behind"),
    pytest.param("to,ti->oi", Folded(0, T, B, 1), (B * T, 5), [(B * T, 6)], id="tokens before"),
    pytest.param("to,ti->oi", Folded(0, 2, B, 2), (B * T, 5), [(B * T, 6)], id="tokens around"),
    pytest.param("TSo->o", Folded(1, 1, B, 1), (T, B, 5), [], id="bias"),
    pytest.param("TSo,So->o", Folded(0, 1, B, 1), (B, T, 5), [(T, 5)], id="factor without samples"),
    pytest.param("to->to", Folded(0, 1, B, 1), (B, 5), [], id="own row of a sample"),
    pytest.param("to,to->to", Folded(0, 1, B, 2), (B * 2, 5), [(B * 2, 5)], id="own rows, folded"),
    pytest.param("to->to", Folded(0, 2, B, 1), (B * 2, 5), [], id="own rows, folded before"),
    pytest.param("TSo,TSi->To1i", Folded(0, 1, B, 1), (B, T, 5), [(B, T, 6)], id="own matrix"),
]


@pytest.mark.parametrize(("equation", "layout", "output", "factors"), ASSEMBLIES)
def test_rows_of_a_sample_are_those_of_its_cotangent_alone(
    equation: str, layout: Layout, output: tuple[int, ...], factors: list[tuple[int, ...]]
) -> None:
    equation = equation.replace("1", "")
    cotangent = torch.randn(K, *output)
    saved = [torch.randn(shape) for shape in factors]
    dims = equation.split("->")[0].split(",")[0]

    block = block_of_equation(equation, dims, layout, cotangent, *saved)

    terms, tensor = equation.split("->")
    expected = torch.stack(
        [
            torch.einsum(
                f"k{terms}->k{tensor}", masked(layout, cotangent, layout.dim + 1, b), *saved
            )
            for b in range(B)
        ],
        1,
    )
    assert_close_to_reference(dense(block), expected)


def test_one_sample() -> None:
    g, x = torch.randn(K, T, 5), torch.randn(T, 6)
    block = block_of_equation("to,ti->oi", "to", None, g, x)
    assert_close_to_reference(dense(block), torch.einsum("kto,ti->koi", g, x).unsqueeze(1))


@pytest.mark.parametrize("equation", EQUATIONS)
def test_chunks_are_the_parts_of_the_rows(equation: str) -> None:
    block = make_block(equation)
    for place, label in enumerate(equation.split("->")[1]):
        if label == "k":
            continue
        for count in (1, 2, 100):
            parts = [dense(part) for part in block.chunks(label, count)]
            assert len(parts) <= min(count, block.sizes[label])
            assert_close_to_reference(torch.cat(parts, place), dense(block))


def test_description() -> None:
    block = make_block("kbto,bti->kboi")
    assert block.inputs == ("kbto", "bti")
    assert block.parameter == "oi"
    assert block.shapes == ((2, 3, 5, 6), (3, 5, 7))
    assert block.sizes == {"k": 2, "b": 3, "t": 5, "o": 6, "i": 7}
