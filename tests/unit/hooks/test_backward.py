"""Backward hooks: the gradients of each call of a module, and PyTorch's own in the same cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from autogram import Engine, HookError, UnsupportedError
from autogram.hooks import HookManager
from autogram.testing import reference_jacobian

Gradients = tuple[Tensor | None, ...]
Seen = list[tuple[Gradients, Gradients]]
Run = Callable[[nn.Module], list[tuple[Gradients, Gradients]]]
ROOT = Path(__file__).parents[3]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


class Apply(nn.Module):
    """A module that computes some function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass
class Case:
    """A module, how it is used, and what a hook on it is to see, from the last call to the first.

    ``pytorch`` says what `register_full_backward_hook` does: "right", "wrong", or "raises".
    """

    title: str
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module], None]
    expected: list[tuple[tuple[Any, ...], tuple[Any, ...]]]
    pytorch: str = "right"


def case_of_keywords(m: nn.Module) -> None:
    m(leaf(1, 2), scale=leaf(3, 4)).sum().backward()


def case_of_many_nodes(m: nn.Module) -> None:
    x = leaf(0, 0)
    (m(x * 1) + 5 * x).sum().backward()


def case_of_nested(m: nn.Module) -> None:
    y = m([leaf(1), {"a": leaf(2), "b": 3}])
    (y["sum"] + 2 * y["pair"][1]).sum().backward()


class Pair(NamedTuple):
    """An output."""

    first: Tensor
    second: Tensor


@dataclass
class Result:
    """Another."""

    value: Tensor
    extra: str = "text"


def in_place_behind(m: nn.Module) -> None:
    y = m(leaf(1, 2) * 1)
    y.mul_(7)
    y.sum().backward()


def in_place_inside(m: nn.Module) -> None:
    x = leaf(-1, 2) * 1
    y = m(x)
    (3 * y).sum().backward()


def in_place_inside_and_behind(m: nn.Module) -> None:
    x = leaf(-1, 2) * 1
    y = m(x)
    y += 1
    y *= 3
    y.sum().backward()


def own_input(m: nn.Module) -> None:
    x = leaf(1, 2) * 1
    (2 * m(x) + 3 * x).sum().backward()


def intermediate(m: nn.Module) -> None:
    x = leaf(1, 2)
    m(x)
    torch.autograd.grad(m.inner.sum(), x)  # type: ignore[arg-type, operator, union-attr]


class Inner(nn.Module):
    """Keeps an intermediate result."""

    def forward(self, x: Tensor) -> Tensor:
        self.inner = 4 * x
        return self.inner.exp()


def twice(m: nn.Module) -> None:
    x = leaf(1, 2)
    a, b = m(x), m(3 * x[:1])
    (5 * a).sum().add((7 * b).sum()).backward()


def of_parameters(m: nn.Module) -> None:
    x = leaf(1, 1)
    torch.autograd.grad(m(x).sum(), m.weight)  # type: ignore[arg-type]


def linear() -> nn.Linear:
    module = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(module.weight)
    return module


def checkpointed(m: nn.Module) -> None:
    x = leaf(1, 2)
    checkpoint(lambda x: m(x * 1) * 2, x, use_reentrant=False).sum().backward()


def unused_output(m: nn.Module) -> None:
    m(leaf(1, 2)).second.sum().backward()


def without_gradients(m: nn.Module) -> None:
    with torch.no_grad():
        m(leaf(1, 2))


