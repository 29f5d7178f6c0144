"""Rules of broadcast arithmetic, in all its forms."""

import operator

import pytest
import torch
from torch import nn

from autogram import Engine
from tests.unit.checks import ModelFactory, Objectives, assert_close_to_reference
from tests.unit.environment import DEVICE
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


def in_place(function):
    """A call that changes its first argument: a copy of the input, in its own right or a view."""

    def changed(x, *parameters):
        x = x.clone()
        y = function(x, *parameters)
        assert y is x
        return x

    return changed


def add_to_activation(x, p):
    """The usual residual form: the old value is not needed any more."""
    y = x.sin() * 2
    y += p
    return y


def scaled_twice_in_place(x, p, q):
    y = x.sin() * 2
    y *= p
    y /= q.exp()
    y -= p
    return y


def in_place_on_view(x, p):
    """One column of an activation changes, and with it the activation."""
    y = x.sin() * 2
    y[:, 0] += p
    return y


def in_place_on_part(x, p):
    y = x.sin() * 2
    y.narrow(1, 2, 2).mul_(p)
    return y


def filled(x, p):
    """`x[...] = p` on an activation."""
    y = x.sin() * 2
    y[:, 1] = p
    return y


def filled_all(x, p):
    y = x.sin() * 2
    y[...] = p
    return y + x


def clamped(x, p):
    return x.relu_() + p


METHODS = [
    *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "subtract"),
    *("mul", "__mul__", "__rmul__", "multiply"),
]
METHODS_IN_PLACE = [
    *("add_", "__iadd__", "sub_", "__isub__", "subtract_", "mul_", "__imul__", "multiply_"),
]
DIVISIONS = ["div", "__truediv__", "__rtruediv__", "divide", "true_divide"]
DIVISIONS_IN_PLACE = ["div_", "__itruediv__", "__idiv__", "divide_", "true_divide_"]
FUNCTIONS = ["add", "sub", "subtract", "mul", "multiply", "rsub"]

SHAPES = [
    pytest.param((), id="scalar"),
    pytest.param((1,), id="one"),
    pytest.param((4,), id="vector"),
    pytest.param((2, 4), id="matrix"),
    pytest.param((2, 1), id="column"),
    pytest.param((1, 1, 4), id="leading ones"),
    pytest.param((3, 2, 4), id="one for each sample"),
    pytest.param((3, 1, 4), id="one for each sample, broadcast"),
]


def method(name):
    return lambda x, p: getattr(x, name)(p)


def of_parameter(name):
    return lambda x, p: getattr(p, name)(x)


def away_from_zero(p):
    return p.abs() + 0.5


