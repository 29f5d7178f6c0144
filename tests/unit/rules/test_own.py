"""Rules of one's own: for custom autograd Functions, and for operators of a library."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autogram import Engine, RuleError
from autogram.rules import (
    Recipe,
    find_rule,
    product,
    register_rule,
    registered_functions,
    unregister_rule,
)
from autogram.testing import check_rule
from tests.unit._capture.seen import left_to_fallback, seen_uses
from tests.unit.checks import Objectives, assert_gramian_is_exact
from tests.unit.engines import assert_exact, per_sample
from tests.unit.networks import AmongOthers, Call, call
from tests.unit.rules.examples import p, x
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


class Scale(torch.autograd.Function):
    """``times * x * w``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, times: float = 1.0) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.times = times
        return input * weight * times

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        dims = tuple(range(g.dim() - 1))
        return g * weight * ctx.times, (g * input).sum(dims) * ctx.times, None


class Doubled(Scale):
    """Another forward than that of its base."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        return Scale.forward(ctx, input, weight, 2.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return Scale.backward(ctx, g)[:2]


class Own(Scale):
    """An ``apply`` of its own."""

    @classmethod
    def apply(cls, input: Tensor, *, weight: Tensor) -> Tensor:
        return super().apply(input, weight, 3.0)


class ForTransforms(torch.autograd.Function):
    """``x * w`` in the form that `torch.func` asks for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor) -> Tensor:
        return input * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        return g * weight, (g * input).sum_to_size(weight.shape)


