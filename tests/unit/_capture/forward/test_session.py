"""What an engine keeps of its modules' parameters, and what interrupts leave behind."""

import gc
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from torch import nn, overrides
from torch.utils._device import DeviceContext

from autogram import Engine
from autogram._capture.forward import session
from autogram.hooks import around
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, assert_works, batch, mlp, per_sample


def test_modules_that_go_where_an_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files are gone by then: what compilers keep lives as long."""
    model = nn.Linear(2, 2)
    engine = Engine(model)
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: raised.append(found.exc_value))
    monkeypatch.setattr(session, "weakref", None)
    del model
    gc.collect()
    monkeypatch.undo()
    assert not raised
    del engine


def test_interrupt_while_a_module_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose pass stays open: the next one closes it, and has a recording of its own."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = mlp()
    engine = Engine(model, batch_dim=0)
    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch(4, 3))
    assert session.open_recorders()
    assert_exact(engine, per_sample(model(batch(4, 3))), model)
    assert not session.open_recorders()
    assert_works(engine, model, batch(4, 3))


_SESSION, _MODE = session.Session, overrides.TorchFunctionMode
# In these functions, recorders go onto PyTorch's stack of modes, and are taken off.
FUNCTIONS = (
    *(around._enter, around._run, _SESSION.begin, _SESSION.end, _SESSION.close, session._take_off),
    *(_MODE.__enter__, overrides._push_mode, overrides._pop_mode),
)
CODES = {function.__code__ for function in FUNCTIONS}


@contextmanager
def interrupted(number: int) -> Iterator[list[str]]:
    """A block that the keyboard interrupts at one of the places where modes come and go."""
    places: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code not in CODES:
            return None
        places.append(f"{frame.f_code.co_name}:{frame.f_lineno}:{event}")
        if len(places) == number + 1:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield places
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("engines", [1, 2])
def test_an_interrupt_at_any_line(engines: int) -> None:
    """The next pass, below a mode of the user's, is recorded once, and no mode of ours is left."""
    model, x = mlp(), batch(2, 3)
    jacobian = reference_jacobian(per_sample(model(x)), model.parameters())
    both = [Engine(model, verify="never") for _ in range(engines)]
    for number in itertools.count():
        try:
            with interrupted(number) as places:
                model(x)
        except KeyboardInterrupt:
            with torch.device("cpu"):
                for engine in both:
                    found = engine.compute_gramian(per_sample(model(x)))
                    assert_close_to_reference(found, jacobian @ jacobian.T)
                (mode,) = overrides._get_current_function_mode_stack()
            assert isinstance(mode, DeviceContext), places[-1]
            assert not overrides._get_current_function_mode_stack(), places[-1]
        else:
            break
    assert number > 100 * engines
