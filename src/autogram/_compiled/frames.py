"""Functions of recordings, which Dynamo does not compile on their own.

Dynamo compiles each Python function that is called where it gives up what it was to compile. Inside
of a recording, the recorder is such a function: each torch call would be compiled alone, until the
limit of recompilations is reached.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from autogram._capture.forward.recorder import Recorder
from autogram._capture.forward.session import Session

_OWN: tuple[Any, ...] = (Recorder.__torch_function__, Session.begin, Session.end)


def leave_alone() -> None:
    """Lets Dynamo skip the recorder's functions, and what they call. It still inlines them."""
    with suppress(ImportError):  # of another version of PyTorch: they are compiled, and exact
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for function in _OWN:
            set_code_exec_strategy(function.__code__, skip)
