"""The parameters of an engine's modules, with their names."""

from __future__ import annotations

import weakref

from torch import Tensor, nn


class Parameters:
    """Gives the parameters of some modules, which it does not keep alive.

    Args:
        modules: The engine's modules.
    """

    def __init__(self, modules: tuple[weakref.ref[nn.Module], ...]) -> None:
        self._modules = modules
        self._originals = [(weakref.ref(p), name) for p, name in self._names().items()]

    def __call__(self) -> dict[Tensor, str]:
        """The parameters as they are now, and those that `functional_call` has put aside.

        What such a call puts in their place is derived from them, if it is derived from anything.
        """
        names = self._names()
        for derived in [p for p in names if not p.is_leaf]:
            del names[derived]
        known = {id(p) for p in names}
        for reference, name in self._originals:
            parameter = reference()
            if parameter is not None and id(parameter) not in known:
                names[parameter] = name
        return names

    def _names(self) -> dict[Tensor, str]:
        """The parameters of the modules as they are now, with their qualified names."""
        names: dict[Tensor, str] = {}
        for i, module in enumerate(root() for root in self._modules):
            prefix = f"{i}" if len(self._modules) > 1 else ""
            if module is not None:
                for name, parameter in module.named_parameters(prefix=prefix):
                    names.setdefault(parameter, name)
        return names
