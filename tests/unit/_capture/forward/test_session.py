"""What an engine keeps of its modules' parameters."""

import gc
import sys

import pytest
from torch import nn

from autogram import Engine
from autogram._capture.forward import session


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
