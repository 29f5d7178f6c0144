"""What is around the calls of a module: it begins and ends with each, while gradients are on."""

import copy
import pickle
import threading
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram.hooks import HookManager
from tests.unit.environment import device_of_threads

NOTHING = object()


class Noted:
    """Notes what it sees, and may replace outputs, or leave calls alone."""

    def __init__(self, name: str = "", replacement: Any = None, *, is_off: bool = False) -> None:
        self.seen: list[Any] = []
        self.name = name
        self.replacement = replacement
        self.is_off = is_off

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.append(("begin", self.name or type(module).__name__, args, kwargs))

    def end(self, module: nn.Module, output: Any) -> Any:
        self.seen.append(("end", self.name or type(module).__name__, output))
        return self.replacement

    @property
    def words(self) -> list[str]:
        """What it was called with, without values."""
        return [f"{word} {name}" for word, name, *_ in self.seen]


def put(module: nn.Module, *several: Noted, where: Any = None) -> HookManager:
    """A manager with something around a module, the first outside."""
    manager = HookManager()
    for noted in several:
        manager.register(noted, module, where=where, kind="around")
    return manager


class Model(nn.Module):
    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x * scale


def test_begin_and_end() -> None:
    """With all arguments, and with the output."""
    model, noted = Model(), Noted()
    put(model, noted)
    x = torch.ones(2)
    output = model(x, scale=2.0)
    begin, end = noted.seen
    assert begin == ("begin", "Model", (x,), {"scale": 2.0})
    assert end[2] is output


@pytest.mark.parametrize("replacement", [None, "other"])
def test_the_output_may_be_replaced(replacement: Any) -> None:
    model, x = nn.Identity(), torch.ones(2)
    put(model, Noted(replacement=replacement))
    output = model(x)
    assert output is x if replacement is None else output == replacement


def test_order() -> None:
    """Nested modules, several around one, and hooks of PyTorch inside of all."""
    model = nn.Sequential(nn.Identity(), nn.Tanh())
    noted = Noted()
    with put(model, noted, where=nn.Module):
        model(torch.ones(2))
    assert noted.words == [
        "begin Sequential",
        *("begin Identity", "end Identity", "begin Tanh", "end Tanh"),
        "end Sequential",
    ]
    layer, words = nn.Identity(), []
    layer.register_forward_pre_hook(lambda *_: words.append("pre"))
    several = [Noted(str(i)) for i in range(3)]
    for each in several:
        each.seen = words
    managers = [put(layer, each) for each in several]
    managers[1].remove()
    layer(torch.ones(2))
    shown = [word if isinstance(word, str) else f"{word[0]} {word[1]}" for word in words]
    assert shown == ["begin 0", "begin 2", "pre", "end 2", "end 0"]


def test_what_is_activated_again_has_its_first_place() -> None:
    model, seen = nn.Identity(), []
    outer, inner = Noted("outer"), Noted("inner")
    outer.seen = inner.seen = seen
    manager = put(model, outer, inner)
    with manager.inactive(function=outer):
        model(torch.ones(2))
    model(torch.ones(2))
    words = [f"{word} {name}" for word, name, *_ in seen]
    assert words == [
        *("begin inner", "end inner"),
        *("begin outer", "begin inner", "end inner", "end outer"),
    ]


