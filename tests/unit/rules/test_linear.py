"""Rules of matrix products."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.checks import ModelFactory, Objectives
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


def addmm_folded(x, bias, weight):
    """The layer of some language models: positions folded behind the samples."""
    return torch.addmm(bias, x.reshape(-1, 4), weight).view(*x.shape[:-1], 5)


def folded(x, weight):
    return F.linear(x.reshape(-1, 4), weight).view(*x.shape[:-1], -1)


def sequence_first(x, weight):
    return F.linear(x.transpose(0, 1), weight).transpose(0, 1)


def folded_sequence_first(x, weight):
    t, b = x.shape[1], x.shape[0]
    return F.linear(x.transpose(0, 1).reshape(t * b, 4), weight).view(t, b, -1).transpose(0, 1)


def folded_in_the_middle(x, weight):
    """Samples between two other dimensions of the fold."""
    b, t, s, i = x.shape
    flat = x.permute(1, 0, 2, 3).reshape(t * b * s, i)
    return F.linear(flat, weight).view(t, b, s, -1).transpose(0, 1)


def addmm_in_place(x, mat):
    y = x.clone()
    return y.addmm_(y.detach().sin(), mat, beta=0.5, alpha=-2)


def baddbmm_in_place(x, mat):
    y = x.clone()
    return y.baddbmm_(y.detach().sin(), mat, alpha=0.5)


CASES = [
    pytest.param(call(F.linear, (5, 4), (5,)), (3, 4), id="linear"),
    pytest.param(call(F.linear, (5, 4)), (3, 4), id="linear without bias"),
    pytest.param(call(F.linear, (5, 4), (5,)), (3, 7, 4), id="linear, few positions"),
    pytest.param(call(F.linear, (5, 4), (5,)), (3, 40, 4), id="linear, many positions"),
    pytest.param(
        call(F.linear, (5, 4), (5,)), (3, 2, 6, 4), id="linear, two dimensions of positions"
    ),
    pytest.param(call(F.linear, (3, 3), (3,)), (3, 3, 3), id="linear, all sizes equal"),
    pytest.param(call(F.linear, (1, 4), (1,)), (3, 4), id="linear, one output"),
    pytest.param(call(F.linear, (5, 1), (5,)), (3, 1), id="linear, one input"),
    pytest.param(
        call(lambda x, w, c: F.linear(bias=c, input=x, weight=w), (5, 4), (5,)),
        (3, 4),
        id="linear by keywords",
    ),
    pytest.param(call(folded, (5, 4)), (3, 2, 4), id="linear, folded"),
    pytest.param(call(sequence_first, (5, 4)), (3, 2, 4), id="linear, sequence first"),
    pytest.param(
        call(folded_sequence_first, (5, 4)), (3, 2, 4), id="linear, folded sequence first"
    ),
    pytest.param(
        call(folded_in_the_middle, (5, 4)), (3, 2, 2, 4), id="linear, folded in the middle"
    ),
    pytest.param(
        call(folded_sequence_first, (5, 4)), (3, 3, 4), id="linear, as many tokens as samples"
    ),
    pytest.param(call(torch.matmul, (4, 5)), (3, 4), id="matmul"),
    pytest.param(call(torch.matmul, (4, 5)), (3, 2, 4), id="matmul, positions"),
    pytest.param(call(torch.Tensor.matmul, (4, 5)), (3, 2, 4), id="method matmul"),
    pytest.param(call(lambda x, w: x @ w, (4, 5)), (3, 2, 4), id="x @ w"),
    pytest.param(call(lambda x, w: w @ x, (5, 2)), (3, 2, 4), id="w @ x"),
    pytest.param(call(lambda x, w: (w @ x.T).T, (5, 4)), (3, 4), id="w @ x.T"),
    pytest.param(call(lambda x, w: w.__rmatmul__(x), (4, 5)), (3, 4), id="reversed x @ w"),
    pytest.param(call(lambda x, w: x.__rmatmul__(w), (5, 2)), (3, 2, 4), id="reversed w @ x"),
    pytest.param(call(lambda x, w: x @ w.T, (5, 4)), (3, 2, 4), id="x @ w.T"),
    pytest.param(call(lambda x, v: x @ v, (4,)), (3, 4), id="x @ vector"),
    pytest.param(call(lambda x, v: x @ v, (4,)), (3, 2, 4), id="positions @ vector"),
    pytest.param(call(lambda x, v: v @ x, (2,)), (3, 2, 4), id="vector @ x"),
    pytest.param(call(lambda x, w: x @ w, (3, 4, 5)), (3, 2, 4), id="one weight for each sample"),
    pytest.param(call(lambda x, w: x.unsqueeze(1) @ w, (6, 4, 5)), (3, 2, 4), id="x @ heads"),
    pytest.param(call(lambda x, w: w @ x.unsqueeze(1), (6, 5, 2)), (3, 2, 4), id="heads @ x"),
    pytest.param(call(lambda x, w: x @ w, (1, 4, 5)), (3, 2, 4), id="x @ weight of one head"),
    pytest.param(
        call(lambda x, w: x @ w, (2, 1, 4, 5)), (3, 1, 6, 2, 4), id="broadcast in the middle"
    ),
    pytest.param(
        call(lambda x, w: x.unsqueeze(-2) @ w, (2, 4, 5)), (3, 2, 4), id="own weight of a token"
    ),
    pytest.param(call(torch.mm, (4, 5)), (3, 4), id="mm"),
    pytest.param(call(lambda x, w: torch.mm(w, x.T).T, (5, 4)), (3, 4), id="mm, weight left"),
    pytest.param(call(torch.Tensor.mm, (4, 5)), (3, 4), id="method mm"),
    pytest.param(call(torch.bmm, (3, 4, 5)), (3, 2, 4), id="bmm, one weight for each sample"),
    pytest.param(
        call(lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), (2, 4, 5)),
        (3, 2, 4),
        id="bmm, one weight for each token",
    ),
    pytest.param(
        call(lambda x, w: w.bmm(x.permute(1, 2, 0)).permute(2, 0, 1), (2, 5, 4)),
        (3, 2, 4),
        id="method bmm, weight left",
    ),
    pytest.param(call(lambda x, w, c: torch.addmm(c, x, w), (4, 5), (5,)), (3, 4), id="addmm"),
    pytest.param(
        call(lambda x, w, c: c.addmm(x, w, beta=3, alpha=-2), (4, 5), (3, 5)),
        (3, 4),
        id="method addmm, scaled, one bias for each sample",
    ),
    pytest.param(call(addmm_folded, (5,), (4, 5)), (3, 2, 4), id="addmm, folded"),
    pytest.param(call(addmm_in_place, (4, 4)), (3, 4), id="addmm_"),
    pytest.param(
        call(lambda x, w, c: torch.baddbmm(c, x, w, beta=0.5, alpha=2), (3, 4, 5), (5,)),
        (3, 2, 4),
        id="baddbmm",
    ),
    pytest.param(
        call(lambda x, w, c: c.baddbmm(x, w), (3, 4, 5), (1, 2, 5)),
        (3, 2, 4),
        id="method baddbmm",
    ),
    pytest.param(call(baddbmm_in_place, (3, 4, 4)), (3, 2, 4), id="baddbmm_"),
    pytest.param(call(lambda x, w: torch.einsum("bi,io->bo", x, w), (4, 5)), (3, 4), id="einsum"),
    pytest.param(
        call(lambda x, w: torch.einsum("bi, io", x, w), (4, 5)), (3, 4), id="einsum, implicit"
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("zi,ia", x, w).T, (4, 5)),
        (3, 4),
        id="einsum, implicit and sorted",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("...i,oi->...o", x, w), (5, 4)),
        (3, 2, 6, 4),
        id="einsum, ellipsis",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("...i,...i->...", x, w), (2, 4)),
        (3, 2, 4),
        id="einsum, broadcast ellipsis",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("...ti,io", x, w), (4, 5)),
        (3, 2, 4),
        id="einsum, implicit ellipsis",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("bti,hio->bhto", [x, w]), (6, 4, 5)),
        (3, 2, 4),
        id="einsum, list of operands",
    ),
    pytest.param(
        call(lambda x, w, v: torch.einsum("bi,io,op->bp", x, w, v), (4, 5), (5, 6)),
        (3, 4),
        id="einsum, two weights",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("bi,bj,oij->bo", x, x.sin(), w), (5, 4, 4)),
        (3, 4),
        id="einsum, three operands",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("bti,ti->b", x, w), (2, 4)), (3, 2, 4), id="einsum, dot"
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("tbi,io->bto", x.transpose(0, 1), w), (4, 5)),
        (3, 2, 4),
        id="einsum, sequence first",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum(x, [0, 1], w, [1, 2], [0, 2]), (4, 5)),
        (3, 4),
        id="einsum, numbers for indices",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("bi,ii->bi", x, w), (4, 4)), (3, 4), id="einsum, diagonal"
    ),
]


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of all samples, of which each third goes to another of three matrices."""
    rows = x.flatten(0, 1)
    ends = torch.tensor([1, 3, 4], dtype=torch.int32) * (len(rows) // 4)
    return F.grouped_mm(rows, weight, offs=ends).view(*x.shape[:2], -1)


# Of functions that take nothing longer.
FLOAT32_CASES = [pytest.param(call(grouped, (3, 4, 8)), (4, 6, 4), id="grouped_mm")]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), FLOAT32_CASES)
def test_gramian_is_exact_in_float32(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    torch.set_default_dtype(torch.float32)
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)
