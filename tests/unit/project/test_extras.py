"""Parts that need further packages: which extra installs these, by its name in the project."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))[
    "project"
]
PARTS = [
    ("autogram.plot", "matplotlib", "plot"),
    ("autogram.integrations.accelerate", "accelerate", "accelerate"),
    ("autogram.integrations.transformers", "transformers", "transformers"),
    ("autogram.integrations.transformers", "accelerate", "transformers"),
]


@pytest.mark.parametrize(("part", "package", "extra"), PARTS)
def test_a_package_that_is_not_installed(part: str, package: str, extra: str) -> None:
    """The message has the command to copy; the error is the one that Python raises."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *_):\n"
        f"        if name.split('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        "try:\n"
        f"    import {part}\n"
        "except ModuleNotFoundError as error:\n"
        f"    assert error.name.split('.')[0] == {package!r}, error.name\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == (
        f"The package `{package}` is not installed, which this part of autogram needs. Install it "
        f'by `pip install "{PROJECT["name"]}[{extra}]"`.\n'
    )
    names = [
        requirement.partition(">")[0] for requirement in PROJECT["optional-dependencies"][extra]
    ]
    assert package in names


def test_a_missing_file_of_the_package_itself() -> None:
    """No extra installs it."""
    code = "from autogram._extras import extra\nwith extra('plot'):\n    import autogram.nothing\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "No module named 'autogram.nothing'" in run.stderr
    assert "pip install" not in run.stderr