def test_calls_that_are_left_alone() -> None:
    """What counts is the moment when a call begins."""
    model, noted, other = nn.Identity(), Noted(is_off=True), Noted()
    put(model, noted, other)
    model(torch.ones(2))
    noted.is_off, other.is_off = False, True
    model.forward = lambda x: setattr(noted, "is_off", True) or x
    model(torch.ones(2))
    assert noted.words == other.words == ["begin Identity", "end Identity"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_end_is_reached_when_the_forward_raises(error: type[BaseException]) -> None:
    """With no output; PyTorch leaves its hooks out where the keyboard interrupts a forward."""

    class Failing(nn.Module):
        def forward(self) -> None:
            raise error

    model, noted = Failing(), Noted()
    put(model, noted)
    with pytest.raises(error):
        model()
    assert noted.seen[1:] == [("end", "Failing", None)]


def test_the_end_is_reached_when_another_end_raises() -> None:
    """Of all that is outside, with no output, as where the forward raises."""

    class Failing(Noted):
        def end(self, module: nn.Module, output: Any) -> Any:
            super().end(module, output)
            raise ValueError("at the end")

    model, outer, outermost = nn.Identity(), Failing(), Noted()
    inner = Failing()
    put(model, outermost, outer, inner)
    with pytest.raises(ValueError, match="at the end"):
        model(torch.ones(2))
    assert inner.words == outer.words == outermost.words == ["begin Identity", "end Identity"]
    assert inner.seen[1][2] is not None
    assert outer.seen[1][2] is outermost.seen[1][2] is None


def test_without_gradients_nothing_begins() -> None:
    """Where the module is called: inside of a block without them they may be enabled again."""
    model, noted = nn.Identity(), Noted()
    put(model, noted)
    with torch.no_grad():
        model(torch.ones(2))
        with torch.inference_mode():
            model(torch.ones(2))
        assert noted.seen == []
        with torch.enable_grad():
            model(torch.ones(2))
    assert len(noted.seen) == 2


def test_the_end_belongs_to_the_beginning() -> None:
    """Also if the forward switches gradients off or on, and leaves them so."""

    class Switching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_grad_enabled(not torch.is_grad_enabled())
            return x

    model, noted = Switching(), Noted()
    put(model, noted)
    model(torch.ones(2))
    model(torch.ones(2))
    assert torch.is_grad_enabled()
    assert noted.words == ["begin Switching", "end Switching"]


def test_nothing_is_left() -> None:
    model = nn.Identity()
    with put(model, Noted(), Noted()):
        pass
    assert vars(model).keys() == vars(nn.Identity()).keys()


def test_arguments_of_any_name() -> None:
    """What the forward calls its arguments does not matter."""

    class Named(nn.Module):
        def forward(self, *, self_: int, hooked: int, module: int) -> tuple[int, ...]:
            return self_, hooked, module

    model, noted = Named(), Noted()
    put(model, noted)
    arguments = {"self_": 1, "hooked": 2, "module": 3}
    assert model(**arguments) == (1, 2, 3)
    assert noted.seen[0][2:] == ((), arguments)


class WithOwnState(nn.Identity):
    """A module that is copied with all that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


@pytest.mark.parametrize("make", [nn.Identity, WithOwnState])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_nothing_around(make: Callable[[], nn.Module], copied: Any) -> None:
    model, noted = make(), Noted()
    put(model, noted)
    twin = copied(model)
    twin(torch.ones(2))
    assert noted.seen == []
    put(twin, noted)
    twin(torch.ones(2))
    assert len(noted.seen) == 2


class Which:
    """Notes which module is called."""

    def __init__(self) -> None:
        self.seen: list[nn.Module] = []

    is_off = False

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self.seen.append(module)

    def end(self, module: nn.Module, output: Any) -> None:
        """Notes nothing."""


def test_what_shares_all_with_a_module() -> None:
    """A shallow copy that takes what is around with it is called itself, and so until that goes."""
    model, which, manager = WithOwnState(), Which(), HookManager()
    manager.register(which, model, kind="around")
    twin = copy.copy(model)
    twin.forward = lambda x: 2 * x
    assert torch.equal(twin(torch.ones(2)), torch.full((2,), 2.0))
    assert which.seen == [twin]
    manager.remove()
    assert torch.equal(twin(torch.ones(2)), torch.full((2,), 2.0))
    assert which.seen == [twin]


def test_replicas_in_threads() -> None:
    """As `nn.DataParallel` makes them, on devices that this machine need not have."""
    model, which, manager = nn.Linear(2, 2), Which(), HookManager()
    manager.register(which, model, kind="around")
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(2, 2), torch.ones(2)
    found = []
    x = torch.randn(3, 2)
    place = device_of_threads()
    thread = threading.Thread(target=lambda: (place(), found.append(replica(x))))
    thread.start()
    thread.join()
    assert torch.equal(found[0], torch.ones(3, 2))
    model(torch.ones(2))
    assert which.seen == [replica, model]


@pytest.mark.parametrize("is_first", [True, False])
def test_compiled_modules(is_first: bool) -> None:
    """What `nn.Module.compile` sets is called, and stays when the rest goes."""
    model, noted, manager = nn.Linear(2, 2), Noted(), HookManager()
    if is_first:
        model.compile(backend="eager")
    manager.register(noted, model, kind="around")
    if not is_first:
        model.compile(backend="eager")
    compiled = model._compiled_call_impl
    model(torch.ones(2))
    manager.remove()
    assert noted.seen == []
    assert model._compiled_call_impl is compiled


def test_what_it_costs_without_gradients() -> None:
    """Less than hooks of PyTorch before and after the forward, that do nothing, in the same run."""
    x = torch.ones(1)
    bare, around, hooked = nn.Identity(), nn.Identity(), nn.Identity()
    put(around, Noted())
    hooked.register_forward_pre_hook(lambda *_: None)
    hooked.register_forward_hook(lambda *_: None)

    def fastest(module: nn.Module) -> float:
        return min(timeit.repeat(lambda: module(x), number=2000, repeat=20))

    with torch.no_grad():
        costs = [fastest(module) for module in (bare, around, hooked)]
    assert costs[1] - costs[0] < costs[2] - costs[0], costs
