"""The registry of hooks: what is registered, found, switched and removed."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import AutogramError, HookError, InvalidModulesError
from autogram.hooks import Handle, HookManager

X = torch.ones(2, 3, dtype=torch.float64)


def make_model() -> nn.Sequential:
    """A model with names of two levels."""
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), nn.Tanh())


class Notes:
    """Hooks with PyTorch's signatures, that note what they see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before(self, module: nn.Module, args: Any) -> None:
        self.seen.append(("before", type(module).__name__, len(args)))

    def after(self, module: nn.Module, args: Any, _: Any) -> None:
        self.seen.append(("after", type(module).__name__, len(args)))

    def backward(self, module: nn.Module, _: Any, grad_output: Any) -> None:
        self.seen.append(("backward", type(module).__name__, len(grad_output)))


WHERE = [
    ("a type", nn.Tanh, ["1.0", "2"]),
    ("several types", (nn.Tanh, nn.Linear), ["0", "1.0", "1.1", "2"]),
    ("a pattern", "1.*", ["1.0", "1.1"]),
    ("a name", "1.1", ["1.1"]),
    ("a function", lambda name, module: name > "1" and isinstance(module, nn.Linear), ["1.1"]),
    ("all", "*", ["Sequential", "0", "1", "1.0", "1.1", "2"]),
]


@pytest.mark.parametrize(("where", "names"), [x[1:] for x in WHERE], ids=[x[0] for x in WHERE])
def test_where(where: Any, names: list[str]) -> None:
    """The chosen modules have handles, in the order of the model, with names as ids."""
    model, notes = make_model(), Notes()
    handles = HookManager().register(notes.after, model, where=where)
    assert [handle.id for handle in handles] == [f"after[{name}]" for name in names]
    model(X)
    assert len(notes.seen) == len(names)


def test_one_module_several_and_a_dict() -> None:
    """Names are the class, the position, and the key; equal ids get numbers."""
    manager, notes = HookManager(), Notes()
    one, two = nn.Tanh(), nn.ReLU()
    assert [h.id for h in manager.register(notes.after, one)] == ["after[Tanh]"]
    assert [h.id for h in manager.register(notes.before, [one, two], kind="forward_pre")] == [
        "before[0]",
        "before[1]",
    ]
    handles = manager.register(notes.backward, {"a": one, "b": two}, kind="backward", name="mine")
    assert [h.id for h in handles] == ["mine[a]", "mine[b]"]
    assert [h.name for h in handles] == ["mine", "mine"]
    assert [h.module for h in handles] == [one, two]


def test_equal_ids_get_numbers() -> None:
    manager, notes, modules = HookManager(), Notes(), [nn.Tanh(), nn.Tanh()]
    found = [manager.register(notes.after, module)[0].id for module in modules]
    assert found == ["after[Tanh]", "after[Tanh]#2"]
    assert manager["after[Tanh]#2"].module is modules[1]


