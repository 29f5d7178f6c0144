"""The command line: what it says of models, its exit codes, and what goes to which stream."""

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import autogram
from autogram._check import main
from autogram._check.printing import Bar

ROOT = Path(__file__).parents[3]
PREAMBLE = """
import torch
from torch import nn
from autogram.rules import product, register_rule

torch.manual_seed(0)
x = torch.randn(6, 3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.last(self.first(x).tanh()) * self.scale

def sizes(output):
    return output.square().sum(1)
"""


class Files:
    """Files of a user, and calls of the command in their folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys, self._count = folder, capsys, 0

    def write(self, source: str) -> Path:
        """A file that no other test has imported."""
        self._count += 1
        path = self._folder / f"users_{self._folder.name}_{self._count}.py"
        path.write_text(PREAMBLE + dedent(source))
        return path

    def check(self, source: str, *options: str) -> tuple[int, str, str]:
        """Exit code, and both streams, for a function `make` in a file."""
        return self.run("check", f"{self.write(source)}:make", "--seconds", "0", *options)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """The same for other arguments."""
        code = main(arguments)
        streams = self._capsys.readouterr()
        return code, streams.out, streams.err


@pytest.fixture
def files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Files:
    """Some in an empty folder, which is on the path as that of `python -m` is."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Files(tmp_path, capsys)


LOSSES = """
def make():
    model = Net()
    return model, sizes(model(x))
"""
FUNCTION = """
def make():
    model = Net()
    return model, lambda: sizes(model(x))
"""


@pytest.mark.cpu
@pytest.mark.parametrize("source", [LOSSES, FUNCTION], ids=["losses", "function"])
def test_a_model_that_is_fine(files: Files, source: str) -> None:
    code, out, err = files.check(source)
    assert code == 0
    assert "Losses: (6,), cpu" in out
    assert "first.weight" in out
    assert "Fine: the Gramian agrees" in out
    assert "fallback" not in out  # the calls were recorded
    assert err.splitlines() == ["loading ...", "computing losses ...", "verifying ..."]