class TwoOutputs(torch.autograd.Function):
    """``x * w`` and ``x + w``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(input, weight)
        return input * weight, input + weight

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        return g * weight + h, (g * input + h).sum(0)


class InPlace(torch.autograd.Function):
    """``x *= w``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input.clone(), weight)
        ctx.mark_dirty(input)
        return input.mul_(weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        return g * weight, (g * input).sum(0)


ALIAS = Scale.apply


def scale(input: Tensor, weight: Tensor, times: float = 1.0) -> list[Recipe]:
    t = "TSR"[: input.dim() - 1]
    return [product(weight, f"{t}i,{t}i->i", input, scale=times)]


@pytest.fixture
def registered() -> Iterator[None]:
    """`Scale` has a rule in this test."""
    register_rule(Scale)(scale)
    yield
    if find_rule(Scale):
        unregister_rule(Scale)


@pytest.fixture
def uses() -> Iterator[list[Any]]:
    """The uses that are recorded in a test."""
    with seen_uses() as seen:
        yield seen


@pytest.mark.usefixtures("registered")
class TestRule:
    """A custom autograd Function with a rule."""

    def test_agrees_with_autograd(self) -> None:
        check_rule(Scale, x(4, 6, 3), p(3))
        check_rule(Scale.apply, x(4, 3), p(3), 0.5)

    @pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
    def test_gramian_is_exact(self, wrap: Wrap, objectives: Objectives, uses: list[Any]) -> None:
        assert_rule_is_exact(call(Scale.apply, (3,)), torch.randn(4, 2, 3), wrap, objectives)
        assert not left_to_fallback(uses)

    def test_a_shorthand_from_before_the_rule_is_exact(self, uses: list[Any]) -> None:
        """It is the ``apply`` of before, which no recording sees."""
        assert_gramian_is_exact(lambda: AmongOthers(Call(ALIAS, (3,))), torch.randn(4, 3))
        assert set(left_to_fallback(uses)) == {"the call behind `ScaleBackward`"}

    def test_derived_functions_have_no_rule(self) -> None:
        assert find_rule(Scale) is scale
        assert find_rule(Doubled) is None
        input, weight = torch.randn(4, 3), torch.randn(3)
        assert torch.equal(Doubled.apply(input, weight), input * weight * 2)
        assert torch.equal(Own.apply(input, weight=weight), input * weight * 3)
        for function in (Doubled.apply, lambda i, w: Own.apply(i, weight=w)):
            assert_gramian_is_exact(call(function, (3,)), torch.randn(4, 3))

    def test_results_are_those_of_before_bit_for_bit(self) -> None:
        results = []
        for apply in (ALIAS, Scale.apply):
            input, weight = torch.ones(4, 3, requires_grad=True), p(3).detach().requires_grad_()
            with torch.no_grad():
                weight.copy_(torch.arange(3) / 7)
            output = apply(input, weight, 0.3)
            output.sin().sum().backward()
            results.append((output.detach(), input.grad, weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_pickles_by_name(self) -> None:
        model = Call(Scale.apply, (3,))
        restored = pickle.loads(pickle.dumps(model))
        assert restored.function is Scale.apply
        assert copy.deepcopy(model).function is Scale.apply

    def test_a_mode_of_the_user_sees_it(self) -> None:
        """As it sees functions of torch; a default device is such a mode."""
        with torch.device("cpu"):
            assert_gramian_is_exact(call(Scale.apply, (3,)), torch.randn(4, 3))

    def test_two_engines(self) -> None:
        """The call is handed from one recording to the next."""
        model = Call(Scale.apply, (3,))
        engines = Engine(model), Engine(model)
        losses = per_sample(model(torch.randn(4, 3)))
        for engine in engines:
            assert_exact(engine, losses, model)

    def test_in_a_checkpoint(self) -> None:
        """Without a module inside, nothing is recorded the second time."""
        for apply in (ALIAS, Scale.apply):
            model = call(lambda i, w, f=apply: checkpoint(f, i, w, use_reentrant=False), (3,))
            assert_gramian_is_exact(model, torch.randn(4, 3))

    def test_a_call_that_the_rule_does_not_bind(self) -> None:
        """An error of the Function is the Function's, and one of the rule the rule's."""
        model = Call(lambda i, w: Scale.apply(i, w, 1.0, "too many"), (3,))
        engine = Engine(model)
        with pytest.raises((TypeError, RuntimeError)):
            model(torch.randn(4, 3))
        del engine


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
def test_transforms(is_inside: bool) -> None:
    """Inside of a transform, a Function is what it was; its result is adopted."""

    @register_rule(ForTransforms)
    def rule(input: Tensor, weight: Tensor) -> list[Recipe]:
        return [product(weight, "ti,ti->i", input)]

    def mapped(input: Tensor, weight: Tensor) -> Tensor:
        return torch.vmap(ForTransforms.apply, in_dims=(0, None))(input, weight).sin()

    def differentiated(input: Tensor, weight: Tensor) -> Tensor:
        return torch.func.grad(lambda i: ForTransforms.apply(i, weight).sin().sum())(input)

    try:
        for function in (mapped, differentiated, ForTransforms.apply):
            model = Call(function, (3,))
            if not is_inside:
                parameters = dict(model.named_parameters())
                outputs = torch.func.functional_call(model, parameters, (torch.ones(4, 3),))
                assert outputs.shape == (4, 3)
                continue
            assert_gramian_is_exact(call(function, (3,)), torch.randn(4, 3))
    finally:
        unregister_rule(ForTransforms)


def test_two_outputs() -> None:
    """Each has recipes of its own; without an answer, the call is left to the fallback."""
    answers: list[Any] = [None]

    @register_rule(TwoOutputs)
    def rule(input: Tensor, weight: Tensor) -> list[Recipe] | None:
        of_both = [
            product(weight, "ti,ti->i", input),
            product(weight, "ti->i", output=1),
        ]
        return answers[0] and of_both[: answers[0]]

    def both(input: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(TwoOutputs.apply(input, weight), 1)

    try:
        assert_gramian_is_exact(call(both, (3,)), torch.randn(4, 3))
        answers[0] = 2
        check_rule(TwoOutputs, x(4, 3), p(3))
        assert_gramian_is_exact(call(both, (3,)), torch.randn(4, 3))
        answers[0] = 1
        model = Call(TwoOutputs.apply, (3,))
        engine = Engine(model)
        with pytest.raises(RuleError, match=r"`TwoOutputs\.apply` has no recipe for tensor 1"):
            model(torch.randn(4, 3))
        del engine
    finally:
        unregister_rule(TwoOutputs)


def test_function_that_changes_its_input() -> None:
    """What the rule saves must be as it was."""
    clones: list[bool] = [True]

    @register_rule(InPlace)
    def rule(input: Tensor, weight: Tensor) -> list[Recipe]:
        return [product(weight, "ti,ti->i", input.clone() if clones[0] else input)]

    def function(i: Tensor, w: Tensor) -> Tensor:
        return InPlace.apply(i * 1, w).sin()

    def both(i: Tensor, w: Tensor) -> Tensor:
        changed = i * 1
        output = InPlace.apply(changed, w)
        return output.sin() + changed.cos()

    try:
        for changing in (function, both):
            assert_gramian_is_exact(call(changing, (3,)), torch.randn(4, 3))
        clones[0] = False
        model = Call(function, (3,))
        engine = Engine(model)
        with pytest.raises(RuleError, match="changed a tensor in place that its rule saves"):
            model(torch.randn(4, 3))
        del engine
    finally:
        unregister_rule(InPlace)


@pytest.mark.parametrize("equation", ["oi,oi->oi", "oi,oi->"])
def test_recipe_of_other_dimensions(equation: str) -> None:
    """The error names the call whose rule is wrong, and the parameter."""

    @register_rule(Scale)
    def rule(input: Tensor, weight: Tensor) -> list[Recipe]:
        return [product(weight, equation, input)]

    try:
        model = Call(Scale.apply, (3,))
        engine = Engine(model)
        losses = model(torch.randn(4, 3)).square().sum(1)
        with pytest.raises(
            RuleError, match=r"rule of `Scale.apply` with `.*` gives a tensor \d dim"
        ):
            engine.compute_gramian(losses)
    finally:
        unregister_rule(Scale)


@pytest.mark.parametrize("function", [Scale, Own])
def test_forgotten_rule(function: type[torch.autograd.Function]) -> None:
    """The class is as it was."""
    before = dict(vars(function))
    register_rule(function)(scale)
    assert find_rule(function) is find_rule(function.apply) is scale
    assert function.apply in registered_functions()
    shorthand = function.apply
    unregister_rule(function.apply)
    assert dict(vars(function)) == before
    assert find_rule(function) is None
    assert shorthand not in registered_functions()
    with pytest.raises(RuleError, match="no rule"):
        unregister_rule(function)
    if function is Scale:  # a shorthand from then goes on to work
        assert_gramian_is_exact(call(shorthand, (3,)), torch.randn(4, 3))


@pytest.mark.parametrize("function", [Scale, torch.hypot])
def test_a_cell_that_runs_again(function: Callable[..., Any]) -> None:
    """A rule of the same name takes the place of the one before; another one is refused."""

    def cell() -> Any:
        @register_rule(function)
        def rule(input: Tensor, weight: Tensor) -> None:
            del input, weight

        return rule

    first, second = cell(), cell()
    try:
        assert first is not second
        assert find_rule(function) is second
        with pytest.raises(RuleError, match="has a rule already"):
            register_rule(function)(scale)
        assert find_rule(function) is second
    finally:
        unregister_rule(function)


@pytest.mark.parametrize("what", [nn.Linear, 3, "linear"], ids=str)
def test_what_is_not_seen_is_refused(what: Any) -> None:
    with pytest.raises(RuleError, match="engines do not see its calls"):
        register_rule(what)(scale)


def test_operator_of_a_library() -> None:
    """Modes are shown its default overload."""

    @torch.library.custom_op("autogram_test::scale", mutates_args=())
    def operator(input: Tensor, weight: Tensor) -> Tensor:
        return input * weight

    operator.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).sum(0)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005
    )
    seen = torch.ops.autogram_test.scale.default
    register_rule(seen)(scale)
    try:
        check_rule(operator, x(4, 3), p(3))
        assert_gramian_is_exact(call(lambda i, w: operator(i, w), (3,)), torch.randn(4, 3))
    finally:
        unregister_rule(seen)
