"""Backward passes inside of backward passes: exact or refused, and `.grad` as it was."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.variable import Variable
from torch.utils.checkpoint import checkpoint

from autogram import Engine, UnseenUseWarning, UnsupportedError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, features, trainable
from tests.unit.engines import assert_exact, batch, per_sample

Losses = Callable[[Tensor], Tensor]

EACH = [
    pytest.param(per_sample, id="(B,)"),
    pytest.param(lambda output: features(output, 3), id="(B, K)"),
]
BATCH_DIMS = [pytest.param(0, id="samples"), pytest.param(None, id="coupled")]


class Implicit(nn.Module):
    """A fixed point z = f(z, x), whose hook solves for the cotangent by passes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(3, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        with torch.no_grad():
            self.again.weight.mul_(0.2)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return (self.again(z) + self.into(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros(len(x), 4)
            for _ in range(60):
                z = self.step(z, x)
        z = self.step(z, x)
        fixed = z.detach().requires_grad_()
        image = self.step(fixed, x)

        def solve(g: Tensor) -> Tensor:
            found = g
            for _ in range(60):
                (found,) = torch.autograd.grad(image, fixed, found, retain_graph=True)
                found = found + g
            return found

        z.register_hook(solve)
        return self.last(z)


class _Checkpoint(Function):
    """Runs a module again in the backward pass. Its parameters are inputs, as is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.parameters = module, parameters
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        found = torch.autograd.grad(y, [x, *ctx.parameters], g)
        return found[0], None, *found[1:]


class Recomputed(nn.Module):
    """A checkpoint as people write it themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Checkpoint.apply(self.first(x), self.middle, *self.middle.parameters())  # type: ignore[no-untyped-call]
        return self.last(found)


class _Detour(Function):
    """The derivative by the input alone, from a pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (found,) = torch.autograd.grad(ctx.y, ctx.x, g, retain_graph=True)
        return found, None


class Frozen(nn.Module):
    """A layer used as if it had no parameters, which autograd is not told of either."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Detour.apply(self.first(x), self.middle)  # type: ignore[no-untyped-call]
        return self.last(found.tanh())


class Watched(nn.Module):
    """A hook that differentiates what its own losses are computed from, in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        bent = h.tanh()
        y = self.last(bent)

        def scale(g: Tensor) -> Tensor:
            (sensitivity,) = torch.autograd.grad(y, bent, y.detach(), retain_graph=True)
            return g * (1 + sensitivity.square())

        h.register_hook(scale)
        return y


class CheckpointedImplicit(Implicit):
    """With checkpoints of PyTorch's inside of the nested passes."""

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.again, z, use_reentrant=False)
        return (again + self.into(x)).tanh()


MODELS = [Implicit, CheckpointedImplicit, Recomputed, Frozen, Watched]


@pytest.fixture(autouse=True)
def engine_of_pytorch() -> Iterator[None]:
    """What is put in the place of PyTorch's own engine is there during passes alone."""
    before = Variable._execution_engine
    yield
    assert Variable._execution_engine is before


@pytest.mark.filterwarnings("ignore::autogram.UnseenUseWarning")
@pytest.mark.parametrize("batch_dim", BATCH_DIMS)
@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("make", MODELS)
class TestExact:
    """Taps answer to the pass of the engine alone."""

    def test_gramian(
        self, make: Callable[[], nn.Module], losses_of: Losses, batch_dim: int | None
    ) -> None:
        model = make()
        engine = Engine(model, batch_dim=batch_dim, verify="never")
        for samples in (4, 4, 3, 4):
            assert_exact(engine, losses_of(model(batch(samples, 3))), model)
            assert all(p.grad is None for p in model.parameters())

    def test_jacobian_and_step(
        self, make: Callable[[], nn.Module], losses_of: Losses, batch_dim: int | None
    ) -> None:
        model = make()
        engine = Engine(model, batch_dim=batch_dim, verify="never")
        for _ in range(3):
            losses = losses_of(model(batch(4, 3)))
            expected = reference_jacobian(losses, trainable(model))
            assert_close_to_reference(engine.jacobian(losses).dense(), expected)
            w = batch(losses.numel())
            # The hook of one model goes back to nodes that this pass has left behind.
            engine.backward(losses, lambda _, w=w: w, retain_graph=isinstance(model, Watched))
            gradient = torch.cat([_gradient(p) for p in trainable(model)])
            assert_close_to_reference(gradient, w @ expected)
            model.zero_grad()


def _gradient(parameter: Tensor) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()


class _Hidden(Function):
    """A module whose parameters autograd is not told of: their gradients are added up aside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Callable[[Tensor], Tensor], way: Any) -> Tensor:
        ctx.module, ctx.way = module, way
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        ctx.way(y, g)
        return x.grad, None, None


def by_backward(y: Tensor, g: Tensor) -> None:
    torch.autograd.backward(y, g)


def by_method(y: Tensor, g: Tensor) -> None:
    y.backward(g)


def by_engine(y: Tensor, g: Tensor) -> None:
    """As Megatron does."""
    Variable._execution_engine.run_backward(
        tensors=(y,),
        grad_tensors=(g,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def by_hand(y: Tensor, g: Tensor) -> None:
    """Adding to `.grad` what a pass for gradients has given."""
    leaves = [n.variable for n in _nodes(y.grad_fn) if hasattr(n, "variable")]
    leaves = [leaf for leaf in leaves if leaf.dim()]  # less the anchor of the engine
    for leaf, gradient in zip(leaves, torch.autograd.grad(y, leaves, g), strict=True):
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def within_another(y: Tensor, g: Tensor) -> None:
    """In a pass inside of a pass for gradients."""
    x = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        z = x * 1
    z.register_hook(lambda _: by_backward(y, g))
    torch.autograd.grad(z, x)


def _nodes(node: Any) -> set[Any]:
    found, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [following for following, _ in node.next_functions]
    return found


WAYS = [by_backward, by_method, by_engine, by_hand, within_another]


class Hiding(nn.Module):
    """Hides its middle layer, as reversible layers do."""

    def __init__(self, way: Callable[[Tensor, Tensor], None], *, is_bare: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.way, self.is_bare = way, is_bare

    def bare(self, x: Tensor) -> Tensor:
        return x @ self.middle.weight + self.middle.bias

    def forward(self, x: Tensor) -> Tensor:
        module = self.bare if self.is_bare else self.middle
        found: Tensor = _Hidden.apply(self.first(x), module, self.way)  # type: ignore[no-untyped-call]
        return self.last(found.tanh())


CALLS: dict[str, Callable[[Engine, Tensor], Any]] = {
    "compute_gramian": lambda engine, losses: engine.compute_gramian(losses),
    "jacobian": lambda engine, losses: engine.jacobian(losses),
    "backward": lambda engine, losses: engine.backward(losses, lambda gramian: gramian.diagonal()),
    "verify": lambda engine, losses: engine.verify(losses),
}


def fill(model: nn.Module) -> Callable[[], None]:
    """Fill every second gradient, and return what asserts that all are as they were."""
    gradients = {
        p: torch.randn_like(p) if i % 2 else None for i, p in enumerate(model.parameters())
    }
    values = {p: None if g is None else g.clone() for p, g in gradients.items()}
    for parameter, gradient in gradients.items():
        parameter.grad = gradient

    def check() -> None:
        for parameter, gradient in gradients.items():
            assert parameter.grad is gradient
            before = values[parameter]
            assert gradient is None or (before is not None and torch.equal(gradient, before))

    return check


@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("is_bare", [False, True], ids=["module", "bare function"])
@pytest.mark.parametrize("way", WAYS)
def test_hidden_parameters_are_refused(
    way: Callable[[Tensor, Tensor], None], is_bare: bool, call: str, losses_of: Losses
) -> None:
    """By name, at the first call and at later ones; and their gradients are left alone."""
    model = Hiding(way, is_bare=is_bare)
    engine = Engine(model, verify="first" if call == "verify" else "never")
    for _ in range(2):
        check = fill(model)
        losses = losses_of(model(batch(4, 3)))
        with pytest.raises(UnsupportedError, match=r"`middle\.weight`, `middle\.bias`.*inputs"):
            CALLS[call](engine, losses)
        check()
        model.zero_grad()
    model.way = by_nothing
    assert_exact(engine, losses_of(model(batch(4, 3))), model)


def by_nothing(y: Tensor, g: Tensor) -> None:
    """The derivative by the input alone."""
    x = next(n.variable for n in _nodes(y.grad_fn) if _is_input(n))
    (x.grad,) = torch.autograd.grad(y, x, g)


def _is_input(node: Any) -> bool:
    leaf = getattr(node, "variable", None)
    return leaf is not None and leaf.dim() == 2 and not isinstance(leaf, nn.Parameter)


class Front(nn.Module):
    """Hides its first layer behind inputs that require a gradient: no tap is behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Hidden.apply(x, self.first, by_backward)  # type: ignore[no-untyped-call]
        return self.last(found.tanh())


@pytest.mark.parametrize("call", CALLS)
def test_hidden_parameters_in_front_of_all_others_are_refused(call: str) -> None:
    """Where the first call is verified."""
    model = Front()
    engine = Engine(model)
    x = batch(4, 3).requires_grad_()
    for _ in range(2):
        check = fill(model)
        x.grad = kept = batch(4, 3)
        with pytest.raises(UnsupportedError, match=r"`first\.weight`, `first\.bias`"):
            CALLS[call](engine, per_sample(model(x)))
        check()
        assert x.grad is kept


class Local(nn.Module):
    """A hook that trains a head of its own on what passes by, beside the engine's modules."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.heads = [head]  # no part of this module

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)

        def train(g: Tensor) -> None:
            del g
            with torch.enable_grad():
                self.heads[0](h.detach()).square().sum().backward()

        h.register_hook(train)
        return self.last(h.tanh())


@pytest.mark.parametrize("losses_of", EACH)
@pytest.mark.parametrize("call", ["compute_gramian", "jacobian", "verify"])
def test_gradients_of_other_leaves_are_left_alone(call: str, losses_of: Losses) -> None:
    """Which a hook adds to in each pass."""
    head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = Local(head)
    engine = Engine(model, batch_dim=0)
    for _ in range(3):
        checks = fill(model), fill(head)
        losses = losses_of(model(batch(4, 3)))
        CALLS[call](engine, losses)
        for check in checks:
            check()
        model.zero_grad()
        assert_exact(engine, losses, model)
        losses.sum().backward()  # the user's own pass does what it always did
        assert all(p.grad is not None for p in head.parameters())


def test_a_step_that_would_leave_them_out_is_refused() -> None:
    """As an ordinary backward pass would not."""
    head = nn.Linear(4, 1)
    model = Local(head)
    engine = Engine(model, batch_dim=0, verify="never")
    checks = fill(model), fill(head)
    losses = per_sample(model(batch(4, 3)))
    with pytest.raises(UnsupportedError, match=r"shapes \(1, 4\), \(1,\).*losses\.backward"):
        engine.backward(losses, lambda gramian: gramian.diagonal())
    for check in checks:
        check()


class _Kept(Function):
    """A graph that is kept with the Function, and added to the gradient of its own leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        torch.autograd.backward(ctx.y, g, retain_graph=True)
        return ctx.x.grad


@pytest.mark.parametrize("losses_of", EACH)
def test_each_pass_finds_the_gradients_as_they_were(losses_of: Losses) -> None:
    """Here plain autograd is right in one pass alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            self.is_kept = True

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            found: Tensor = _Kept.apply(h) if self.is_kept else h.sin()  # type: ignore[no-untyped-call]
            return self.last(found)

    model = Model()
    engine = Engine(model, batch_dim=0)
    for _ in range(2):
        x = batch(4, 3)
        model.is_kept = True
        gramian = engine.compute_gramian(losses_of(model(x)))
        model.is_kept = False
        jacobian = reference_jacobian(losses_of(model(x)), model.parameters())
        assert_close_to_reference(gramian, jacobian @ jacobian.T)


def test_errors_in_nested_passes_travel() -> None:
    """And leave nothing."""

    class Broken(Implicit):
        is_broken = True

        def forward(self, x: Tensor) -> Tensor:
            z = self.step(torch.zeros(len(x), 4), x)
            fixed = z.detach().requires_grad_()
            image = self.step(fixed, x).sum()

            def fail(g: Tensor) -> None:
                del g
                image.backward(retain_graph=True)
                if self.is_broken:
                    raise LookupError("of the user")

            if self.is_broken:
                z.register_hook(fail)
            return self.last(z)

    model = Broken()
    engine = Engine(model, batch_dim=0)
    for _ in range(2):
        check = fill(model)
        with pytest.raises(LookupError, match="of the user"):
            engine.compute_gramian(per_sample(model(batch(4, 3))))
        check()
    model.is_broken = False
    model.zero_grad()
    assert_exact(engine, per_sample(model(batch(4, 3))), model)


@pytest.mark.parametrize("losses_of", EACH)
def test_an_engine_inside_of_a_pass(losses_of: Losses) -> None:
    """The same engine, and another one, are asked by a hook in a pass of the first."""
    model, other = Watched(), Watched()
    engine, beside = Engine(model, batch_dim=0), Engine(other, batch_dim=0)
    found: list[tuple[Tensor, Tensor]] = []
    is_inside = False

    def ask(g: Tensor) -> None:
        nonlocal is_inside
        del g
        if is_inside:
            return
        is_inside = True
        with torch.enable_grad():
            for asked, of in ((engine, model), (beside, other)):
                losses = per_sample(of(x[:3]))
                jacobian = reference_jacobian(losses, of.parameters())
                found.append((asked.compute_gramian(losses), jacobian @ jacobian.T))
        is_inside = False

    for _ in range(2):
        x = batch(4, 3)
        losses = losses_of(model(x))
        jacobian = reference_jacobian(losses, model.parameters())
        losses = losses_of(model(x))
        losses.register_hook(ask)
        gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
    assert len(found) > 2
    for inner, expected in found:
        assert_close_to_reference(inner, expected)


def test_other_engines_of_one_graph_stay_silent() -> None:
    """A nested pass of the user's through taps of both."""
    model = Implicit()
    first, second = Engine(model, batch_dim=0), Engine(model)
    for _ in range(2):
        losses = per_sample(model(batch(4, 3)))
        assert_exact(first, losses, model)
        assert_exact(second, losses, model)


def test_gradients_during_a_pass_with_nothing_inside_are_not_touched() -> None:
    """A hook finds `.grad` as ever."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = Engine(model)
    check = fill(model)
    seen = []

    def look(g: Tensor) -> None:
        del g
        check()
        seen.append(1)

    losses = per_sample(model(batch(4, 3)))
    losses.register_hook(look)
    engine.compute_gramian(losses)
    check()
    assert seen


def test_what_a_nested_pass_uses_is_exact_by_fallback_with_a_warning() -> None:
    model = Recomputed()
    engine = Engine(model)
    with pytest.warns(UnseenUseWarning, match=r"`middle\.0\.weight`"):
        engine.compute_gramian(per_sample(model(batch(4, 3))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.compute_gramian(per_sample(model(batch(4, 3))))


def test_a_step_inside_of_a_pass_is_refused() -> None:
    """A hook that takes a step with the same engine, or with another one."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    engine = Engine(model, batch_dim=0)
    for of, stepping in ((model, engine), (other, Engine(other))):
        inner = per_sample(of(batch(3, 3)))
        checks = fill(model), fill(other)

        def step(g: Tensor, inner: Tensor = inner, stepping: Engine = stepping) -> None:
            del g
            with torch.enable_grad():
                stepping.backward(inner, lambda gramian: gramian.diagonal(), retain_graph=True)

        losses = per_sample(model(batch(4, 3)))
        losses.register_hook(step)
        with pytest.raises(UnsupportedError, match=r"hook.*Add them outside"):
            engine.compute_gramian(losses)
        for check in checks:
            check()


@pytest.mark.parametrize("call", CALLS)
def test_reformer(call: str) -> None:
    """Its layers are reversible, and hide their parameters."""
    config = transformers.ReformerConfig(
        attention_head_size=4,
        attn_layers=["local", "local"],
        axial_pos_embds=False,
        feed_forward_size=8,
        hidden_size=8,
        local_attn_chunk_length=4,
        max_position_embeddings=8,
        num_attention_heads=2,
        vocab_size=20,
    )
    model = transformers.ReformerModel(config).to(torch.get_default_dtype())
    engine = Engine(model, batch_dim=0)
    check = fill(model)
    losses = per_sample(model(torch.randint(20, (3, 8))).last_hidden_state)
    with pytest.raises(
        UnsupportedError, match=r"`encoder\.layers\.0\.attention.*reversible layers"
    ):
        CALLS[call](engine, losses)
    check()