def test_signatures_are_those_of_pytorch() -> None:
    """Hooks that people have can be passed as they are: the same is seen, and replaced."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            return x * scale

    def pre(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] + 1,), {"scale": kwargs["scale"] * 2}

    def post(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        assert kwargs == {"scale": 6}
        return output - args[0]

    ours, theirs, manager = Scaled(), Scaled(), HookManager()
    manager.register(pre, ours, kind="forward_pre", with_kwargs=True)
    manager.register(post, ours, with_kwargs=True)
    theirs.register_forward_pre_hook(pre, with_kwargs=True)
    theirs.register_forward_hook(post, with_kwargs=True)
    assert torch.equal(ours(X, scale=3), theirs(X, scale=3))


def test_filters() -> None:
    """Any combination; without any, all."""
    model, notes, manager = make_model(), Notes(), HookManager()
    manager.register(notes.after, model, where=nn.Tanh)
    manager.register(notes.before, model, where="*", kind="forward_pre", name="first")
    assert len(manager.handles()) == len(manager) == 8
    assert [h.id for h in manager.handles(module=model[2])] == ["after[2]", "first[2]"]
    assert len(manager.handles(function=notes.before)) == 6
    assert len(manager.handles(kind="forward")) == len(manager.handles(name="after")) == 2
    assert [h.id for h in manager.handles(module=model[2], name="first")] == ["first[2]"]
    assert manager.handles(function=notes.backward) == []
    assert next(iter(manager)) is manager["after[1.0]"]


@pytest.mark.parametrize("act", ["activate", "deactivate", "active", "inactive", "remove"])
def test_a_container_is_all_that_is_inside(act: str) -> None:
    """Whether it has a hook of its own or not: the same for each method, and for `handles`."""
    model, notes, manager = make_model(), Notes(), HookManager()
    manager.register(notes.after, model, where=nn.Tanh, active=act not in ("activate", "active"))
    assert [h.id for h in manager.handles(module=model[1])] == ["after[1.0]"]
    assert manager.handles(module=model) == manager.handles()
    rows = [line.split() for line in str(manager).splitlines()]
    result = getattr(manager, act)(module=model[1])
    if act in ("active", "inactive"):
        result.__enter__()
    now = [line.split() for line in str(manager).splitlines()]
    assert [row[0] for row in rows if row not in now] == ["after[1.0]"]
    if act in ("active", "inactive"):
        result.__exit__(None, None, None)
        assert [line.split() for line in str(manager).splitlines()] == rows


NOTHING = [
    (lambda model: {"module": model[0]}, "the module `Linear`"),
    (lambda model: {"module": model[1], "name": "first"}, "the module `Sequential`.*name='first'"),
    (lambda _: {"function": print}, r"function=`print`"),
    (lambda _: {"kind": "backward"}, "kind='backward'"),
    (lambda _: {"name": "aft*"}, r"name='aft\*'"),
]


@pytest.mark.parametrize("act", ["activate", "deactivate", "active", "inactive", "remove"])
@pytest.mark.parametrize(("filters", "message"), NOTHING, ids=[x[1] for x in NOTHING])
def test_filters_that_fit_nothing(act: str, filters: Any, message: str) -> None:
    """An error says what there is, before a block is entered, and nothing changes."""
    model, notes, manager = make_model(), Notes(), HookManager()
    manager.register(notes.after, model, where=nn.Tanh)
    manager.register(notes.before, model[2], kind="forward_pre", name="first")
    there = r"There are `after\[1\.0\]` \(forward\), .*`first\[.*\]` \(forward_pre\)"
    with pytest.raises(HookError, match=rf"No hook matches {message}.*{there}"):
        getattr(manager, act)(**filters(model))
    assert len(manager) == 3
    assert manager.is_active


def test_filters_where_nothing_is_registered() -> None:
    """Without filters, there is nothing to do."""
    manager = HookManager()
    manager.deactivate()
    manager.remove()
    with pytest.raises(HookError, match=r"No hook matches kind='forward'\. None is registered\."):
        manager.deactivate(kind="forward")


def test_a_name_is_no_module() -> None:
    manager = HookManager()
    with pytest.raises(HookError, match=r"The filter `module` is a .*str\. Pass a module"):
        manager.handles(module="encoder")  # type: ignore[arg-type]


def test_a_filter_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="modul"):
        HookManager().deactivate(modul=TANH)  # type: ignore[call-arg]


def test_switching() -> None:
    """An inactive hook is not registered with PyTorch."""
    model, notes, manager = make_model(), Notes(), HookManager()
    manager.register(notes.after, model, where=nn.Tanh, active=False)
    assert not model[2]._forward_hooks
    assert not manager.is_active
    model(X)
    assert notes.seen == []
    manager.activate(module=model[2])
    assert manager["after[2]"].is_active
    model(X)
    assert len(notes.seen) == 1
    manager.activate()
    assert manager.is_active
    model(X)
    assert len(notes.seen) == 3
    manager.deactivate(name="after")
    model(X)
    assert len(notes.seen) == 3
    assert not model[2]._forward_hooks


def test_contexts_restore_what_was_before() -> None:
    """Nested ones, and after an exception; hooks registered or removed meanwhile stay so."""
    model, notes, manager = make_model(), Notes(), HookManager()
    first, second = manager.register(notes.after, model, where=nn.Tanh)
    manager.deactivate(module=model[2])

    def states() -> list[bool]:
        return [handle.is_active for handle in manager]

    with manager.inactive():
        assert states() == [False, False]
        with manager.active():
            assert states() == [True, True]
            with manager.inactive(module=model[2]):
                assert states() == [True, False]
            assert states() == [True, True]
        assert states() == [False, False]
        manager.register(notes.before, model[2], kind="forward_pre")
        manager.register(notes.before, model[0], kind="forward_pre", active=False)
    assert states() == [True, False, True, False]
    with pytest.raises(ValueError, match="inside"), manager.active():
        raise ValueError("inside")
    assert states() == [True, False, True, False]
    with manager.inactive():
        first.remove()
        second.remove()
    assert len(manager) == 2
    assert not model[2]._forward_hooks


@pytest.mark.parametrize("is_prepended", [False, True])
def test_order_of_what_is_activated_again(is_prepended: bool) -> None:
    """Among hooks of this manager, of another, and of PyTorch, it has its first place."""
    module, seen = nn.Tanh(), []

    def noting(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    one, two = HookManager(), HookManager()
    one.register(noting("a"), module, name="a")
    two.register(noting("b"), module, name="b")
    module.register_forward_hook(noting("c"))
    one.register(noting("d"), module, name="d")
    one.register(noting("e"), module, name="e", active=False)
    two.register(noting("f"), module, name="f")
    if is_prepended:
        module.register_forward_hook(noting("first"), prepend=True)
    for manager, name in [(one, "a"), (two, "b"), (one, "d"), (one, "a")]:
        manager.deactivate(name=name)
        manager.activate(name=name)
    one.activate(name="e")
    module(X)
    assert seen == ["first"] * is_prepended + list("abcdef")


def test_switching_holds_for_all_threads() -> None:
    module, notes, manager = nn.Tanh(), Notes(), HookManager()
    manager.register(notes.after, module)
    with manager.inactive():
        thread = threading.Thread(target=module, args=(X,))
        thread.start()
        thread.join()
    assert notes.seen == []


def test_removing() -> None:
    """By handle, by filter, at the end of a block; hooks of others stay."""
    model, notes = make_model(), Notes()
    model[2].register_forward_hook(lambda *_: None)
    with HookManager() as manager:
        first, _ = manager.register(notes.after, model, where=nn.Tanh)
        manager.register(notes.backward, model, where=nn.Linear, kind="backward")
        first.remove()
        first.remove()
        assert len(manager) == 3
        manager.remove(kind="backward")
        assert [h.id for h in manager] == ["after[2]"]
        manager.register(notes.after, model[1][0])
    assert len(manager) == 0
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert [len(a) + len(b) for a, b in hooks] == [0, 0, 0, 0, 0, 1]


def test_removing_while_a_hook_runs() -> None:
    """What is removed by one hook is not called by the same call any more, nor are others lost."""
    module, seen, manager = nn.Tanh(), [], HookManager()

    def removing(_: nn.Module, __: Any, ___: Any) -> None:
        seen.append("removing")
        manager.remove(name="removing")
        manager.remove(name="removed")

    manager.register(removing, module)
    manager.register(lambda *_: seen.append("removed"), module, name="removed", with_kwargs=True)
    manager.register(lambda *_: seen.append("stays"), module, name="stays")
    module(X)
    module(X)
    assert seen == ["removing", "stays", "stays"]


def test_handles_hold_modules_weakly() -> None:
    """A module that is dropped takes its handles along."""
    manager, module = HookManager(), nn.Tanh()
    (handle,) = manager.register(Notes().after, module)
    manager.register(Notes().backward, module, kind="backward")
    reference = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert reference() is None
    finally:
        gc.enable()
    assert handle.module is None
    assert len(manager) == 0
    manager.activate()
    handle.remove()


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_no_hooks(kind: Any, copied: Any) -> None:
    """What PyTorch copies takes itself off at the first call."""
    module, manager, seen = nn.Linear(3, 3), HookManager(), []
    functions = {
        "forward_pre": lambda m, _: seen.append(m),
        "forward": lambda m, *_: seen.append(m),
        "backward": lambda m, *_: seen.append(m),
    }
    manager.register(functions[kind], module, kind=kind)
    twin = copied(module)
    twin(X).sum().backward()
    assert seen == []
    assert not twin._forward_hooks
    assert not twin._forward_pre_hooks
    module(X).sum().backward()
    assert seen == [module]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_manager_in_a_module_that_is_copied(copied: Any) -> None:
    """As where a module registers hooks of its own. The copy's manager has none."""
    module, notes = nn.Linear(3, 3), Notes()
    module.manager = HookManager()
    module.manager.register(notes.after, module)
    twin = copied(module)
    assert len(twin.manager) == 0
    twin(X)
    assert not twin._forward_hooks
    twin.manager.register(notes.after, twin)
    assert (len(twin.manager), len(module.manager)) == (1, 1)


