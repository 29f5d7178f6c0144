"""Chooses modules with filters, and checks that functions fit their kind of hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import nn

from autogram.errors import HookError, InvalidModulesError, listed
from autogram.hooks.backward import Gates
from autogram.hooks.handle import HookKind

Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Where = str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]

# The arguments for a function of each kind, without keyword arguments.
_SIGNATURES = {
    "forward_pre": ("module", "args"),
    "forward": ("module", "args", "output"),
    "backward": ("module", "grad_input", "grad_output"),
}


def select(modules: Modules, where: Where | None) -> dict[str, nn.Module]:
    """The chosen modules, by name."""
    selected: dict[str, Any]
    if isinstance(modules, nn.Module):
        named = modules.named_modules()
        selected = (
            {"": modules} if where is None else {n: m for n, m in named if _fits(where, n, m)}
        )
    elif where is not None:
        raise InvalidModulesError(
            "`where` chooses among the modules inside one module. Pass that module, or a list "
            "of modules without `where`."
        )
    elif isinstance(modules, Mapping):
        selected = dict(modules)
    else:
        several = modules if hasattr(modules, "__iter__") else (modules,)
        selected = {str(i): module for i, module in enumerate(several)}
    for name, module in selected.items():
        if not isinstance(module, nn.Module):
            raise InvalidModulesError(
                f"A {type(module).__name__} was given where a module is needed"
                + (f", under the name `{name}`." if name else ".")
                + " Pass a module, a list of modules, or a dict of them."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidModulesError(
                f"`{name or type(module).__name__}` is scripted, and its hooks are compiled with "
                "it. Pass the module that it was scripted from."
            )
    if not selected:
        some = "" if where is None else _names_in(modules)
        raise InvalidModulesError(
            f"{where!r} chooses no module.{some} Pass a type, a pattern or a function that "
            "matches at least one."
        )
    return selected


def _names_in(modules: Any) -> str:
    """Some names of modules, for a message."""
    names = [f"`{name}`" for name, _ in modules.named_modules() if name]
    return f" There are {listed(names)}." if names else ""


def _fits(where: Where, name: str, module: nn.Module) -> bool:
    """Whether a module is chosen."""
    if isinstance(where, str):
        return fnmatchcase(name, where)
    if isinstance(where, (type, tuple)):
        return isinstance(module, where)
    if not callable(where):
        raise InvalidModulesError(
            f"`where` is a {type(where).__name__}. Pass a type, a pattern of names, or a function "
            "of a name and a module."
        )
    return bool(where(name, module))


def ids_inside(module: Any) -> set[int]:
    """The ``id`` of a module and of each module inside it."""
    if not isinstance(module, nn.Module):
        raise HookError(
            f"The filter `module` is a {type(module).__name__}. Pass a module, such as "
            "`model.encoder`; a hook itself is `manager[id]`."
        )
    return {id(x) for x in module.modules()}


def described(filters: Mapping[str, Any]) -> str:
    """Filters in a message: empty if there are none."""
    texts = []
    for key, value in filters.items():
        if isinstance(value, nn.Module):
            texts.append(f"the module `{type(value).__name__}`")
        elif value is not None:
            texts.append(f"{key}=`{name_of(value)}`" if callable(value) else f"{key}={value!r}")
    return ", ".join(texts)


def check_kind(kind: str) -> None:
    """Refuses an unknown kind."""
    if kind not in get_args(HookKind):
        kinds = ", ".join(f'"{known}"' for known in get_args(HookKind))
        raise HookError(f"The kind of the hook is {kind!r}. Pass one of {kinds}.")


def check_function(function: Any, kind: HookKind, *, with_kwargs: bool) -> None:
    """Refuses a function that cannot be called with the arguments of its kind."""
    if kind == "around":
        if not all(hasattr(function, name) for name in ("begin", "end", "is_off")):
            raise HookError(
                f"A {type(function).__name__} was given as an around hook. Pass an object with "
                "`begin(module, args, kwargs)`, `end(module, output)`, and an attribute `is_off`."
            )
        return
    if kind == "backward" and isinstance(function, Gates):
        return
    if not callable(function):
        raise HookError(f"A {type(function).__name__} was given as a hook. Pass a function.")
    if kind == "backward" and with_kwargs:
        raise HookError(
            "Leave out `with_kwargs`: a backward hook receives gradients, and those of keyword "
            "arguments come after the others in `grad_input`."
        )
    wanted = _SIGNATURES[kind]
    other = "" if with_kwargs or kind == "backward" else ", or pass `with_kwargs=True`"
    if with_kwargs:
        wanted = (*wanted[:2], "kwargs", *wanted[2:])
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C have no signature
        return
    try:
        signature.bind(*wanted)
    except TypeError as error:
        raise HookError(
            f"`{name_of(function)}` has the signature `{signature}`, and a {kind} hook"
            f"{' with keyword arguments' if with_kwargs else ''} is called with "
            f"`({', '.join(wanted)})`. Let it take these arguments{other}."
        ) from error


def name_of(function: Any) -> str:
    """The name of a function in ids."""
    function = getattr(function, "func", function)  # a `functools.partial` has no name
    return str(getattr(function, "__name__", type(function).__name__))
