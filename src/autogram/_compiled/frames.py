"""Functions that Dynamo does not compile.

When Dynamo gives up compiling a function, it compiles each Python function that this one calls.
Within a recording, the recorder is such a function: each torch call would be compiled alone, until
the limit of recompilations is reached. And when Dynamo compiles a whole step, it would compile the
engine's own work in its passes.
"""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType
from typing import Any

from autogram._capture.forward.recorder import Recorder
from autogram._capture.forward.session import Session

_OWN: tuple[Any, ...] = (Recorder.__torch_function__, Session.begin, Session.end)


def leave_alone() -> None:
    """Makes Dynamo skip the recorder's functions, and what they call. It still inlines them."""
    for function in _OWN:
        _skip(function)


def stay_outside(*owners: type) -> None:
    """Makes Dynamo break the graph where compiled code calls methods of some classes.

    The methods, and all that they call, run uncompiled.
    """
    for owner in owners:
        for member in vars(owner).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType) and _is_own(function):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo's own mark
                _skip(function)


def _is_own(function: FunctionType) -> bool:
    """Whether a function's code is from this package, and not from a shared decorator."""
    name: str = function.__globals__["__name__"]
    return name.split(".")[0] == __name__.split(".")[0]


def _skip(function: Any) -> None:
    """Makes Dynamo skip a function when it is called, and all that it calls."""
    with suppress(ImportError):  # another version of PyTorch: they are compiled, which is exact
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, skip)