two = (ones(2),)
CASES = [
    Case(
        "one tensor",
        lambda: Apply(lambda x: 2 * x),
        lambda m: m(leaf(1, 2)).sum().backward(),
        [
            ((2 * ones(2),), two),
        ],
    ),
    Case(
        "a forward of many nodes, whose input has other uses",
        lambda: Apply(lambda x: x.exp() * 2 + x),
        case_of_many_nodes,
        [((3 * ones(2),), two)],
    ),
    Case(
        "keyword arguments",
        lambda: Apply(lambda x, scale: x * scale),
        case_of_keywords,
        [((torch.tensor([3, 4]).double(), torch.tensor([1, 2]).double()), two)],
        "wrong",
    ),
    Case(
        "nested lists and dicts",
        lambda: Apply(lambda x: {"sum": x[0] * 2, "pair": (4, x[1]["a"] * 3)}),
        case_of_nested,
        [((2 * ones(1), 6 * ones(1), None), (ones(1), None, 2 * ones(1)))],
        "wrong",
    ),
    Case(
        "a dataclass as output",
        lambda: Apply(lambda x: Result(2 * x)),
        lambda m: m(leaf(1, 2)).value.sum().backward(),
        [((2 * ones(2),), (ones(2), None))],
        "wrong",
    ),
    Case(
        "the first layer, whose input needs no gradient",
        linear,
        lambda m: m(ones(2)).sum().backward(),
        [((None,), (ones(1),))],
    ),
    Case(
        "an output that is not used",
        lambda: Apply(lambda x: Pair(2 * x, 3 * x)),
        unused_output,
        [((3 * ones(2),), (None, ones(2)))],
    ),
    Case(
        "the output is changed in place after the call",
        lambda: Apply(lambda x: 2 * x),
        in_place_behind,
        [((14 * ones(2),), (7 * ones(2),))],
        "raises",
    ),
    Case(
        "an input is changed in place by the module",
        lambda: nn.ReLU(inplace=True),
        in_place_inside,
        [((torch.tensor([0, 3]).double(),), (3 * ones(2),))],
        "raises",
    ),
    Case(
        "both of these",
        lambda: Apply(lambda x: x.mul_(2)),
        in_place_inside_and_behind,
        [((6 * ones(2),), (3 * ones(2),))],
        "raises",
    ),
    Case(
        "the module returns its input", nn.Identity, own_input, [((2 * ones(2),), (2 * ones(2),))]
    ),
    Case(
        "the module returns a view of its input",
        lambda: nn.Flatten(0),
        lambda m: own_input(m),
        [((2 * ones(2),), (2 * ones(2),))],
    ),
    Case(
        "the gradient of an intermediate result",
        Inner,
        intermediate,
        [((4 * ones(2),), (None,))],
        "wrong",
    ),
    Case(
        "two calls with two shapes",
        lambda: Apply(lambda x: 2 * x),
        twice,
        [
            ((14 * ones(1),), (7 * ones(1),)),
            ((10 * ones(2),), (5 * ones(2),)),
        ],
    ),
    Case(
        "the gradient of a parameter alone", linear, of_parameters, [((None,), (ones(1),))], "wrong"
    ),
    Case(
        "a checkpoint",
        lambda: Apply(lambda x: 3 * x),
        checkpointed,
        [((6 * ones(2),), (2 * ones(2),))],
    ),
    Case("gradients disabled", lambda: Apply(lambda x: 2 * x), without_gradients, []),
]


