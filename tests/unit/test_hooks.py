"""Hooks that are registered, switched and removed together."""

import copy
import pickle
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


def test_only_with_gradients() -> None:
    """Where the module is called: inside of a block without them they may be enabled again."""
    seen = []
    model, manager = nn.Identity(), HookManager()
    manager.hook(
        model,
        lambda *_: seen.append("before"),
        lambda *_: seen.append("after"),
        only_with_gradients=True,
    )
    manager.hook(model, lambda *_: seen.append("always"))
    with torch.no_grad():
        model(torch.ones(2))
        assert seen == ["always"]
        with torch.enable_grad():
            model(torch.ones(2))
    assert seen == ["always", "before", "always", "after"]
    with torch.inference_mode():
        model(torch.ones(2))
    assert seen[4:] == ["always"]


def test_after_is_called_where_before_was() -> None:
    """Also if the forward switches gradients off or on, and leaves them so."""

    class Switching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_grad_enabled(not torch.is_grad_enabled())
            return x

    seen = []
    model, manager = Switching(), HookManager()
    manager.hook(
        model,
        lambda *_: seen.append("before"),
        lambda *_: seen.append("after"),
        only_with_gradients=True,
    )
    model(torch.ones(2))
    assert seen == ["before", "after"]
    model(torch.ones(2))
    assert torch.is_grad_enabled()
    assert seen == ["before", "after"]


def test_managers_are_nested() -> None:
    """The last is the innermost, whichever is removed first; hooks of PyTorch are inside of all."""
    seen = []
    model, managers = nn.Identity(), [HookManager() for _ in range(3)]
    model.register_forward_pre_hook(lambda *_: seen.append("pre"))
    for i, manager in enumerate(managers):
        manager.hook(
            model,
            lambda *_, i=i: seen.append(f"before {i}"),
            lambda *_, i=i: seen.append(f"after {i}"),
        )
    managers[1].remove()
    model(torch.ones(2))
    assert seen == ["before 0", "before 2", "pre", "after 2", "after 0"]
    managers[0].remove()
    managers[2].remove()
    assert vars(model).keys() == vars(nn.Identity()).keys()


def test_after_is_called_at_an_interrupt() -> None:
    """Unlike those of PyTorch, which are left out where the keyboard interrupts a forward."""

    class Interrupted(nn.Module):
        def forward(self) -> None:
            raise KeyboardInterrupt

    seen = []
    model, manager = Interrupted(), HookManager()
    manager.hook(model, after=lambda _, output: seen.append(output))
    with pytest.raises(KeyboardInterrupt):
        model()
    assert seen == [None]


def test_arguments_of_any_name() -> None:
    """What the forward calls its arguments does not matter to hooks."""

    class Model(nn.Module):
        def forward(self, *, self_: int, hooked: int, module: int) -> tuple[int, ...]:
            return self_, hooked, module

    seen: list[Any] = []
    model, manager = Model(), HookManager()
    manager.hook(model, lambda _, args, kwargs: seen.append((args, kwargs)))
    arguments = {"self_": 1, "hooked": 2, "module": 3}
    assert model(**arguments) == (1, 2, 3)
    assert seen == [((), arguments)]


class WithOwnState(nn.Identity):
    """A module that is copied with all that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


@pytest.mark.parametrize("make", [nn.Identity, WithOwnState])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_none(make: type[nn.Module], copied: Any) -> None:
    seen = []
    model, manager = make(), HookManager()
    manager.hook(model, lambda m, *_: seen.append(m))
    twin = copied(model)
    twin(torch.ones(2))
    assert seen == []
    manager.hook(twin, lambda m, *_: seen.append(m))
    twin(torch.ones(2))
    assert seen == [twin]


def test_what_shares_all_with_a_module() -> None:
    """A shallow copy that takes the hooks with it is called itself, and so until they go."""
    seen = []
    model, manager = WithOwnState(), HookManager()
    manager.hook(model, lambda m, *_: seen.append(m))
    twin = copy.copy(model)
    twin.forward = lambda x: 2 * x
    assert torch.equal(twin(torch.ones(2)), torch.full((2,), 2.0))
    assert seen == [twin]
    manager.remove()
    assert torch.equal(twin(torch.ones(2)), torch.full((2,), 2.0))
    assert seen == [twin]


def test_replicas_in_threads() -> None:
    """As `nn.DataParallel` makes them, on devices that this machine need not have."""
    seen = []
    model, manager = nn.Linear(2, 2), HookManager()
    manager.hook(model, lambda m, *_: seen.append(m))
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(2, 2), torch.ones(2)
    found = []
    thread = threading.Thread(target=lambda: found.append(replica(torch.randn(3, 2))))
    thread.start()
    thread.join()
    assert torch.equal(found[0], torch.ones(3, 2))
    assert seen == [replica]
    model(torch.ones(2))
    assert seen == [replica, model]


@pytest.mark.parametrize("is_first", [True, False])
def test_compiled_modules(is_first: bool) -> None:
    """What `nn.Module.compile` sets is called, and stays when the hooks go."""
    seen = []
    model, manager = nn.Linear(2, 2), HookManager()
    if is_first:
        model.compile(backend="eager")
    manager.hook(model, lambda *_: seen.append("before"))
    if not is_first:
        model.compile(backend="eager")
    compiled = model._compiled_call_impl
    model(torch.ones(2))
    manager.remove()
    assert seen == []
    assert model._compiled_call_impl is compiled
