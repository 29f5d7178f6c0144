"""Sessions: hooks of an engine's modules open a recording for each forward pass, and close it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autogram._capture.distribution import note_wrapper
from autogram._capture.forward.checkpoints import Checkpoints, run_now
from autogram._capture.forward.recorder import Recorder
from autogram._capture.forward.tapping import Tapping
from autogram._capture.recording import Channel
from autogram.hooks import HookManager


class Parameters:
    """Gives the parameters of an engine's modules with their names.

    It keeps those of the modules as they were last seen, no longer than the modules live. Those
    that were replaced, or whose module is gone, have weak references alone. Others have none:
    `torch.utils.swap_tensors`, by which modules may change their dtype, refuses such tensors.
    """

    def __init__(self, modules: Iterable[nn.Module], hooks: HookManager) -> None:
        seen: dict[Tensor, str] = {}
        replaced: list[tuple[weakref.ref[Tensor], str]] = []

        refer = weakref.ref  # where an interpreter ends, names of this file may be gone

        def release(_: object) -> None:
            replaced.extend([(refer(p), name) for p, name in seen.items()])
            seen.clear()

        self._modules = tuple(weakref.ref(module, release) for module in modules)
        self._hooks = hooks
        self._seen, self._replaced = seen, replaced
        self()

    def __call__(self) -> dict[Tensor, str]:
        """The parameters as they are now, and those that `functional_call` has put aside.

        Tensors that such a call puts in their place and that are no leaves are left out: these are
        derived from parameters, or from nothing of the engine's. Where there are parameters alone,
        any others were replaced, or such a call has put parameters of another model in their place.
        Of a module that is gone, such as a slice of a model, the parts may live and be called.
        """
        names = self._names()
        if names == self._seen and not self._replaced:  # compares no tensors that are the same
            return names
        alive = [(p, name) for reference, name in self._replaced if (p := reference()) is not None]
        aside = {p: name for p, name in (*self._seen.items(), *alive) if p not in names}
        are_gone = any(module() is None for module in self._modules)
        if are_gone or not all(isinstance(p, nn.Parameter) for p in names):
            return {p: name for p, name in names.items() if p.is_leaf} | aside
        self._replaced[:] = [(weakref.ref(p), name) for p, name in aside.items()]
        self._seen.clear()
        self._seen.update(names)
        return names

    def left_out(self) -> dict[Tensor, str]:
        """The parameters of which every module has an inactive hook.

        A module without a hook, which came later, is as the module around it.
        """
        if self._hooks.is_active:
            return {}
        handles = self._hooks.handles(kind="around")
        active = {id(handle.module): handle.is_active for handle in handles}
        pending = [(root, True) for root in self.roots.values()]
        kept: set[Tensor] = set()
        while pending:
            module, is_around_active = pending.pop()
            is_active = active.get(id(module), is_around_active)
            if is_active:
                kept.update(module.parameters(recurse=False))
            pending.extend([(child, is_active) for child in module.children()])
        return {p: name for p, name in self._names().items() if p not in kept}

    @property
    def roots(self) -> dict[str, nn.Module]:
        """The modules that are alive, by the prefix of the names inside of them."""
        several = len(self._modules) > 1
        pairs = ((f"{i}" if several else "", root()) for i, root in enumerate(self._modules))
        return {prefix: module for prefix, module in pairs if module is not None}

    def _names(self) -> dict[Tensor, str]:
        """The parameters of the modules as they are now, with their qualified names."""
        names: dict[Tensor, str] = {}
        for prefix, module in self.roots.items():
            for name, parameter in module.named_parameters(prefix=prefix):
                names.setdefault(parameter, name)
        return names


_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()  # those of all engines


class Session(threading.local):
    """Opens and closes recordings of an engine, one at a time in each thread.

    This object is put around each module of the engine (`autogram.hooks`). A recording is opened
    when the first module is entered, and closed when this module is left.
    """

    def __init__(
        self,
        channel: Channel,
        parameters: Parameters,
        checkpoints: Checkpoints,
    ) -> None:
        self._channel = channel
        self._checkpoints = checkpoints
        self.parameters = parameters
        self._root_ids = {id(root) for root in parameters.roots.values()}
        self._recorder: Recorder | None = None
        _SESSIONS.add(self)
        self._outermost: nn.Module | None = None
        self._frame: FrameType | None = None
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets modules run without recording, in a block and in this thread."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @property
    def is_off(self) -> bool:
        """Whether modules run without recording: second runs of checkpoints are as their first."""
        return self._is_paused and not ((run := run_now()) and run.is_second)

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Enters a module, and returns other arguments for it or ``None``."""
        recorder = self._recorder
        may_be_new = module is self._outermost or id(module) in self._root_ids
        if recorder is not None and may_be_new and self._was_abandoned():
            self.close()
            recorder = None
        if recorder is not None:
            recorder.enter((args, kwargs), module)
            note_wrapper(recorder.recording)
        elif _can_record() and self._checkpoints.may_record():
            recorder = self._new_recorder()
            recorder.begin((args, kwargs), module)
            # Noted first: a keyboard interrupt may strike in between.
            self._recorder, self._outermost = recorder, module
            self._frame = sys._getframe(1)  # which lasts as long as the module's call
            recorder.__enter__()  # type: ignore[no-untyped-call]  # as typed in torch
        else:
            return None
        if not module._backward_hooks:
            return None
        # A pass from a tap inside of the module to its inputs would be that of a full backward
        # hook, in the place of the pass that goes on to what is behind.
        tapped = recorder.statuses.tapped
        return tuple([tapped(x)[0] if isinstance(x, Tensor) else x for x in args])

    def note_parameters(self, whole: Mapping[str, Tensor]) -> None:
        """Notes whole tensors that take the place of shards, by name, for the rest of the pass."""
        if self._recorder is not None:
            self._recorder.note_parameters(whole)

    def end(self, module: nn.Module, output: Any) -> None:
        """Leaves a module, also if its forward raised."""
        del module
        recorder = self._recorder
        if recorder is not None and not recorder.leave():
            self.close()
            recorder.end(output)

    def close(self) -> None:
        """Takes the recorder off PyTorch's stack of modes, if one is open in this thread."""
        if self._recorder is not None:
            _take_off(self._recorder)
        self._recorder = self._outermost = self._frame = None  # last: see `begin`

    def remove(self) -> None:
        """Stops recording, as removed hooks would not do it; compiled calls are left alone."""
        _SESSIONS.discard(self)
        self.close()

    def recorder_of(self, parameters: Iterable[Tensor]) -> Recorder | None:
        """The recorder for a compiled call that reads some parameters of the engine, or ``None``.

        It is the recorder of the recording that is open, or a recorder for this call alone.
        """
        if self.is_off or not self._checkpoints.may_record() or self._recorder is not None:
            return self.open_recorder
        names = self._channel.parameters_now()
        if names.keys().isdisjoint(parameters):
            return None
        return self._new_recorder()

    def _new_recorder(self) -> Recorder:
        recording = self._channel.begin()
        note_wrapper(recording)
        return Recorder(Tapping(recording), self._checkpoints)

    @property
    def open_recorder(self) -> Recorder | None:
        """The recorder of the recording that is open in this thread, or ``None``."""
        return None if self.is_off else self._recorder

    def _was_abandoned(self) -> bool:
        """Whether the call that opened the recording has ended without closing it.

        A keyboard interrupt may strike in `end`: about one in a hundred does where modules are
        small. The next pass enters one of the engine's modules, or the module that was left. A
        recorder that stayed would tap each use once more, and count it twice.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None


def _take_off(recorder: Recorder) -> None:
    """Takes a recorder off PyTorch's stack of modes, from below others where it was abandoned."""
    above: list[Any] = []
    while recorder in overrides._get_current_function_mode_stack():
        if (mode := overrides._pop_mode()) is not recorder:
            above.append(mode)
    for mode in reversed(above):
        overrides._push_mode(mode)


