"""The list of PyTorch's private names is that of those that the package uses."""

import ast
import dataclasses
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import TracingContext

from autogram._compiled import private
from autogram._compiled.private import MARKS, PRIVATE_NAMES

_FOLDER = Path(private.__file__).parent
_FILES = [x for x in _FOLDER.rglob("*.py") if x != Path(private.__file__)]
# Of named tuples: Python documents it.
_PUBLIC = {"_fields", "_replace", "_asdict", "_make"}
# What private objects have, under names that say nothing of it.
_INSIDE = {*vars(TracingContext(None)), *(x.name for x in dataclasses.fields(ViewAndMutationMeta))}
_LISTED = [name for x in (PRIVATE_NAMES, MARKS) for names in x.values() for name in names]
_READERS = {"getattr", "hasattr", "setattr", "get"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _dotted(node: ast.expr) -> list[str]:
    """The names of an attribute of an attribute; what is no name is a question mark."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "?", *reversed(names)]


def _used(source: str) -> Iterator[str]:
    """The private names of PyTorch in a source: dotted from `torch`, or of attributes alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if _is_of_torch(x.name.split(".")))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{x.name}" for x in node.names]
            yield from (name for name in names if _is_of_torch(name.split(".")))
        elif isinstance(node, ast.Attribute):
            parts = _dotted(node)
            if _is_of_torch(parts):
                yield ".".join(parts)
            elif parts[0] != "torch" and (
                node.attr in _INSIDE or (_is_private(node.attr) and parts[:-1] != ["self"])
            ):
                yield node.attr
        elif isinstance(node, ast.Call) and _dotted(node.func)[-1] in _READERS:
            values = [x.value for x in node.args if isinstance(x, ast.Constant)]
            yield from (x for x in values if isinstance(x, str) and _is_private(x))


def _is_of_torch(parts: list[str]) -> bool:
    return parts[0] == "torch" and any(map(_is_private, parts))


def _unlisted(source: str) -> list[str]:
    """The names in a source that are not listed."""
    listed = [name.replace(":", ".") for name in _LISTED]
    attributes = {name.split(".")[-1] for name in listed}

    def is_listed(name: str) -> bool:
        if name.startswith("torch."):  # or what leads to it
            return any(f"{x}.".startswith(f"{name}.") for x in listed)
        return name in attributes

    return [name for name in _used(source) if not is_listed(name)]


@pytest.mark.parametrize("file", _FILES, ids=lambda file: str(file.relative_to(_FOLDER)))
def test_all_that_is_used_is_listed(file: Path) -> None:
    assert not _unlisted(file.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import torch._guesses",
        "from torch._guards import Guesses",
        "from torch import _guesses",
        "torch._C._guesses()",
        "torch._guesses.of(x)",
        "node._guesses",
        "node.graph._guesses.of(x)",
        "getattr(node, '_guesses', None)",
        "context.fw_metadata.num_backward_tokens",
    ],
)
def test_what_is_not_listed_is_found(source: str) -> None:
    assert _unlisted(source)


@pytest.mark.parametrize("name", _LISTED)
def test_all_that_is_listed_is_used(name: str) -> None:
    last = name.replace(":", ".").split(".")[-1]
    assert any(last in file.read_text() for file in _FILES)


@pytest.mark.parametrize("awaited", [*PRIVATE_NAMES, *MARKS])
def test_what_is_waited_for(awaited: str) -> None:
    """A public request, or the word that there is none."""
    assert ("https://github.com/pytorch/pytorch/issues/" in awaited) != ("no request" in awaited)


def test_nothing_is_missing() -> None:
    assert private.missing() == ()


@pytest.mark.parametrize(
    "name", ["no_such_module.name", "_guards.no_such_name", "_guards.TracingContext.no_such_name"]
)
def test_what_is_missing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *path = name.split(".")
    unknown = f"torch.{module}:{'.'.join(path)}"
    monkeypatch.setattr(private, "PRIVATE_NAMES", {"": (unknown,)})
    import_module("torch._guards")
    private.missing.cache_clear()
    try:
        assert private.missing() == (f"torch.{name}",)
    finally:
        private.missing.cache_clear()
