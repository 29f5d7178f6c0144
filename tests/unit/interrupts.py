"""Interrupts at chosen places of a call, and what they must leave as it was.

CPython looks for signals where a function begins, and behind each call. A trace function that
raises there does what a signal would do. At other places, such as between the body of a `with`
block and its end, no interrupt can strike.
"""

import contextlib
import dis
import sys
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn, overrides
from torch.autograd.variable import Variable
from torch.utils import _python_dispatch as dispatch

import autogram
from autogram.hooks.backward import SILENT_PASSES

_TORCH, _OURS = Path(torch.__file__).parent, Path(autogram.__file__).parent
_BLOCKS = "overrides autograd/grad_mode autograd/graph utils/_python_dispatch utils/hooks"
# Where modes, hooks, gradients and PyTorch's engine are changed and put back.
CHANGING = frozenset(
    [
        contextlib.__file__,
        *(str(_TORCH / f"{name}.py") for name in _BLOCKS.split()),
        *(str(_OURS / "_capture/autograd" / f"{name}.py") for name in ("exact", "grad", "nested")),
        *(str(_OURS / f"{name}.py") for name in ("_undo", "_blocks/kernels/workspace")),
    ]
)
ALL = CHANGING | frozenset(map(str, _OURS.rglob("*.py")))
_LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW"}  # for signals, when the call is over


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of instructions behind those that look for signals, with the same handlers."""
    ranges = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # not public

    def handler(offset: int) -> int | None:
        return next((x.target for x in ranges if x.start <= offset < x.end), None)

    found = set()
    for before, after in pairwise(dis.get_instructions(code)):
        if before.opname in _LOOKS and handler(before.offset) == handler(after.offset):
            found.add(after.offset)
    return frozenset(found)


class Interrupt:
    """Raises in a block, at the place with some number, or only counts the places."""

    def __init__(self, number: int = -1, files: Collection[str] = ALL) -> None:
        self.number, self.files, self.places, self.where = number, files, 0, ""

    def _reach(self, frame: FrameType, event: str) -> None:
        self.places += 1
        if self.places == self.number + 1:
            name = Path(frame.f_code.co_filename).name
            self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_qualname} ({event})"
            raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, _: object) -> object:
        if event == "call":
            if frame.f_code.co_filename not in self.files:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._reach(frame, event)
        elif event == "return" or (event == "opcode" and frame.f_lasti in _places(frame.f_code)):
            self._reach(frame, event)
        return self._trace

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a call may change for a while, and must leave as it was."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    hooks = {
        name: (dict(p._backward_hooks or {}), dict(p._post_accumulate_grad_hooks or {}))
        for name, p in model.named_parameters()
    }
    around = {
        name: (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks))
        for name, m in model.named_modules()
    }
    return {
        "PyTorch's engine": Variable._execution_engine,
        "modes of functions": overrides._get_current_function_mode_stack(),
        "modes of operators": dispatch._get_current_dispatch_mode_stack(),
        "gradients are on": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            nesting,
        ),
        "hooks of parameters": hooks,
        "hooks of modules": around,
        "frozen": [p.requires_grad for p in model.parameters()],
        "random state": torch.get_rng_state().tolist(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "running passes": dict(SILENT_PASSES),
        "transforms": torch._C._functorch.maybe_current_level(),
    }
