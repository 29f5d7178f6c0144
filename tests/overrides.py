"""Operators on a CPU whose results plugins change in the last bits."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# From the name of an operator, its arguments and a result: how many units in the last place each
# element of the result moves.
Steps = Callable[[str, tuple[Any, ...], Tensor], Tensor]

_LIBRARY = torch.library.Library("aten", "IMPL")


def change_last_bits(names: Iterable[str], steps: Steps) -> None:
    """Changes the results of some operators, for the rest of the process.

    Args:
        names: Such as ``"mm"`` or ``"pow.Tensor_Tensor"``.
        steps: What to change.
    """
    with warnings.catch_warnings(action="ignore"):  # of kernels that are overridden
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            _LIBRARY.impl(operator, _changed(name, operator, steps), "CPU", with_keyset=True)


def _changed(name: str, operator: Any, steps: Steps) -> Callable[..., Any]:
    """Runs the kernel of an operator, and changes its results."""
    kernel = torch.library.get_kernel(operator, "CPU")

    def change(value: Any, args: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            with torch.no_grad():
                moved = steps(name, args, value).to(value.dtype)
                value.mul_(1 + torch.finfo(value.dtype).eps * moved)
        return value

    def compute(keys: Any, *args: Any, **kwargs: Any) -> Any:
        results = kernel.call_boxed(keys, *args, **kwargs)
        if isinstance(results, tuple):
            return tuple(change(value, args) for value in results)
        return change(results, args)

    return compute