CASES = [
    *(pytest.param(call(method(name), (4,)), (3, 4), id=f"x.{name}(p)") for name in METHODS),
    *(pytest.param(call(of_parameter(name), (4,)), (3, 4), id=f"p.{name}(x)") for name in METHODS),
    *(
        pytest.param(call(in_place(method(name)), (4,)), (3, 4), id=f"x.{name}(p)")
        for name in METHODS_IN_PLACE
    ),
    *(
        pytest.param(call(lambda x, p, f=f: getattr(torch, f)(x, p), (4,)), (3, 4), id=f"{f}(x, p)")
        for f in FUNCTIONS
    ),
    *(
        pytest.param(call(lambda x, p, f=f: getattr(torch, f)(p, x), (4,)), (3, 4), id=f"{f}(p, x)")
        for f in FUNCTIONS
    ),
    *(pytest.param(call(method(name), (4,)), (3, 4), id=f"x.{name}(p)") for name in DIVISIONS),
    *(
        pytest.param(
            call(lambda x, p, f=name: getattr(p, f)(away_from_zero(x)), (4,)),
            (3, 4),
            id=f"p.{name}(x)",
        )
        for name in DIVISIONS
    ),
    *(
        pytest.param(call(in_place(method(name)), (4,)), (3, 4), id=f"x.{name}(p)")
        for name in DIVISIONS_IN_PLACE
    ),
    *(
        pytest.param(call(lambda x, p, f=f: getattr(torch, f)(x, p), (4,)), (3, 4), id=f"{f}(x, p)")
        for f in ("div", "divide", "true_divide")
    ),
    pytest.param(call(lambda x, p: x + (1 - p), (4,)), (3, 4), id="1 - p"),
    pytest.param(call(lambda x, p: x * (1 - p), (4,)), (3, 4), id="x * (1 - p)"),
    pytest.param(call(lambda x, p: p - x, (4,)), (3, 4), id="p - x"),
    pytest.param(call(lambda x, p: x / (2 / p), (4,)), (3, 4), id="x / (2 / p)"),
    pytest.param(call(lambda x, p: 2 - p * x, (4,)), (3, 4), id="2 - p * x"),
    pytest.param(call(lambda x, p: p * x + (1 - p) * x.sin(), (4,)), (3, 4), id="gate"),
    pytest.param(
        call(lambda x, p: x * p[0] + p[1] - p[2] / x.exp(), (3,)), (3, 4), id="scalars of one"
    ),
    pytest.param(call(lambda x, p: torch.add(x, p, alpha=-3), (4,)), (3, 4), id="add(x, p, alpha)"),
    pytest.param(call(lambda x, p: torch.add(p, x, alpha=-3), (4,)), (3, 4), id="add(p, x, alpha)"),
    pytest.param(call(lambda x, p: x.sub(p, alpha=2.5), (4,)), (3, 4), id="sub(x, p, alpha)"),
    pytest.param(call(lambda x, p: p.sub(x, alpha=2.5), (4,)), (3, 4), id="sub(p, x, alpha)"),
    pytest.param(
        call(lambda x, p: torch.rsub(x, p, alpha=2), (4,)), (3, 4), id="rsub(x, p, alpha)"
    ),
    pytest.param(
        call(lambda x, p: torch.rsub(p, x, alpha=2), (4,)), (3, 4), id="rsub(p, x, alpha)"
    ),
    pytest.param(
        call(in_place(lambda x, p: x.add_(p, alpha=3)), (4,)), (3, 4), id="add_(p, alpha)"
    ),
    pytest.param(call(lambda x, p: torch.add(input=x, other=p), (4,)), (3, 4), id="by keywords"),
    pytest.param(
        call(lambda x, p: p * x.unsqueeze(1), (2, 4)), (3, 4), id="output larger than both"
    ),
    pytest.param(
        call(lambda x, p: p + x.unsqueeze(2), (5,)), (3, 4), id="output larger than both, sum"
    ),
    pytest.param(call(lambda x, p: x + p + p, (4,)), (3, 4), id="added twice"),
    pytest.param(call(lambda x, p: p * x * p, (4,)), (3, 4), id="multiplied twice"),
    pytest.param(
        call(lambda x, p: (x.transpose(0, 1) * p).transpose(0, 1), (4,)),
        (3, 2, 4),
        id="sequence first",
    ),
    pytest.param(
        call(lambda x, p: (x.reshape(-1, 4) + p).view(x.shape), (4,)), (3, 2, 4), id="folded"
    ),
    pytest.param(call(lambda x, p: x.round().long() * p, (4,)), (3, 4), id="integers * p"),
    pytest.param(call(lambda x, p: (x > 0) * p, (4,)), (3, 4), id="mask * p"),
    pytest.param(call(lambda x, p: p + 0 * x, (4,)), (3, 4), id="input without influence"),
    pytest.param(call(add_to_activation, (4,)), (3, 4), id="activation += p"),
    pytest.param(
        call(lambda x, p: x * p + p, (2, 4)), (3, *(1,) * 8, 2, 4), id="eleven dimensions"
    ),
    pytest.param(call(scaled_twice_in_place, (4,), (4,)), (3, 4), id="several in place"),
    pytest.param(call(in_place_on_view, ()), (3, 4), id="activation[:, 0] += p"),
    pytest.param(call(in_place_on_part, (2,)), (3, 4), id="part of an activation *= p"),
    pytest.param(call(filled, (2,)), (3, 4, 2), id="activation[:, 1] = p"),
    pytest.param(call(filled_all, (4,)), (3, 4), id="activation[...] = p"),
    pytest.param(call(clamped, (4,)), (3, 4), id="after an activation in place"),
    pytest.param(call(lambda x, p: torch.where(x > 0, x, p), (4,)), (3, 4), id="where(c, x, p)"),
    pytest.param(call(lambda x, p: torch.where(x > 0, p, x), (4,)), (3, 4), id="where(c, p, x)"),
    pytest.param(call(lambda x, p: x.where(x > 0, p), (4,)), (3, 4), id="x.where(c, p)"),
    pytest.param(call(lambda x, p: p.where(x > 0, x), (4,)), (3, 4), id="p.where(c, x)"),
    pytest.param(call(lambda x, p: torch.where(x > 0, p, 0.0), (4,)), (3, 4), id="where(c, p, 0)"),
    pytest.param(call(lambda x, p: torch.where(x > 0, p, p), (4,)), (3, 4), id="where(c, p, p)"),
    pytest.param(
        call(lambda x, p, q: torch.where(x > 0, p, q), (4,), ()), (3, 4), id="where(c, p, q)"
    ),
    pytest.param(
        call(lambda x, p: torch.where(x[:, 0, :1] > 0, p, x[:, 1]), (4,)),
        (3, 2, 4),
        id="where, condition for each sample",
    ),
    pytest.param(
        call(lambda x, p: torch.where(torch.arange(4) > 1, p, x), (4,)),
        (3, 4),
        id="where, constant condition",
    ),
    pytest.param(lambda: nn.PReLU(), (3, 4), id="prelu"),
    pytest.param(lambda: nn.PReLU(4), (3, 4, 2), id="prelu for each channel"),
    pytest.param(lambda: nn.PReLU(4), (3, 4), id="prelu for each channel, no positions"),
    pytest.param(call(torch.prelu, ()), (3, 4), id="prelu with a scalar"),
    pytest.param(lambda: nn.PReLU(), (3,), id="prelu of a vector"),
    pytest.param(call(lambda x, p: p.expand_as(x) * x, (4,)), (3, 4), id="expand_as"),
    pytest.param(
        call(lambda x, p: p.expand_as(x) * x, (2, 1)), (3, 2, 4), id="expand_as, inner too"
    ),
]

