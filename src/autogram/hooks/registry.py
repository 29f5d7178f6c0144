"""The registry of hooks: functions on modules, found and switched with filters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from torch import nn

from autogram.errors import HookError, in_columns, listed
from autogram.hooks.handle import Handle, HookKind
from autogram.hooks.selection import (
    Modules,
    Where,
    check_function,
    check_kind,
    described,
    ids_inside,
    name_of,
    select,
)


class HookManager:
    """Functions that are called with modules: registered, found, switched and removed together.

    The functions have the signatures of PyTorch's hooks, and their results have the same effect as
    those of PyTorch's hooks. Functions are registered with PyTorch's own methods. An inactive
    function is not registered with PyTorch, and costs nothing; when it becomes active again, it
    returns to its original place among the module's hooks. Copies and pickles of a module contain
    no hooks of a manager. Switching applies to all threads.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram.hooks import HookManager
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        >>> shapes = []
        >>> def note(module, args, output):
        ...     shapes.append(tuple(output.shape))
        >>> with HookManager() as manager:
        ...     handles = manager.register(note, model, where=nn.Linear)
        ...     _ = model(torch.zeros(5, 3))
        ...     with manager.inactive(function=note):
        ...         _ = model(torch.zeros(6, 3))
        >>> _ = model(torch.zeros(7, 3))
        >>> handles[0].id, shapes
        ('note[0]', [(5, 2)])
    """

    def __init__(self) -> None:
        self._handles: dict[str, Handle] = {}
        self._are_active: bool | None = True

    @property
    def is_active(self) -> bool:
        """Whether all hooks are active."""
        if self._are_active is None:
            self._are_active = all(handle.is_active for handle in self)
        return self._are_active

    def register(
        self,
        function: Any,
        modules: Modules,
        *,
        where: Where | None = None,
        kind: HookKind = "forward",
        name: str | None = None,
        active: bool = True,
        with_kwargs: bool = False,
    ) -> list[Handle]:
        """Registers a function on modules.

        Args:
            function: The function, called as ``function(module, args)`` for ``"forward_pre"``, as
                ``function(module, args, output)`` for ``"forward"``, and as
                ``function(module, grad_input, grad_output)`` for ``"backward"``. For ``"around"``,
                an object with the methods ``begin(module, args, kwargs)`` and
                ``end(module, output)``, which is also called if the forward raises, with ``None``.
                Neither is called while gradients are disabled, or while the object's attribute
                ``is_off`` is true.
            modules: One module, several in a list, or several in a dict by name.
            where: The choice among the given module and those inside it: a type or a tuple of
                types, a pattern of qualified names such as ``"encoder.*.attn"`` (``*`` matches
                any text), or a function of the name and the module.
            kind: When to call the function. ``"backward"`` calls it for each call of a module, once
                for each backward pass that reaches the call. ``grad_input`` has an entry for each
                leaf of the nested arguments, then of the keyword arguments, and ``grad_output`` for
                each leaf of the output. An entry is ``None`` if the leaf is not a tensor, or if no
                gradient reaches it. A returned tuple replaces the gradients of the arguments. An
                engine's passes do not call the function, and raise an `UnsupportedError` once it
                has replaced gradients in another pass; without other passes, it has no effect.
            name: A name for the function, by default its own.
            active: Whether the function is active from now on.
            with_kwargs: Whether to pass keyword arguments too, after ``args``.

        Returns:
            A handle for each module.

        Raises:
            InvalidModulesError: An argument is not a module, or is scripted, or none is chosen.
            HookError: The function is already on a module in this kind, takes other arguments, or
                ``kind`` is unknown. Nothing is registered.
        """
        check_kind(kind)
        chosen = select(modules, where)
        check_function(function, kind, with_kwargs=with_kwargs)
        name = name or name_of(function)
        ids = {id(module) for module in chosen.values()}
        for handle in self.handles(function=function, kind=kind):
            if id(handle.module) in ids:
                raise HookError(
                    f"`{handle.id}` is already registered as a {kind} hook. Register it once, "
                    "and use `activate`; or remove the first: `manager.handles` finds it."
                )
        made = []
        for label, module in chosen.items():
            free = self._free_id(f"{name}[{label or type(module).__name__}]")
            of = free, name, function, module, kind, self._forget
            handle = Handle(*of, with_kwargs=with_kwargs)
            self._handles[handle.id] = handle
            made.append(handle)
        self._switch(made, is_on=active)
        return made

    def handles(
        self,
        *,
        module: nn.Module | None = None,
        function: Any = None,
        kind: HookKind | None = None,
        name: str | None = None,
    ) -> list[Handle]:
        """The handles of some hooks, in the order of registration: all, or those that match.

        Args:
            module: The module of a hook, or a module around it, which need not have a hook.
            function: The function.
            kind: The kind.
            name: The name given at registration, by default the function's own.

        Raises:
            HookError: ``kind`` is unknown, or ``module`` is not a module.
        """
        if kind is not None:
            check_kind(kind)
        inside = None if module is None else ids_inside(module)
        return [
            handle
            for handle in self
            if (inside is None or id(handle.module) in inside)
            and (function is None or handle.function == function)
            and (kind is None or handle.kind == kind)
            and (name is None or handle.name == name)
        ]

    def activate(
        self,
        *,
        module: nn.Module | None = None,
        function: Any = None,
        kind: HookKind | None = None,
        name: str | None = None,
    ) -> None:
        """Activates hooks: all, or those that match filters.

        The filters are as for :meth:`handles`. A module includes all modules inside it.

        Raises:
            HookError: The filters match no hook.
        """
        handles = self._fitting(module=module, function=function, kind=kind, name=name)
        self._switch(handles, is_on=True)

    def deactivate(
        self,
        *,
        module: nn.Module | None = None,
        function: Any = None,
        kind: HookKind | None = None,
        name: str | None = None,
    ) -> None:
        """Lets modules run without these hooks. Filters as for :meth:`activate`."""
        handles = self._fitting(module=module, function=function, kind=kind, name=name)
        self._switch(handles, is_on=False)

    def active(
        self,
        *,
        module: nn.Module | None = None,
        function: Any = None,
        kind: HookKind | None = None,
        name: str | None = None,
    ) -> AbstractContextManager[None]:
        """Activates hooks inside a block, and restores their state at its end."""
        handles = self._fitting(module=module, function=function, kind=kind, name=name)
        return self._switched(handles, is_on=True)

    def inactive(
        self,
        *,
        module: nn.Module | None = None,
        function: Any = None,
        kind: HookKind | None = None,
        name: str | None = None,
    ) -> AbstractContextManager[None]:
        """Deactivates hooks inside a block, and restores their state at its end."""
        handles = self._fitting(module=module, function=function, kind=kind, name=name)
        return self._switched(handles, is_on=False)

    def remove(
        self,
        *,
        module: nn.Module | None = None,
        function: Any = None,
        kind: HookKind | None = None,
        name: str | None = None,
    ) -> None:
        """Removes hooks from their modules for good. Filters as for :meth:`activate`."""
        handles = self._fitting(module=module, function=function, kind=kind, name=name)
        for handle in handles:
            handle.remove()

    def _fitting(self, **filters: Any) -> list[Handle]:
        """The handles that match filters. Raises if there are filters and no handle matches."""
        handles = self.handles(**filters)
        if not handles and (wanted := described(filters)):
            there = [f"`{handle.id}` ({handle.kind})" for handle in self]
            raise HookError(
                f"No hook matches {wanted}. "
                + (f"There are {listed(there)}. " if there else "None is registered. ")
                + "Pass the module, the function, the kind or the `name` of a hook, as "
                "`print(manager)` shows them, or a module around its module."
            )
        return handles

    @contextmanager
    def _switched(self, handles: Sequence[Handle], *, is_on: bool) -> Iterator[None]:
        """Switches hooks, and restores their state. Hooks registered meanwhile are unchanged."""
        before = [(handle, handle.is_active) for handle in handles]
        self._switch(handles, is_on=is_on)
        try:
            yield
        finally:
            for handle, was_on in before:
                self._switch([handle], is_on=was_on)

    def _switch(self, handles: Iterable[Handle], *, is_on: bool) -> None:
        """Switches hooks, except removed ones."""
        self._are_active = None
        for handle in handles:
            if self._handles.get(handle.id) is handle:
                handle._set(is_on=is_on)

    def _forget(self, handle: Handle) -> None:
        """Removes a handle from the registry."""
        self._are_active = None
        if self._handles.get(handle.id) is handle:
            del self._handles[handle.id]

    def _free_id(self, wanted: str) -> str:
        """An unused id."""
        number, free = 1, wanted
        while free in self._handles:
            number += 1
            free = f"{wanted}#{number}"
        return free

    def __getitem__(self, id: str) -> Handle:
        for handle in self:
            if handle.id == id:
                return handle
        known = [f"`{known}`" for known in self._handles]
        some = f"There are {listed(known)}" if known else "None is registered"
        raise HookError(f"There is no hook `{id}`. {some}. Pass the `id` of a handle.")

    def __iter__(self) -> Iterator[Handle]:
        for handle in [*self._handles.values()]:
            if handle.module is None:
                self._forget(handle)
            else:
                yield handle

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        handles = list(self)
        active = sum(handle.is_active for handle in handles)
        return f"HookManager({len(handles)} hooks, {active} active)"

    def __str__(self) -> str:
        lines = [("hook", "module", "kind", "")]
        for handle in self:
            state = "active" if handle.is_active else "inactive"
            lines.append((handle.id, type(handle.module).__name__, handle.kind, state))
        return "\n".join(in_columns(lines)) if len(lines) > 1 else "No hooks are registered."

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copy has no hooks, like copies of modules

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