def _can_record() -> bool:
    """Whether a recording may begin.

    Not in a `torch.func` transform, nor in `torch.jit.trace`, `torch.export` and `make_fx`.
    """
    return (
        torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and get_proxy_mode() is None
    )


def recorders_of(parameters: Collection[Tensor]) -> list[Recorder]:
    """The recorders of all engines that see a compiled call which reads some parameters."""
    if not _can_record():
        return []
    found = [session.recorder_of(parameters) for session in list(_SESSIONS)]
    return [recorder for recorder in found if recorder is not None]


def open_recorders() -> list[Recorder]:
    """The recorders of all recordings that are open in this thread."""
    found = [session.open_recorder for session in list(_SESSIONS)]
    return [recorder for recorder in found if recorder is not None]


def hook_all(session: Session, hooks: HookManager) -> None:
    """Puts a session around modules, and around all modules inside of them that have parameters.

    Inner modules are included, because activation checkpointing runs some of them again in the
    backward pass, where the same taps must appear. Scripted modules are left out: Python does not
    run their forward.
    """
    found: dict[str, nn.Module] = {}
    for prefix, root in session.parameters.roots.items():
        for name, module in root.named_modules(prefix=prefix):
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            if module is root or (not is_scripted and any(True for _ in module.parameters())):
                found[name] = module
    hooks.register(session, found, kind="around", name="autogram")