@pytest.mark.parametrize(
    ("source", "shapes"),
    [
        (
            "def make():\n    m = Net()\n    y = m(x)\n    return m, [y[:, 0].sum(), y.sum()]",
            [[], []],
        ),
        (
            "def make():\n    m = Net()\n    return m, lambda: {'a': sizes(m(x)), 'b': m(x)}",
            [[6], [6, 2]],
        ),
        (
            "a, b = nn.Linear(3, 3), Net()\ndef make():\n    return [a, b], lambda: sizes(b(a(x)))",
            [[6]],
        ),
    ],
    ids=["list", "dict", "several modules"],
)
def test_forms(files: Files, source: str, shapes: list[list[int]]) -> None:
    """Models and losses in each form that an engine takes."""
    code, out, _ = files.check(source, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["status"] == "fine"
    assert found["shapes"] == shapes
    uses = [use for of in found["report"]["parameters"] for use in of["uses"]]
    are_single = shapes[0] == []  # losses of the whole batch, each with a pass of its own
    assert all(use["function"] == "an ordinary pass" if are_single else use["rule"] for use in uses)


@pytest.mark.parametrize(("dim", "samples"), [("none", 1), ("0", 6), ("auto", 6)])
def test_batch_dim(files: Files, dim: str, samples: int) -> None:
    _, out, _ = files.check(FUNCTION, "--json", "--batch-dim", dim)
    assert json.loads(out)["report"]["samples"] == samples


def test_rows_with_advice(files: Files) -> None:
    """A call without a rule, and a penalty that no call shows."""
    code, out, _ = files.check("""
        class Odd(Net):
            def forward(self, x):
                return torch.kron(super().forward(x), self.last.bias)

        def make():
            model = Odd()
            return model, lambda: sizes(model(x)) + model.scale.square().sum()
    """)
    assert code == 0
    assert "Explicit rows: `last.bias` in kron (12 numbers)" in out
    assert "registered_functions" in out
    assert "Explicit rows: `scale` in the losses (12 numbers). Use it in the `forward`" in out
    assert "Warning: Use these parameters in the `forward` of a module" in out


def test_json_has_it_all(files: Files) -> None:
    """Nothing else goes to the standard output, and times are there if asked for."""
    path = files.write(FUNCTION)
    code, out, err = files.run("check", f"{path}:make", "--json", "--quiet", "--seconds", "0.01")
    found = json.loads(out)
    assert code == 0
    assert err == ""
    assert found["torch"] == torch.__version__
    assert found["error"] is found["kind"] is None
    assert found["warnings"] == found["fallbacks"] == []
    times = found["times"]
    assert times["what"] == "steps"
    assert times["count"] >= 3
    assert min(times["sgd"], times["fused"], times["two_passes"]) > 0


@pytest.mark.parametrize("source", [LOSSES, FUNCTION], ids=["losses", "function"])
def test_times(files: Files, source: str) -> None:
    path = files.write(source)
    code, out, err = files.run("check", f"{path}:make", "--seconds", "0.05")
    assert code == 0
    assert "SGD on the mean of the losses" in out
    assert ("engine.backward" in out) == (source == FUNCTION)
    assert ("Return a function" in out) == (source == LOSSES)
    assert err.splitlines()[-1] == "timing ..."


def test_a_result_that_is_wrong(files: Files) -> None:
    """By a rule of the user: named by the error, and exit code 1."""
    path = files.write("""
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, scale):
                ctx.save_for_backward(x, scale)
                return x * scale

            @staticmethod
            def backward(ctx, g):
                x, scale = ctx.saved_tensors
                return g * scale, (g * x).sum(0)

        class Odd(Net):
            def forward(self, x):
                return Double.apply(self.last(self.first(x).tanh()), self.scale)

        def make():
            @register_rule(Double)
            def double(x, scale):
                return [product(scale, "ti,ti->i", 3 * x)]

            model = Odd()
            return model, lambda: sizes(model(x))
    """)
    code, out, _ = files.run("check", f"{path}:make")
    assert code == 1
    assert "Wrong: VerificationError" in out
    assert "`scale`" in out
    assert "Medians" not in out
    code, out, _ = files.run("check", f"{path}:make", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["status"] == "wrong"
    assert "does not agree" in found["error"]


def test_what_is_not_supported(files: Files) -> None:
    """The error says what to do."""
    code, out, _ = files.check("""
        def make():
            model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), Net())
            return model, lambda: sizes(model(torch.arange(5)))
    """)
    assert code == 1
    assert "Failed: UnsupportedError: " in out
    assert "`max_norm`" in out
    code, out, _ = files.check(FUNCTION.replace("sizes(model(x))", "model(x).detach()"), "--json")
    assert code == 1
    assert json.loads(out)["kind"] == "InvalidLossesError"


NOT_RIGHT = {
    "raises": ("def make():\n    raise ValueError('of the user')", r"Your code raised ValueError"),
    "import": ("import no_such_thing\ndef make(): ...", "Your code raised ModuleNotFoundError"),
    "nothing": (
        "def make():\n    return None",
        r"returned an object of type `NoneType`. Return `(model, losses)`",
    ),
    "model": (
        "def make():\n    return 1, sizes(x)",
        "The model is a `int`, not a module. Return",
    ),
    "modules": (
        "def make():\n    return [], sizes(x)",
        "The model is a `list`, not a module. Return",
    ),
    "losses": (
        "def make():\n    return Net(), lambda: [1]",
        "The losses have a int at 0. Pass a tensor, or a list or a dict of tensors. Return",
    ),
    "another": (
        "def make():\n    m = Net()\n    return m, sizes(m.last(m.first(x)))",
        "Return `(model, function)` instead, with a function that computes the losses",
    ),
    "no function": (
        "make = 3",
        "has no function `make`. Pass one of product, register_rule, Net, sizes",
    ),
}


@pytest.mark.parametrize("name", NOT_RIGHT)
def test_functions_that_are_not_right(files: Files, name: str) -> None:
    """Exit code 2, and what to do on the error stream."""
    source, message = NOT_RIGHT[name]
    code, out, err = files.check(source)
    assert (code, out) == (2, "")
    assert message in err
    assert ("of the user" in err) == (name == "raises")


EXITS = {
    "a number": ("sys.exit(7)", r"`sys.exit(7)`"),
    "zero": ("sys.exit(0)", "`sys.exit(0)`"),
    "nothing": ("sys.exit()", "`sys.exit(None)`"),
    "a text": ("sys.exit('enough')", "`sys.exit('enough')`"),
    "raised": ("raise SystemExit(3)", "`sys.exit(3)`"),
    "quit": ("quit(1)", "`sys.exit(1)`"),
}
PLACES = {
    "the function": "import sys\ndef make():\n    {}\n",
    "the import": "import sys\n{}\ndef make(): ...\n",
    "the losses": """
import sys
def make():
    def losses():
        {}
    return Net(), losses
""",
    "the model": """
import sys
class Ends(Net):
    def forward(self, x):
        {}
def make():
    model = Ends()
    return model, model(x)
""",
    "a backward pass": """
import sys
class Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        {}
def make():
    model = Net()
    return model, lambda: sizes(Ends.apply(model(x)))
""",
    "a rule": """
import sys
class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * scale
@register_rule(Odd)
def odd(x, scale):
    {}
class Ends(Net):
    def forward(self, x):
        return Odd.apply(super().forward(x), self.scale)
def make():
    model = Ends()
    return model, lambda: sizes(model(x))
""",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXITS)
def test_code_that_ends_the_process(files: Files, place: str, name: str) -> None:
    """Its exit code is not that of the check, which would be taken for a result."""
    statement, message = EXITS[name]
    code, out, err = files.check(PLACES[place].format(statement))
    assert (code, out) == (2, "")
    assert f"Your code called {message}, as shown above." in err
    assert "Leave out the call" in err
    assert "SystemExit" in err  # the traceback


@pytest.mark.parametrize("error", ["ValueError('of the user')", "KeyError(3)", "OSError('gone')"])
@pytest.mark.parametrize("place", ["a backward pass", "a rule", "the model"])
def test_errors_of_the_users_code_in_passes(files: Files, place: str, error: str) -> None:
    """They are no findings about the engine, and the traceback tells where they come from."""
    code, out, err = files.check(PLACES[place].format(f"raise {error}"))
    assert (code, out) == (2, "")
    assert f"{error.partition('(')[0]}" in err
    assert "as shown above. Correct it first" in err


def test_an_interrupt_is_one(files: Files) -> None:
    """As anywhere in Python."""
    with pytest.raises(KeyboardInterrupt):
        files.check(PLACES["the function"].format("raise KeyboardInterrupt"))


SINGLE = {
    "a mean": "model(x).square().mean()",
    "a mean in a list": "[sizes(model(x)).mean()]",
    "one of a dict": "{'all': sizes(model(x)).sum()}",
    "a batch of one": "sizes(model(x[:1]))",
}


@pytest.mark.parametrize("dim", ["auto", "none"])
@pytest.mark.parametrize("name", SINGLE)
def test_one_objective(files: Files, name: str, dim: str) -> None:
    """There is nothing to weigh, which is said in place of that all is fine."""
    source = f"def make():\n    model = Net()\n    return model, lambda: {SINGLE[name]}\n"
    code, out, _ = files.check(source, "--batch-dim", dim)
    assert code == 0  # the Gramian is right
    last = out.rstrip().splitlines()[-1]
    assert last.startswith("Nothing to weigh: the losses are one objective")
    assert '`reduction="none"`' in last
    assert "Fine" not in out
    code, out, _ = files.check(source, "--batch-dim", dim, "--json")
    assert json.loads(out)["status"] == "one objective"
    assert code == 0


def test_no_objective(files: Files) -> None:
    """Of an empty batch, nothing can be said."""
    source = "def make():\n    model = Net()\n    return model, lambda: sizes(model(x[:0]))\n"
    code, out, err = files.check(source)
    assert (code, out) == (2, "")
    assert (
        "There are no objectives: the losses have the shape (0,). Return the losses of a batch"
        in err
    )


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("users_module", "`users_module` names no function. Pass `module:function`."),
        ("no_such_module:make", "There is no module `no_such_module`. Call the command in"),
        ("no_such_file.py:make", "There is no file `no_such_file.py`. Pass `module:function`"),
    ],
)
def test_places_that_are_not_there(files: Files, place: str, message: str) -> None:
    code, _, err = files.run("check", place)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    "arguments",
    [[], ["check"], ["check", "a:b", "--seconds", "-1"], ["check", "a:b", "--batch-dim", "x"]],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: autogram" in capsys.readouterr().err