def test_the_table() -> None:
    """Of what is registered where, and whether it is active."""
    manager, notes = HookManager(), Notes()
    assert str(manager) == "No hooks are registered."
    model = make_model()
    manager.register(notes.after, model, where=nn.Tanh)
    manager.register(notes.backward, model[0], kind="backward", active=False)
    assert str(manager).splitlines() == [
        "hook              module  kind",
        "after[1.0]        Tanh    forward   active",
        "after[2]          Tanh    forward   active",
        "backward[Linear]  Linear  backward  inactive",
    ]
    assert repr(manager["after[2]"]) == "Handle('after[2]', kind='forward', active)"


def test_a_short_text() -> None:
    """One line, however many hooks there are."""
    manager, notes, model = HookManager(), Notes(), make_model()
    assert repr(manager) == "HookManager(0 hooks, 0 active)"
    manager.register(notes.after, model, where="*")
    manager.register(notes.before, model[0], kind="forward_pre", active=False)
    assert repr(manager) == "HookManager(7 hooks, 6 active)"


TANH = nn.Tanh()


def wants_one(module: nn.Module) -> None:
    """Has too few arguments for any kind."""


MISTAKES: list[tuple[Callable[[HookManager], Any], type[AutogramError], str]] = [
    (lambda m: m.register(print, 3), InvalidModulesError, "A int was given where a module is"),
    (lambda m: m.register(print, [TANH, "x"]), InvalidModulesError, "under the name `1`"),
    (
        lambda m: m.register(print, TANH, where="x.*"),
        InvalidModulesError,
        "chooses no module",
    ),
    (lambda m: m.register(print, make_model(), where=nn.GRU), InvalidModulesError, "There are `0`"),
    (lambda m: m.register(print, [TANH], where=nn.Tanh), InvalidModulesError, "Pass that module"),
    (lambda m: m.register(print, TANH, where=3), InvalidModulesError, "`where` is a int"),
    (lambda m: m.register(print, TANH, kind="sideways"), HookError, 'Pass one of "forward_pre"'),
    (lambda m: m.handles(kind="sideways"), HookError, "The kind of the hook is"),
    (lambda m: m["nothing"], HookError, "Pass the `id` of a handle"),
    (lambda m: m.register(3, TANH), HookError, "A int was given as a hook"),
    (lambda m: m.register(wants_one, TANH), HookError, r"called with `\(module, args, output\)`"),
    (lambda m: m.register(lambda *_: 0, TANH, kind="around"), HookError, "`begin"),
    (lambda m: m.register(wants_one, TANH, kind="backward"), HookError, "grad_input, grad_output"),
    (
        lambda m: m.register(lambda _m, _args, _kwargs: None, TANH, kind="forward_pre"),
        HookError,
        r"Let it take these arguments, or pass `with_kwargs=True`",
    ),
    (
        lambda m: m.register(lambda _a, _b, _c: None, TANH, with_kwargs=True),
        HookError,
        r"with keyword arguments is called with `\(module, args, kwargs, output\)`",
    ),
    (
        lambda m: m.register(lambda *_: None, TANH, kind="backward", with_kwargs=True),
        HookError,
        "Leave out `with_kwargs`",
    ),
    (
        lambda m: m.register(WANTS, [nn.Tanh(), TANH]),
        HookError,
        r"`wants\[Tanh\]` is already registered as a forward hook. Register it once, ",
    ),
]


