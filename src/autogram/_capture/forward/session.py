"""Sessions: hooks of an engine's modules open a recording for each forward pass, and close it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autogram._capture.distribution import will_exchange
from autogram._capture.forward.recorder import Recorder
from autogram._capture.recording import Channel
from autogram.hooks import HookManager


class Parameters:
    """Gives the parameters of an engine's modules with their names, and keeps none alive."""

    def __init__(self, modules: tuple[weakref.ref[nn.Module], ...]) -> None:
        self._modules = modules
        self._originals = [(weakref.ref(p), name) for p, name in self._names().items()]

    def __call__(self) -> dict[Tensor, str]:
        """The parameters as they are now, and those that `functional_call` has put aside.

        What such a call puts in their place is derived from them, if it is derived from anything.
        """
        names = {p: name for p, name in self._names().items() if p.is_leaf}
        for reference, name in self._originals:
            parameter = reference()
            if parameter is not None:
                names.setdefault(parameter, name)
        return names

    def _names(self) -> dict[Tensor, str]:
        """The parameters of the modules as they are now, with their qualified names."""
        names: dict[Tensor, str] = {}
        for i, root in enumerate(self._modules):
            if (module := root()) is not None:
                prefix = f"{i}" if len(self._modules) > 1 else ""
                for name, parameter in module.named_parameters(prefix=prefix):
                    names.setdefault(parameter, name)
        return names


class Session(threading.local):
    """The recording that is open, one for each thread.

    The first module that is entered opens it, and closes it when it is left. With gradients
    disabled nothing is opened, and nothing inside of a `torch.func` transform or `torch.jit.trace`.
    """

    def __init__(self, channel: Channel, modules: tuple[weakref.ref[nn.Module], ...]) -> None:
        self._channel = channel
        # Weak, because the hooks of the modules hold this, and `threading.local` its arguments.
        self._modules = modules
        self._roots = {id(root()) for root in modules}
        self._recorder: Recorder | None = None
        self._depth = 0
        self._outermost: nn.Module | None = None
        self._frame: FrameType | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enters a module."""
        if self._recorder is not None and self._was_abandoned(module):
            self.close()
        if self._recorder is not None:
            self._depth += 1
            self._recorder.enter((args, kwargs), module)
        elif (
            torch.is_grad_enabled()
            and not torch._C._are_functorch_transforms_active()
            and torch._C._get_tracing_state() is None
        ):
            recorder = Recorder(self._channel, self._channel.parameters_now())
            recorder.begin((args, kwargs), module)
            recorder.__enter__()  # type: ignore[no-untyped-call]  # as typed in torch
            self._recorder, self._depth, self._outermost = recorder, 1, module
            self._frame = sys._getframe(1)  # which lasts as long as the module's call
        if self._recorder is not None and will_exchange():
            self._recorder.recording.is_exchanged = True

    def end(self, module: nn.Module, output: Any) -> Any:
        """Leaves a module, also if its forward raised."""
        del module
        if self._recorder is None:
            return None
        self._depth -= 1
        if self._depth:
            self._recorder.leave()
            return None
        recorder = self._recorder
        self.close()
        ended = recorder.end(output)
        return None if ended is output else ended

    def close(self) -> None:
        """Takes the recorder off PyTorch's stack of modes, if one is open in this thread."""
        recorder, self._recorder = self._recorder, None
        self._outermost = self._frame = None
        if recorder is not None:
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as typed in torch

    def _was_abandoned(self, module: nn.Module) -> bool:
        """Whether the call that opened the recording has ended without closing it.

        A keyboard interrupt may strike between the hooks of a module and its forward. The next pass
        enters one of the engine's modules, or the module that was left.
        """
        if module is not self._outermost and id(module) not in self._roots:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the engine that are alive."""
        return [module for root in self._modules if (module := root()) is not None]


def hook_all(modules: Iterable[nn.Module], session: Session) -> HookManager:
    """Lets modules, and all inside of them that have parameters, open and close recordings.

    Every module, as activation checkpointing runs some of them again in the backward pass, where
    the same taps must appear. Scripted ones are left out: Python does not run their forward.
    """
    hooks = HookManager()
    for root in modules:
        for module in root.modules():
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            if module is root or (not is_scripted and any(True for _ in module.parameters())):
                hooks.hook(module, session.begin, session.end, only_with_gradients=True)
    return hooks


def take_off(hooks: HookManager, session: Session) -> None:
    """Removes the hooks, and closes the recording that they would have closed in this thread."""
    hooks.remove()
    session.close()
