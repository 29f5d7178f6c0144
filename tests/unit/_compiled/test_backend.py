"""The backend itself: its name, what it hands on, and what happens where it cannot see."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autogram import CompiledPartWarning, Engine, UnseenUseError, _compiled
from autogram._compiled import autogram, backend
from tests.unit._compiled.compiling import assert_steps, compiled, counted_parts

ROOT = Path(__file__).parents[3]


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _batches(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(size, 3),) for size in sizes]


def test_entry_point() -> None:
    """The name by which Dynamo finds the backend once the package is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["torch_dynamo_backends"]["autogram"].split(":")
    assert getattr(import_module(module), name) is autogram


def test_registered_on_import() -> None:
    """Where Dynamo is there already, it need not look for entry points."""
    code = (
        "import torch._dynamo, autogram\n"
        "from torch._dynamo.backends.registry import _COMPILER_FNS\n"
        "assert _COMPILER_FNS['autogram'] is autogram._compiled.autogram"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Hides the metadata of an installation.
UNINSTALLED = """
from importlib.metadata import MetadataPathFinder
find = MetadataPathFinder.find_distributions
def others(*args, **kwargs):
    return [x for x in find(*args, **kwargs) if "autogram" not in x.metadata["Name"]]
MetadataPathFinder.find_distributions = others
"""
IMPORTED = """
import sys, torch
before = set(sys.modules)
import autogram
new = set(sys.modules) - before
owners = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names)
assert owners <= {"autogram", "opt_einsum"}, owners
assert "autogram._compiled.backend" not in new
import torch._dynamo
assert "autogram._compiled.backend" not in sys.modules
backend = torch._dynamo.lookup_backend("autogram")
assert backend is autogram._compiled.autogram
assert backend.__module__ == "autogram._compiled.backend"
"""


@pytest.mark.parametrize("before", ["", UNINSTALLED], ids=["as here", "from the source"])
def test_import_leaves_dynamo_alone(before: str) -> None:
    """Importing Dynamo takes as long as importing torch. It finds the backend when it looks."""
    subprocess.run([sys.executable, "-c", before + IMPORTED], check=True)


def test_no_other_name_is_in_the_package() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'other'"):
        _ = _compiled.other


@pytest.mark.filterwarnings("ignore::autogram.CompiledPartWarning")
def test_unknown_version_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and explicit rows."""
    monkeypatch.setattr(backend, "missing", lambda: ("torch.no_such_name",))
    model = _mlp()
    engine = Engine(model)
    with counted_parts() as parts:
        run = compiled(model)
        with pytest.warns(CompiledPartWarning, match=r"does not have torch\.no_such_name"):
            run(torch.randn(4, 3))
        assert_steps(model, run, engine, _batches(4, 5), lambda y, _: y.square().sum(1))
    assert not parts


@pytest.mark.parametrize("is_whole", [True, False])
def test_other_backends(is_whole: bool) -> None:
    """What they compile gets rows, and the error names the line to change."""
    model = _mlp()
    if is_whole:
        run = torch.compile(model, backend="aot_eager")
    else:
        model[0] = torch.compile(model[0], backend="aot_eager")
        run = model
    engine = Engine(model)
    losses = run(torch.randn(4, 3)).square().sum(1)
    with pytest.warns(CompiledPartWarning, match=r"hides its uses of `0\.(_orig_mod\.)?weight`"):
        engine.compute_gramian(losses)
    assert_steps(model, run, engine, _batches(4, 4), lambda y, _: y.square().sum(1))
    engine.remove()
    strict = Engine(model, unseen="error")
    with pytest.raises(UnseenUseError, match=r'torch\.compile\(model, backend="autogram"\)'):
        strict.compute_gramian(run(torch.randn(4, 3)).square().sum(1))


def test_options_go_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a mode."""
    given: dict[str, Any] = {}

    def note(*args: Any) -> Any:
        given.update(args[2])
        return lambda *_: pytest.fail("compiled")

    monkeypatch.setitem(backend.COMPILERS, "inductor", note)
    model = _mlp()
    run = compiled(model, "inductor", options={"epilogue_fusion": False})
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        run(torch.randn(4, 3))
    assert given["epilogue_fusion"] is False
    torch._dynamo.reset()
    run = torch.compile(model, backend=autogram, mode="max-autotune-no-cudagraphs")
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        run(torch.randn(4, 3))
    assert given["max_autotune"] is True


def test_unknown_options() -> None:
    run = compiled(_mlp(), options={"no_such_option": True})
    with pytest.raises(Exception, match="Unexpected optimization option no_such_option"):
        run(torch.randn(4, 3))


def test_dynamic_from_the_start() -> None:
    model = _mlp()
    engine = Engine(model, unseen="error")
    with counted_parts() as parts:
        run = compiled(model, dynamic=True)
        assert_steps(model, run, engine, _batches(4, 5, 6), lambda y, _: y.square().sum(1))
    assert len(parts) == 1


def test_without_parameters() -> None:
    """Losses that are compiled, behind a model that is not."""
    model = _mlp()
    engine = Engine(model, unseen="error")
    losses_of = compiled(lambda y: y.square().sum(1))
    with counted_parts() as parts:
        assert_steps(model, model, engine, _batches(4, 5), lambda y, _: losses_of(y))
    assert not parts
