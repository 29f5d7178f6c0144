"""What is released says the same everywhere: versions, and the files that go with it."""

import re
import tomllib
from pathlib import Path

import autogram
from tests.release.__main__ import NEEDED

ROOT = Path(__file__).parents[3]


def _text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_versions_agree() -> None:
    """That of the package, of the citation, and the newest one in the changelog."""
    (cited,) = re.findall(r"^version: (\S+)$", _text("CITATION.cff"), re.MULTILINE)
    (date,) = re.findall(r"^date-released: (\S+)$", _text("CITATION.cff"), re.MULTILINE)
    newest = re.findall(r"^## \[(\d\S*)\] - (\S+)$", _text("CHANGELOG.md"), re.MULTILINE)[0]
    assert autogram.__version__ == cited == newest[0]
    assert date == newest[1]


def test_source_distribution_has_what_is_needed() -> None:
    """Each file that has to be there exists, and is in a place that goes into it."""
    project = tomllib.loads(_text("pyproject.toml"))
    target = project["tool"]["hatch"]["build"]["targets"]["sdist"]
    included = {place.lstrip("/") for place in target["include"]}
    always = {"LICENSE", "README.md", "pyproject.toml"}
    for name in NEEDED:
        assert (ROOT / name).is_file(), name
        assert name.partition("/")[0] in included | always, name


def test_every_extra_is_pinned() -> None:
    """`make` installs the versions of `constraints.txt`, and no other ones."""
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    pinned = {line.partition("==")[0].lower() for line in _text("constraints.txt").splitlines()}
    for requirements in [project["dependencies"], *project["optional-dependencies"].values()]:
        for requirement in requirements:
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None
            assert name[0].lower() in pinned, requirement
