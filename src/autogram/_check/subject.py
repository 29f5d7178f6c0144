"""The subject of a check: the user's function, with its modules and losses."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autogram._capture.backward.driver import BatchDim
from autogram._engine import Engine
from autogram._losses import Losses, parts_of
from autogram.errors import AutogramError, InvalidLossesError

_FORMS = (
    "Return `(model, losses)`, or `(model, function)` with a function that recomputes the losses: "
    "a tensor, or a list or a dict of tensors."
)
_PACKAGE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent


class UsageError(Exception):
    """The command is wrong, or the user's code has raised an error, which is then the cause."""


@contextmanager
def users_code(is_theirs: Callable[[Exception], bool] = lambda _: True) -> Iterator[None]:
    """Runs a user's code in a block, and turns its errors into :class:`UsageError`.

    This includes `sys.exit`, whose exit code would be mistaken for the command's. Only errors for
    which ``is_theirs`` is true are the user's.
    """
    try:
        yield
    except (AutogramError, UsageError):
        raise
    except SystemExit as error:
        raise UsageError(
            f"Your code called `sys.exit({error.code!r})`, as shown above. Leave out the call: it "
            "would end the command with an exit code that does not describe your model."
        ) from error
    except Exception as error:
        if not is_theirs(error):
            raise
        raise UsageError(
            f"Your code raised {type(error).__name__}, as shown above. Correct it first."
        ) from error


def is_of_passes(error: Exception) -> bool:
    """Whether an error in a pass of an engine comes from the user's code.

    That is a custom autograd Function, a hook or a rule of the user, or a call of one of them
    to PyTorch.
    """
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    callers = [file for file in files if _TORCH not in file.parents]
    return bool(callers) and _PACKAGE not in callers[-1].parents


def _asked(function: Callable[[], Any]) -> Any:
    """Calls a user's function."""
    with users_code():
        return function()


def find_function(place: str) -> Callable[[], Any]:
    """The function at ``module:function`` or ``file.py:function``."""
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise UsageError(f"`{place}` names no function. Pass `module:function`.")
    if source.endswith(".py"):
        module = _asked(lambda: _load(Path(source)))
    else:
        folder = str(Path.cwd())
        if folder not in sys.path:  # `python -m` looks there, and an installed script does not
            sys.path.insert(0, folder)
        try:
            module = _asked(lambda: importlib.import_module(source))
        except UsageError as error:
            missing = getattr(error.__cause__, "name", None)
            if missing is None or not f"{source}.".startswith(f"{missing}."):
                raise  # from the module itself, or from one of its imports
            raise UsageError(
                f"There is no module `{missing}`. Call the command in the folder that contains "
                "it, or pass `file.py:function`."
            ) from None
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, x in vars(module).items() if callable(x) and not key.startswith("_")]
        raise UsageError(
            f"`{source}` has no function `{name}`. Pass one of {', '.join(known) or 'its own'}."
        )
    found: Callable[[], Any] = function
    return found


def _load(path: Path) -> Any:
    """Loads a file as a module that may import its neighbours."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"There is no file `{path}`. Pass `module:function`, or another path.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Subject:
    """The modules and losses of a user's function, with an engine on the modules.

    Attributes:
        is_repeatable: Whether losses can be recomputed.
    """

    def __init__(self, function: Callable[[], Any], batch_dim: BatchDim) -> None:
        self.modules, losses = _both(_asked(function))
        self.is_repeatable = callable(losses)
        if callable(losses):
            self._compute: Callable[[], Any] = losses
            self.engine = Engine(*self.modules, batch_dim=batch_dim)
            return
        # No call of these losses was recorded without an engine: the function runs again.
        del losses
        with _engine_at_first_call(type(self.modules[0]), batch_dim) as made:
            self.modules, found = _both(_asked(function))
        if len(self.modules) > 1 or not made or made[0][0] is not self.modules[0]:
            raise UsageError(
                "Return `(model, function)` instead, with a function that computes the losses: "
                "these losses were not computed by calling the model that the function returned."
            )
        self.engine, self._compute = made[0][1], lambda: found

    def losses(self) -> Losses:
        """The losses, with a graph."""
        losses: Losses = _asked(self._compute)
        try:
            parts = parts_of(losses)
        except InvalidLossesError as error:
            raise UsageError(f"{error} {_FORMS}") from None
        if not any(part.numel() for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise UsageError(
                f"There are no objectives: the losses have the shape {shapes}. Return the losses "
                "of a batch with samples."
            )
        return losses


def _both(returned: Any) -> tuple[list[nn.Module], Any]:
    """Modules, and losses or a function."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UsageError(
            f"The function returned an object of type `{type(returned).__name__}`. {_FORMS}"
        )
    model, losses = returned
    modules = [model] if isinstance(model, nn.Module) else model
    are_modules = isinstance(modules, list | tuple) and all(
        isinstance(module, nn.Module) for module in modules
    )
    if not are_modules or not modules:
        raise UsageError(f"The model is a `{type(model).__name__}`, not a module. {_FORMS}")
    return list(modules), losses


@contextmanager
def _engine_at_first_call(
    kind: type[nn.Module], batch_dim: BatchDim
) -> Iterator[list[tuple[nn.Module, Engine]]]:
    """Makes an engine for the first called module of some class, before it runs."""
    made: list[tuple[nn.Module, Engine]] = []
    call = nn.Module.__call__

    def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not made and type(module) is kind:
            made.append((module, Engine(module, batch_dim=batch_dim)))
        return call(module, *args, **kwargs)

    with patch.object(nn.Module, "__call__", recorded):
        yield made