def test_installed_script(files: Files, tmp_path: Path) -> None:
    """It finds modules in the folder where it is called, which is not on its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    module, name = project["scripts"]["autogram"].split(":")
    script = tmp_path / "elsewhere" / "autogram-script"
    script.parent.mkdir()
    script.write_text(f"import sys\nfrom {module} import {name}\nsys.exit({name}())\n")
    command = [sys.executable, str(script), "check", f"{files.write(LOSSES).stem}:make", "--json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["status"] == "fine"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """What a report of a defect has to name."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert (
        capsys.readouterr().out == f"autogram {autogram.__version__}, torch {torch.__version__}\n"
    )


def test_modules_are_left_as_they_were(files: Files) -> None:
    """A model that the user's file keeps has no hooks afterwards, and no gradients."""
    path = files.write("""
        model = Net()
        def make():
            return model, lambda: sizes(model(x))
    """)
    assert files.run("check", f"{path.stem}:make", "--seconds", "0.01")[0] == 0
    model = sys.modules[path.stem].model
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    bar = Bar(terminal)
    bar.show("verifying", 0.5)
    bar.show("timing", 1.0)
    bar.close()
    empty, half, full, last = terminal.getvalue().split("\r\x1b[K")
    assert (empty, last) == ("", "")
    assert half == "█" * 12 + "·" * 12 + " verifying"
    assert full == "█" * 24 + " timing"


def test_from_a_shell(files: Files) -> None:
    """As a process of its own, by the name of a module in the folder."""
    name = files.write(LOSSES).stem
    done = subprocess.run(
        [sys.executable, "-m", "autogram", "check", f"{name}:make", "--seconds", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Fine" in done.stdout


def test_the_page(files: Files, tmp_path: Path) -> None:
    """Its function is one that the command takes."""
    page = Path(__file__).parents[3] / "docs" / "command_line.md"
    source = page.read_text("utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "training.py").write_text(source)
    code, out, _ = files.run("check", "training:make", "--seconds", "0.01")
    assert code == 0
    assert "Explicit rows: `centres` in cdist (288 numbers)" in out