BROADCASTS = [
    pytest.param(operator.add, id="+"),
    pytest.param(operator.sub, id="-"),
    pytest.param(operator.mul, id="*"),
    pytest.param(lambda x, p: x / p, id="/"),
    pytest.param(lambda x, p: p / (x.square() + 1), id="reversed /"),
    pytest.param(lambda x, p: torch.where(x > 0, x, p), id="where"),
    pytest.param(lambda x, p: p.expand_as(x).sin() * x, id="expand_as"),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    x = torch.randn(shape, device="cpu").to(DEVICE)  # else other conditions hold on a GPU
    assert_rule_is_exact(make_model, x, wrap, objectives)


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS[2:4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", BROADCASTS)
def test_broadcast(function, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives) -> None:
    assert_rule_is_exact(call(function, shape), torch.randn(3, 2, 4), wrap, objectives)


@pytest.mark.parametrize(
    "function", [pytest.param(torch.add, id="add"), pytest.param(torch.mul, id="mul")]
)
def test_losses_that_are_the_call(function) -> None:
    """Nothing follows the call: its output is the losses."""
    model = call(function, ())()
    engine = Engine(model)
    x = torch.randn(3)
    expected = torch.ones(3, 3) if function is torch.add else x.outer(x)
    assert_close_to_reference(engine.compute_gramian(model(x)), expected)


def test_in_place_change_of_a_parameter_is_an_error_as_without_an_engine() -> None:
    model = call(lambda x, p: p.mul_(x), (4,))()
    engine = Engine(model)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model(torch.randn(4))
    del engine
