"""Python functions of torch that are recorded inside."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from autogram._capture.forward.calls import inlined
from tests.unit.checks import assert_gramian_is_exact
from tests.unit.networks import Call


class Names(TorchFunctionMode):
    """Writes down what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_the_body_runs_under_the_mode() -> None:
    """A call of the copy shows what the function calls, and not the function itself."""
    x = torch.ones(2, 3)
    with Names() as names:
        output = inlined(F.glu)(torch.ones(2, 4))
        inlined(F.layer_norm)(x, (3,))
    assert torch.equal(output, F.glu(torch.ones(2, 4)))
    assert "layer_norm" in names.seen
    assert names.seen.count("glu") == 1


def test_the_original_is_not_touched() -> None:
    """It hands itself to a mode as before."""
    before = F.dropout.__globals__
    inlined(F.dropout)
    assert F.dropout.__globals__ is before
    x = torch.ones(2)
    with Names() as names:
        F.dropout(x, 0.5)
    assert names.seen[0] == "dropout"


def test_a_builtin_function_has_no_body() -> None:
    assert inlined(torch.matmul) is None
    assert inlined(torch.Tensor.add) is None


class Scale(torch.autograd.Function):
    """``x * w``, which no mode sees."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


def scaled(x, w):
    """A function like those of torch, whose body calls a custom autograd Function."""
    if has_torch_function((x, w)):
        return handle_torch_function(scaled, (x, w), x, w)
    return Scale.apply(x, w)


def test_what_the_body_does_unseen_is_exact() -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Call(scaled, (3,)), nn.Linear(3, 2))

    assert_gramian_is_exact(make_model, torch.randn(4, 3))


class Doubled(torch.autograd.Function):
    """Doubles a tensor in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 2
        ctx.mark_dirty(x)
        return x.mul_(ctx.factor)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor


class WithDoubledPart(nn.Module):
    """Doubles the first features between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x).clone()
        Doubled.apply(x[:, :2])
        return self.last(x.tanh())


def test_a_function_that_changes_a_view_is_not_asked() -> None:
    """PyTorch holds a lock while it sets what the view has of hooks: reading more would wait."""
    assert_gramian_is_exact(WithDoubledPart, torch.randn(4, 3))
