"""Calls without a rule, of every kind: rows through the nodes that the call recorded."""

import pytest
import torch
from torch.nn import functional as F

from tests.unit.checks import (
    ModelFactory,
    Objectives,
    assert_gramian_is_exact,
    assert_same_but_for_last_bits,
)
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


def keys_are_values(x, p):
    return F.scaled_dot_product_attention(x, p, p, is_causal=True)


def first_of_split(x, p):
    left, right = torch.functional.split(x * p, 2, 1)
    return left * right


def spread(x, p):
    variance, mean = torch.var_mean(torch.maximum(x, p), dim=1)
    return torch.stack([variance, mean], 1)


def both_outputs(x, p):
    """A call with two outputs, which both depend on the parameter."""
    values, vectors = torch.linalg.eigh(x.mT @ x + torch.diag_embed(p.expand(len(x), 4)))
    return torch.cat([values.unsqueeze(1), vectors.square()], 1)


def one_of_two_outputs(x, p):
    values, _ = torch.frexp(x * 2)
    mean, std = torch.var_mean(torch.stack([values, p.expand_as(x)], 2), 2)
    return mean + 0 * std


def filled_by_mask(x, p):
    y = x * 2
    y[y > 0] = p
    return y


def lerped_in_place(x, p):
    y = x.sin()
    return y.lerp_(p, 0.3)


def powered_in_place(x, p):
    y = x.square() + 1
    y **= p
    return y


def copied(x, p):
    y = torch.zeros_like(x)
    y.copy_(p)
    return y * x


def into_output(x, p):
    """Dropout directly behind the call, from the same generator."""
    return F.dropout(F.cosine_similarity(x.unsqueeze(1), p, dim=-1), 0.5)