def wants(module: nn.Module, args: Any, output: Any) -> None:
    """A hook."""


WANTS = wants


def test_scripted_modules() -> None:
    """Their hooks would be compiled with them."""
    scripted = torch.jit.script(nn.Tanh())
    with pytest.raises(InvalidModulesError, match="is scripted, and its hooks are compiled with"):
        HookManager().register(wants, scripted)


@pytest.mark.parametrize(("act", "error", "message"), MISTAKES)
def test_mistakes(act: Callable[[HookManager], Any], error: Any, message: str) -> None:
    """They say what to do, and nothing is registered."""
    with HookManager() as manager:
        manager.register(wants, TANH)
        with pytest.raises(error, match=message):
            act(manager)
        assert [handle.id for handle in manager] == ["wants[Tanh]"]


def test_one_function_in_several_kinds_and_objects_without_names() -> None:
    """That is allowed; so are partial functions and callable objects."""

    class Hook:
        def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
            """Does nothing."""

    manager, hook = HookManager(), Hook()
    ids = [manager.register(hook, TANH, kind=kind)[0].id for kind in ("forward_pre", "forward")]
    assert ids == ["Hook[Tanh]", "Hook[Tanh]#2"]
    (handle,) = manager.register(partial(wants, output=None), TANH, kind="forward_pre")
    assert isinstance(handle, Handle)
    assert handle.id == "wants[Tanh]"
    manager.remove()


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_compiled_modules(kind: Any) -> None:
    """`torch.compile` takes in the hooks that are active when it compiles, as those of PyTorch."""
    module, manager = nn.Linear(3, 3), HookManager()
    double = {
        "forward_pre": lambda _, args: (args[0] * 2,),
        "forward": lambda _module, _args, output: output * 2,
    }[kind]
    manager.register(double, module, kind=kind)
    for is_active in (True, False, True):
        torch._dynamo.reset()
        manager.activate() if is_active else manager.deactivate()
        compiled = torch.compile(module, backend="eager")
        assert torch.equal(compiled(X), module(X))
