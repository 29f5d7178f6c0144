"""Shards: parameters that `fully_shard` has split up, and that are whole while a module runs.

Between passes, the parameters of a module are shards. Its forward pass begins by gathering whole
tensors, and puts these in the place of the shards: uses read the whole tensors. The whole tensors
stay the same objects from pass to pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from autogram._capture.distribution import is_dtensor, is_unit
from autogram._capture.forward.session import Session
from autogram.errors import UnsupportedError

_Owner = tuple[weakref.ref[nn.Module], str, str]


class Shards:
    """The sharded parameters of an engine's modules, by their qualified names.

    A hook on each module that was given to `fully_shard`, behind PyTorch's own, tells the recording
    which whole tensors are parameters now. The roots are by the prefix of the names inside.
    """

    def __init__(self, roots: Mapping[str, nn.Module], session: Session) -> None:
        self._known: set[int] = set()
        self._handles = []
        self._parameters: dict[str, weakref.ref[Tensor]] = {}
        for prefix, root in roots.items():
            for module, owners in _units(root, prefix).items():
                self._known.add(id(module))
                note = partial(_note, session, owners)
                self._handles.append(module.register_forward_pre_hook(note))
            for name, parameter in root.named_parameters(prefix=prefix, remove_duplicate=False):
                if is_dtensor(parameter):
                    self._parameters[name] = weakref.ref(parameter)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._parameters)

    def __getitem__(self, name: str) -> Any:
        """The sharded parameter of some name, or ``None`` if it is not sharded."""
        reference = self._parameters.get(name)
        return None if reference is None else reference()

    def check(self, roots: Mapping[str, nn.Module]) -> None:
        """Refuses modules that were sharded after this object was made."""
        for root in roots.values():
            for module in root.modules():
                if is_unit(module) and id(module) not in self._known:
                    raise UnsupportedError(
                        f"A {type(module).__name__} was given to `fully_shard` after the engine "
                        "was made. Call `fully_shard` first, and then make the engine."
                    )

    def remove(self) -> None:
        """Takes the hooks off."""
        while self._handles:
            self._handles.pop().remove()


def _note(session: Session, owners: list[_Owner], *_: object) -> None:
    """Tells a recording of the whole tensors of one module: a forward pre-hook."""
    found: dict[str, Tensor] = {}
    for reference, attribute, name in owners:
        owner = reference()
        parameter = None if owner is None else owner._parameters.get(attribute)
        if parameter is not None and parameter.requires_grad:
            found.setdefault(name, parameter)
    session.note_parameters(found)


def _units(root: nn.Module, prefix: str) -> dict[nn.Module, list[_Owner]]:
    """The modules that were given to `fully_shard`, and the parameters that each makes whole."""
    names: dict[int, str] = {}  # a parameter that several modules have gets its first name
    found: dict[nn.Module, list[_Owner]] = {}

    def visit(module: nn.Module, path: str, unit: nn.Module | None) -> None:
        if is_unit(module):
            unit = module
            found.setdefault(module, [])
        for attribute, parameter in module._parameters.items():
            if parameter is not None and unit is not None:
                name = names.setdefault(id(parameter), f"{path}{attribute}")
                found[unit].append((weakref.ref(module), attribute, name))
        for child_name, child in module.named_children():
            visit(child, f"{path}{child_name}.", unit)

    visit(root, f"{prefix}." if prefix else "", None)
    return found