CASES = [
    pytest.param(call(torch.cdist, (5, 4)), (3, 2, 4), id="cdist"),
    pytest.param(
        call(lambda x, p: torch.cdist(x, p), (5, 4)), (3, 4), id="cdist, samples are rows"
    ),
    pytest.param(
        call(lambda x, p: F.cosine_similarity(x.unsqueeze(1), p, dim=-1), (5, 4)),
        (3, 4),
        id="cosine similarity",
    ),
    pytest.param(call(into_output, (5, 4)), (3, 4), id="dropout follows"),
    pytest.param(
        call(lambda x, p: F.dropout(x, 0.5) * F.dropout(p.expand_as(x), 0.5), (4,)),
        (3, 4),
        id="dropout of an expanded parameter",
    ),
    pytest.param(call(lambda x, p: torch.lerp(x, p, 0.3), (4,)), (3, 4), id="lerp"),
    pytest.param(
        call(lambda x, p, q: torch.lerp(p, x, q), (4,), (4,)), (3, 4), id="lerp, two of them"
    ),
    pytest.param(call(lambda x, p: x.lerp(x.sin(), p), (4,)), (3, 4), id="lerp, weight"),
    pytest.param(call(lerped_in_place, (3, 4)), (3, 4), id="lerp_"),
    pytest.param(call(lambda x, p: torch.addcmul(x, p, x, value=2), (4,)), (3, 4), id="addcmul"),
    pytest.param(call(lambda x, p: torch.addcmul(x, p, p), (4,)), (3, 4), id="addcmul, twice"),
    pytest.param(call(keys_are_values, (3, 4)), (3, 2, 4), id="attention, keys are values"),
    pytest.param(call(lambda x, p: torch.addcdiv(x, x, p), (4,)), (3, 4), id="addcdiv"),
    pytest.param(call(torch.max, (4,)), (3, 4), id="max(x, p)"),
    pytest.param(call(lambda x, p: torch.minimum(p, x), (4,)), (3, 4), id="minimum(p, x)"),
    pytest.param(call(torch.logaddexp, (4,)), (3, 4), id="logaddexp"),
    pytest.param(call(torch.atan2, (4,)), (3, 4), id="atan2"),
    pytest.param(call(torch.hypot, (1,)), (3, 4), id="hypot"),
    pytest.param(
        call(lambda x, p: torch.clamp(x, min=p, max=p + 1), (4,)), (3, 4), id="clamp between two"
    ),
    pytest.param(call(lambda x, p: x.masked_fill(x > 0, p), ()), (3, 4), id="masked_fill"),
    pytest.param(call(filled_by_mask, ()), (3, 4), id="x[mask] = p"),
    pytest.param(call(copied, (4,)), (3, 4), id="copy_"),
    pytest.param(call(torch.kron, (1, 2)), (3, 4), id="kron"),
    pytest.param(call(lambda x, p: torch.tensordot(x, p, 1), (4, 5)), (3, 4), id="tensordot"),
    pytest.param(call(lambda x, p: torch.linalg.solve(p, x.mT).mT, (4, 4)), (3, 2, 4), id="solve"),
    pytest.param(call(lambda x, p: x.mv(p), (4,)), (3, 4), id="mv"),
    pytest.param(call(lambda x, p: torch.inner(x, p), (5, 4)), (3, 4), id="inner"),
    pytest.param(call(lambda x, p: torch.outer(x[:, 0], p), (5,)), (3, 4), id="outer"),
    pytest.param(
        call(lambda x, w: torch.einsum(x, [0, 1], w, [1, 2], [0, 2]), (4, 5)),
        (3, 4),
        id="einsum with lists of indices",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("bi,ii->bi", x, w), (4, 4)),
        (3, 4),
        id="einsum, index repeated within a term",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("bi,io->b", x, w), (4, 5)),
        (3, 4),
        id="einsum, index in one term alone",
    ),
    pytest.param(
        call(lambda x, w: torch.einsum("bi,...->b...", x, w), (5,)),
        (3, 4),
        id="einsum, ellipsis in one term alone",
    ),
    pytest.param(
        call(lambda x, p: torch.div(x, p.exp(), rounding_mode=None) + p * 0, (4,)),
        (3, 4),
        id="div, no rounding",
    ),
    pytest.param(
        call(lambda x, p: torch.div(x, p.exp(), rounding_mode="floor") * p, (4,)),
        (3, 4),
        id="div, rounding",
    ),
    pytest.param(
        call(
            lambda x, w, c: F.multi_head_attention_forward(
                x.transpose(0, 1),
                x.transpose(0, 1),
                x.transpose(0, 1),
                4,
                2,
                w,
                c,
                None,
                None,
                False,
                0.0,
                torch.eye(4),
                None,
                need_weights=False,
            )[0].transpose(0, 1),
            (12, 4),
            (12,),
        ),
        (3, 2, 4),
        id="multi-head attention, a composite",
    ),
    pytest.param(
        call(lambda x, p: x.index_add(1, torch.tensor([0, 2]), p), (3, 2)),
        (3, 4),
        id="index_add",
    ),
    pytest.param(
        call(lambda x, p: x.scatter(1, torch.zeros(3, 2).long() + torch.arange(2), p), (3, 2)),
        (3, 4),
        id="scatter",
    ),
    pytest.param(call(first_of_split, (4,)), (3, 4), id="split of a product"),
    pytest.param(call(spread, (4,)), (3, 4), id="two outputs behind"),
    pytest.param(call(both_outputs, (4,)), (3, 4, 4), id="two outputs"),
    pytest.param(call(one_of_two_outputs, (4,)), (3, 4), id="two outputs, of a stack"),
    pytest.param(
        call(lambda x, p: torch.lerp(p, p * 2, x), (4,)), (3, 4), id="a tensor and its derived one"
    ),
    pytest.param(
        call(lambda x, p: torch.addcmul(p.exp(), p, x), (4,)), (3, 4), id="a derived one and itself"
    ),
    pytest.param(call(F.linear, (4,)), (3, 4), id="linear with a vector"),
    pytest.param(
        call(lambda x, p: torch.take_along_dim(p, (x > 0).long(), 1) * x, (3, 4)),
        (3, 4),
        id="take_along_dim",
    ),
    pytest.param(call(lambda x, p: p.take((x > 0).long()) * x, (4,)), (3, 4), id="take"),
    pytest.param(
        call(lambda x, p: p.expand(3, 4).gather(1, (x > 0).long()) * x, (4,)), (3, 4), id="gather"
    ),
    pytest.param(
        call(lambda x, w, v: torch.linalg.multi_dot([x, w, v]), (4, 5), (5, 6)),
        (3, 4),
        id="multi_dot",
    ),
    pytest.param(
        call(
            lambda x, p: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(p), n=4), (3, 2)
        ),
        (3, 4),
        id="complex filter",
    ),
    pytest.param(
        call(lambda x, p: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(p), n=4), (4,)),
        (3, 4),
        id="spectrum of a parameter",
    ),
    pytest.param(
        call(lambda x, p: (torch.fft.rfft(x) @ torch.view_as_complex(p)).abs(), (3, 5, 2)),
        (3, 4),
        id="complex weight",
    ),
    pytest.param(call(lambda x, p: (x * p * 1j + x).abs(), (4,)), (3, 4), id="imaginary part"),
    pytest.param(
        call(lambda x, w: torch.vmap(lambda v: F.linear(x, v))(w).movedim(0, 1).sin(), (6, 5, 4)),
        (3, 4),
        id="vmap over weights",
    ),
    pytest.param(
        call(lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x).sin(), (5, 4)),
        (3, 4),
        id="vmap over samples",
    ),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)


POWERS = [
    pytest.param(call(lambda x, p: (x.abs() + 1) ** p, (4,)), (3, 4), id="x ** p"),
    pytest.param(call(lambda x, p: (p.abs() + 1) ** x, (4,)), (3, 4), id="p ** x"),
    pytest.param(call(lambda x, p: torch.pow(p.abs() + 1, x), (1,)), (3, 4), id="pow(p, x)"),
    pytest.param(call(powered_in_place, (4,)), (3, 4), id="x **= p"),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), POWERS)
def test_powers(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    """Their gradients have powers of expanded parameters, which may have other last bits."""
    x = torch.randn(shape)
    assert_rule_is_exact(make_model, x, wrap, objectives, assert_same_but_for_last_bits)


@pytest.mark.parametrize("limit", [1, 100, 2**29])
def test_memory_limit_does_not_matter(limit: int) -> None:
    x = torch.randn(5, 2, 4)
    assert_gramian_is_exact(call(torch.cdist, (5, 4)), x, memory_limit_bytes=limit)


def test_second_input_of_another_size() -> None:
    """What the model is given first says how many samples there are."""
    model = call(lambda x, scale, p: x * p + scale.sum() * p, (4,))
    assert_gramian_is_exact(model, torch.randn(3, 4), torch.randn(7))
