"""Functions that Dynamo does not compile.

Dynamo compiles each Python function that is called where it gives up what it was to compile. Inside
of a recording, the recorder is such a function: each torch call would be compiled alone, until the
limit of recompilations is reached. And where it compiles a whole step, it would compile what an
engine does in its passes.
"""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType
from typing import Any

from autogram._capture.forward.recorder import Recorder
from autogram._capture.forward.session import Session

_OWN: tuple[Any, ...] = (Recorder.__torch_function__, Session.begin, Session.end)


def leave_alone() -> None:
    """Lets Dynamo skip the recorder's functions, and what they call. It still inlines them."""
    for function in _OWN:
        _skip(function)


def stay_outside(*owners: type) -> None:
    """Lets Dynamo break the graph where it compiles code that calls methods of some classes.

    The methods run as they are, and so does all that they call.
    """
    for owner in owners:
        for member in vars(owner).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType) and _is_own(function):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo's own mark
                _skip(function)


def _is_own(function: FunctionType) -> bool:
    """Whether a function's code is of this package, and not of a decorator that others share."""
    name: str = function.__globals__["__name__"]
    return name.split(".")[0] == __name__.split(".")[0]


def _skip(function: Any) -> None:
    """Lets Dynamo skip a function that is called, and all that it calls."""
    with suppress(ImportError):  # of another version of PyTorch: they are compiled, and exact
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, skip)
