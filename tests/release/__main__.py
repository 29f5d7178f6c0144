"""Builds what is released, and tries it: ``make release``.

0. With `--tag` and `--repository`: whether the package has the version and URL of the release.
1. A source distribution, and a wheel that is built from it.
2. The wheel is installed into an empty environment, and takes a step there, outside of all this.
   `--torch VERSION` does it once more with another torch.
3. The source distribution is unpacked, and some of its tests run there: those that read its files,
   and the collection of all of them.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/unit/project/test_docs.py",
    "tests/unit/project/test_messages.py",
    "tests/unit/_check/test_check.py",
]

# What somebody who packages it needs, and what nobody does.
NEEDED = [
    ".ci/run",
    ".github/workflows/tests.yml",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "demo/__main__.py",
    "docs/index.md",
    "examples/clipping.py",
    "pyproject.toml",
    "src/autogram/py.typed",
    "tests/unit/conftest.py",
]
UNWANTED = (".venv", ".git/", "__pycache__", ".pyc", ".coverage", ".mypy_cache", "build/", "dist/")


def main() -> None:
    """Raises where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to leave both files")
    parser.add_argument("--torch", action="append", default=[], help="a version to try as well")
    parser.add_argument("--tag", help="the tag of the release, which is v and the version")
    parser.add_argument("--repository", help="the URL at which it is released")
    given = parser.parse_args()
    check_names(ROOT, given.tag, given.repository)
    out = given.out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("torch_autogram-*"):
        old.unlink()
    run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)])
    (source,), (wheel,) = out.glob("torch_autogram-*.tar.gz"), out.glob("torch_autogram-*.whl")
    look_into(source, wheel)
    with tempfile.TemporaryDirectory() as folder:
        for number, torch in enumerate([None, *given.torch]):
            try_wheel(wheel, Path(folder) / str(number), torch)
        try_source(source, Path(folder))
    print(f"\n{source.name} and {wheel.name} are in {out}.")


def check_names(root: Path, tag: str | None, repository: str | None) -> None:
    """Whether the package in a folder has the version of a tag, and the URL of a repository.

    Raises:
        SystemExit: Either is another.
    """
    (version,) = re.findall(
        r'^__version__ = "(.*)"$', (root / "src/autogram/__init__.py").read_text(), re.MULTILINE
    )
    if tag not in (None, f"v{version}"):
        raise SystemExit(f"The tag is {tag}, and the version {version}. Correct one of them.")
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    named = project["urls"]["Homepage"]
    if repository not in (None, named):
        raise SystemExit(
            f"This is {repository}, and the package says {named}. Correct the URLs in "
            "pyproject.toml and CITATION.cff."
        )


def look_into(source: Path, wheel: Path) -> None:
    """Whether both have the files that they should."""
    with tarfile.open(source) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    missing = sorted(set(NEEDED) - set(names))
    assert not missing, f"not in {source.name}: {missing}"
    assert not [name for name in names if any(part in name for part in UNWANTED)]
    with ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
    assert folders == {"autogram", f"{wheel.name.split('-py3')[0]}.dist-info"}, folders


def try_wheel(wheel: Path, folder: Path, torch: str | None) -> None:
    """Installs it into an environment of its own, with nothing but what it requires.

    Args:
        wheel: The file.
        folder: Where to make the environment.
        torch: The version of torch, if it is not the pinned one, with all that it asks for.
    """
    run([sys.executable, "-m", "venv", str(folder / "environment")])
    python = folder / "environment" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    pins = ["--constraint", str(ROOT / "constraints.txt")] if torch is None else [f"torch=={torch}"]
    run([*pip, *pins, str(wheel)])
    smoke = folder / "smoke.py"
    smoke.write_bytes((ROOT / "tests" / "release" / "smoke.py").read_bytes())
    run([str(python), "-W", "ignore:Failed to initialize NumPy", str(smoke), str(ROOT)], folder)


def try_source(source: Path, folder: Path) -> None:
    """Runs tests in it, with the packages of this environment and the code of the distribution."""
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / source.name.removesuffix(".tar.gz")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run(
        [sys.executable, "-c", f"import autogram; assert '{folder}' in autogram.__file__"], unpacked
    )
    run([*pytest, "--collect-only", "-qq"], unpacked, quiet=True)
    run([*pytest, *TESTS], unpacked)


def run(command: Sequence[str], folder: Path = ROOT, *, quiet: bool = False) -> None:
    """Runs a command in a folder, with the code that is there before what is installed."""
    print("$", " ".join(command), flush=True)
    path = {"PYTHONPATH": str(folder / "src")} if (folder / "src").is_dir() else {}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | path
    out = subprocess.DEVNULL if quiet else None
    subprocess.run(command, cwd=folder, env=environment, stdout=out, check=True)


if __name__ == "__main__":
    main()