def same(found: Seen, expected: Any) -> bool:
    """Whether a hook has seen what it should have."""
    try:
        assert_close(sorted(found, key=str), sorted(expected, key=str))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_gradients(case: Case) -> None:
    """One to one with the leaves of the arguments and of the output, once for each call."""
    seen: Seen = []
    module = case.make()
    with HookManager() as manager:
        manager.register(lambda _, *shown: seen.append(shown), module, kind="backward")
        case.run(module)
    assert_close(seen, case.expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_hooks_of_pytorch(case: Case) -> None:
    """What the table in the docs says of them is so."""
    seen: Seen = []
    module = case.make()
    handle = module.register_full_backward_hook(lambda _, *shown: seen.append(shown))
    try:
        case.run(module)
        found = "right" if same(seen, case.expected) else "wrong"
    except (RuntimeError, TypeError):
        found = "raises"
    handle.remove()
    assert found == case.pytorch


def test_the_table_in_the_docs() -> None:
    """It has each case, with what PyTorch's hooks do in it."""
    text = (ROOT / "docs" / "hooks.md").read_text()
    for case in CASES:
        assert f"| {case.title} | right | {case.pytorch} |" in text


def test_gradients_are_those_without_hooks() -> None:
    """Of parameters, and through what is changed in place."""
    model = nn.Sequential(linear(), nn.ReLU(inplace=True), nn.Flatten(0), nn.Identity()).double()

    def gradients() -> list[Tensor | None]:
        x = torch.linspace(-1, 1, 6).double().view(3, 2).requires_grad_()
        h = x * 2
        for layer in model:
            h = layer(h)
        h = h.clone()
        h += 1
        return [*torch.autograd.grad(h.square().sum(), [x, *model.parameters()])]

    expected = gradients()
    with HookManager() as manager:
        manager.register(lambda *_: None, model, where=nn.Module, kind="backward")
        assert_close(gradients(), expected)


def test_an_input_that_is_changed_in_place_and_used_later() -> None:
    """Its later uses differentiate through the call, as they would without a hook."""

    def gradient(module: nn.Module) -> Tensor:
        x = leaf(-1, 2)
        y = x * 1
        module(y)
        (found,) = torch.autograd.grad((y * 5).sum(), x)
        return found

    relu, seen = nn.ReLU(inplace=True), []
    expected = gradient(relu)
    with HookManager() as manager:
        manager.register(lambda _, *shown: seen.append(shown), relu, kind="backward")
        assert_close(gradient(relu), expected)
    assert_close(seen, [((expected,), (5 * ones(2),))])


def test_an_output_that_is_the_input_is_not_changed_in_place() -> None:
    """PyTorch says so: the change would have to reach the input's other uses."""
    identity = nn.Identity()
    with HookManager() as manager:
        manager.register(lambda *_: None, identity, kind="backward")
        y = identity(leaf(1, 2) * 1)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            y.mul_(2)


def test_a_tensor_that_is_given_twice() -> None:
    """Each argument has its own gradient; where the module changes it in place, there is none."""
    add, seen = Apply(lambda a, b: 2 * a + 3 * b), []
    changing = Apply(lambda a, b: a.mul_(2) + b)
    with HookManager() as manager:
        manager.register(lambda _, *shown: seen.append(shown), [add, changing], kind="backward")
        x = leaf(1, 2)
        add(x, x).sum().backward()
        assert_close(seen, [((2 * ones(2), 3 * ones(2)), two)])
        y = x * 1
        with pytest.raises(HookError, match="was given a tensor twice"):
            changing(y, y)


def test_returned_gradients_replace_those_of_the_inputs() -> None:
    """In the order of the arguments; their number is checked."""
    module, x = Apply(lambda a, b: 2 * a * b), leaf(1, 2)
    with HookManager() as manager:
        (handle,) = manager.register(
            lambda _module, gi, _go: (gi[0] * 10, None), module, kind="backward"
        )
        (found,) = torch.autograd.grad(module(x, 3).sum(), x)
        assert_close(found, 60 * ones(2))
        handle.remove()
        manager.register(lambda *_: (None,), module, kind="backward")
        with pytest.raises(HookError, match="returned 1 gradients for the 2 arguments"):
            module(x, 3).sum().backward()


def test_several_hooks() -> None:
    """The last that was registered is the innermost: it is called first, as in a stack."""
    module, x, seen = Apply(lambda a: 2 * a), leaf(1), []

    def first(_: nn.Module, grad_input: Gradients, __: Gradients) -> Any:
        seen.append(("first", grad_input[0]))

    def second(_: nn.Module, grad_input: Gradients, __: Gradients) -> Any:
        seen.append(("second", grad_input[0]))
        return (grad_input[0] * 5,)  # type: ignore[operator]

    with HookManager() as manager:
        manager.register(first, module, kind="backward")
        manager.register(second, module, kind="backward")
        module(x).sum().backward()
    assert seen == [("second", 2 * ones(1)), ("first", 10 * ones(1))]


def test_second_derivatives() -> None:
    """A graph that is created goes through the gates."""
    module, x = Apply(lambda a: a**3), leaf(2)
    with HookManager() as manager:
        manager.register(lambda *_: None, module, kind="backward")
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    assert_close((first, second), (12 * ones(1), 12 * ones(1)))


def test_passes_again_and_forwards_that_raise() -> None:
    """Each pass shows its own gradients; a call that raised leaves nothing behind."""
    seen: Seen = []
    module = Apply(lambda a, fail: 1 / 0 if fail else 2 * a)
    with HookManager() as manager:
        manager.register(lambda _, *shown: seen.append(shown), module, kind="backward")
        x = leaf(1)
        with pytest.raises(ZeroDivisionError):
            module(x, True)
        y = module(x, False).sum()
        y.backward(retain_graph=True)
        (3 * y).backward()
    assert_close(seen, [((2 * ones(1), None), (ones(1),)), ((6 * ones(1), None), (3 * ones(1),))])


def test_passes_of_an_engine_are_not_shown() -> None:
    """Their cotangents are codes by which samples are found."""
    seen: Seen = []
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    engine = Engine(model)
    x = torch.randn(5, 3).double()
    expected = engine.compute_gramian(model(x).square().squeeze(1))
    with HookManager() as manager:
        manager.register(
            lambda _, *shown: seen.append(shown), model, where=nn.Tanh, kind="backward"
        )
        for _ in range(3):
            losses = model(x).square().squeeze(1)
            assert_close(engine.compute_gramian(losses), expected)
        assert seen == []
        losses.sum().backward()
    assert len(seen) == 1


def _reversed(_: nn.Module, grad_input: Gradients, __: Gradients) -> Gradients:
    return tuple(None if x is None else -2 * x for x in grad_input)


def _reversed_in_place(_: nn.Module, grad_input: Gradients, __: Gradients) -> None:
    for x in grad_input:
        if x is not None:
            x.mul_(-2)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _gramian_of(losses: Tensor, model: nn.Module) -> Tensor:
    jacobian = reference_jacobian(losses, model.parameters())
    return jacobian @ jacobian.T


REFUSED = "A backward hook on a `Tanh` has replaced gradients.*register_full_backward_hook"


@pytest.mark.parametrize("hook", [_reversed, _reversed_in_place])
@pytest.mark.parametrize("batch_dim", ["auto", None])
def test_an_engine_refuses_a_hook_that_has_replaced_gradients(hook: Any, batch_dim: Any) -> None:
    """Its passes would miss the hook. Behind a call that was made before, ordinary passes raise."""
    model = _layers()
    engine = Engine(model, batch_dim=batch_dim)
    x = torch.randn(5, 3).double()

    def losses() -> Tensor:
        found: Tensor = model(x).square().sum(1)
        return found

    with HookManager() as manager:
        manager.register(hook, model, where=nn.Tanh, kind="backward")
        first = losses()
        engine.compute_gramian(first)  # not known yet
        with pytest.raises(UnsupportedError, match=REFUSED):
            first.sum().backward()
        for call in (
            lambda: engine.compute_gramian(losses()),
            lambda: engine.jacobian(losses()),
            lambda: engine.compute_gramian(model(x).square()),
            lambda: engine.backward(losses(), lambda gramian: gramian.mean(0)),
            lambda: engine.verify(losses()),
        ):
            with pytest.raises(UnsupportedError, match=REFUSED):
                call()
        losses().sum().backward()  # without an engine's pass, all is as it was
        with manager.inactive():
            without = losses()
        assert_close(engine.compute_gramian(without), _gramian_of(without, model))


def test_what_the_refusal_says_to_do() -> None:
    """PyTorch's hooks are called in an engine's passes, and the Jacobian has what they return."""
    model = _layers()
    engine = Engine(model)
    handle = model[1].register_full_backward_hook(_reversed)
    losses = model(torch.randn(5, 3).double()).square().sum(1)
    expected = _gramian_of(losses, model)
    assert_close(engine.compute_gramian(losses), expected)
    handle.remove()
    losses = model(torch.randn(5, 3).double()).square().sum(1)
    with pytest.raises(AssertionError):
        assert_close(engine.compute_gramian(losses), expected)


def test_hooks_that_return_what_they_are_given_replace_nothing() -> None:
    """So do hooks behind which the engine has no parameter: what they return has no effect on J."""
    model = _layers()
    engine = Engine(model)
    with HookManager() as manager:
        manager.register(lambda _, given, __: given, model, where=nn.Tanh, kind="backward")
        manager.register(_reversed, model[0], kind="backward")
        for _ in range(2):
            x = torch.randn(5, 3).double().requires_grad_()
            losses = model(x).square().sum(1)
            assert_close(engine.compute_gramian(losses), _gramian_of(losses, model))
