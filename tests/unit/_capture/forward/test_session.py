"""What an engine keeps of its modules' parameters."""

import gc
import sys
from typing import Any

import pytest
from torch import Tensor, nn

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


class Alone(nn.Sequential):
    """Names no modules inside of it."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:  # as typed in torch
        yield from [pair for pair in super().named_modules(*args, **kwargs) if pair[1] is self]


def nested(kind: type[nn.Sequential]) -> nn.Module:
    """A model that has a layer at two places, a tied weight, and places that are empty."""
    layer, tied = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    tied.weight = layer.weight
    inner = kind(layer, nn.BatchNorm1d(2), kind(tied, nn.Linear(2, 1)))
    inner.register_module("none", None)
    return nn.Sequential(inner, layer, nn.ModuleDict({"a": nn.PReLU(), "b": inner}))


@pytest.mark.parametrize("prefix", ["", "0"])
@pytest.mark.parametrize("kind", [nn.Sequential, Alone])
def test_names_are_those_of_the_module(kind: type[nn.Sequential], prefix: str) -> None:
    model = nested(kind)
    names: dict[Tensor, str] = {}
    for name, parameter in session._named_parameters(model, prefix):
        names.setdefault(parameter, name)
    assert names == {p: name for name, p in model.named_parameters(prefix=prefix)}
    assert list(names.values()) == [name for name, _ in model.named_parameters(prefix=prefix)]
