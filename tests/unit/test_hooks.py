"""Hooks that are registered, switched and removed together."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram.hooks import HookManager


def test_before_sees_all_arguments() -> None:
    """Positional and keyword ones, before the forward runs."""

    class Model(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            seen.append("forward")
            return x * scale

    seen: list[Any] = []
    model, manager = Model(), HookManager()
    manager.hook(model, before=lambda *call: seen.append(call))
    x = torch.ones(2)
    model(x, scale=2.0)
    (module, args, kwargs), after = seen
    assert (module, kwargs, after) == (model, {"scale": 2.0}, "forward")
    assert args[0] is x


@pytest.mark.parametrize("replacement", [None, "other"])
def test_after_sees_the_output_and_may_replace_it(replacement: Any) -> None:
    """Where it returns nothing, the output stays."""
    seen = []

    def after(module: nn.Module, output: Tensor) -> Any:
        seen.append((module, output))
        return replacement

    model, manager = nn.Identity(), HookManager()
    manager.hook(model, after=after)
    x = torch.ones(2)
    output = model(x)
    assert seen == [(model, x)]
    assert output is x if replacement is None else output == replacement


def test_several_modules_and_hooks() -> None:
    """In the order of the forward passes."""
    seen = []
    model, manager = nn.Sequential(nn.Identity(), nn.Tanh()), HookManager()
    for module in model.modules():
        manager.hook(
            module,
            lambda m, *_: seen.append(f"before {type(m).__name__}"),
            lambda m, _: seen.append(f"after {type(m).__name__}"),
        )
    model(torch.ones(2))
    assert seen == [
        "before Sequential",
        *("before Identity", "after Identity", "before Tanh", "after Tanh"),
        "after Sequential",
    ]


def test_inactive() -> None:
    """Blocks may be nested, and end when something raises."""
    seen = []
    model, manager = nn.Identity(), HookManager()
    manager.hook(model, lambda *_: seen.append("before"), lambda *_: seen.append("after"))
    with manager.inactive():
        with manager.inactive():
            model(torch.ones(2))
        model(torch.ones(2))
    assert seen == []
    with pytest.raises(ValueError, match="inside"), manager.inactive():
        raise ValueError("inside")
    model(torch.ones(2))
    assert seen == ["before", "after"]


def test_inactive_concerns_one_manager() -> None:
    """Others go on."""
    seen = []
    model, first, second = nn.Identity(), HookManager(), HookManager()
    first.hook(model, after=lambda *_: seen.append("first"))
    second.hook(model, after=lambda *_: seen.append("second"))
    with first.inactive():
        model(torch.ones(2))
    assert seen == ["second"]


def test_switch() -> None:
    """Off and on for good, and on inside of a block where it is off around it."""
    seen = []
    model, manager = nn.Identity(), HookManager()
    manager.hook(model, lambda *_: seen.append("before"), lambda *_: seen.append("after"))
    assert manager.is_active
    manager.deactivate()
    assert not manager.is_active
    model(torch.ones(2))
    assert seen == []
    with manager.active():
        model(torch.ones(2))
        with manager.inactive():
            model(torch.ones(2))
    assert seen == ["before", "after"]
    with pytest.raises(ValueError, match="inside"), manager.active():
        raise ValueError("inside")
    assert not manager.is_active
    model(torch.ones(2))
    assert len(seen) == 2
    manager.activate()
    model(torch.ones(2))
    assert len(seen) == 4


def test_each_thread_has_its_switch() -> None:
    seen = []
    model, manager = nn.Identity(), HookManager()
    manager.hook(model, after=lambda *_: seen.append(threading.current_thread().name))
    manager.deactivate()
    thread = threading.Thread(target=model, args=(torch.ones(2),), name="other")
    thread.start()
    thread.join()
    model(torch.ones(2))
    assert seen == ["other"]


def test_context() -> None:
    """The hooks are gone at its end, also if something raises inside."""
    model = nn.Identity()
    manager = HookManager()
    assert not manager.has_hooks
    manager.hook(model, lambda *_: None, lambda *_: None)
    assert manager.has_hooks
    with pytest.raises(ValueError, match="inside"), manager:
        raise ValueError("inside")
    assert not manager.has_hooks
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_remove() -> None:
    """Nothing is left on the modules, and hooks of others are; more hooks may follow."""
    model, manager = nn.Sequential(nn.Identity()), HookManager()
    model.register_forward_hook(lambda *_: None)
    for module in model.modules():
        manager.hook(module, lambda *_: None, lambda *_: None)
    manager.remove()
    manager.remove()
    assert [len(m._forward_hooks) for m in model.modules()] == [1, 0]
    assert [len(m._forward_pre_hooks) for m in model.modules()] == [0, 0]
    seen = []
    manager.hook(model, before=lambda *_: seen.append("again"))
    model(torch.ones(2))
    assert seen == ["again"]


def test_after_is_called_when_the_forward_raises() -> None:
    """With no output; the error reaches the user."""

    class Failing(nn.Module):
        def forward(self) -> None:
            raise ValueError("half-way")

    seen = []
    model, manager = nn.Sequential(Failing()), HookManager()
    model.forward = lambda: model[0]()
    for module in model.modules():
        manager.hook(module, after=lambda m, output: seen.append((type(m).__name__, output)))
    with pytest.raises(ValueError, match="half-way"):
        model()
    assert seen == [("Failing", None), ("Sequential", None)]
