"""What is released says the same everywhere: versions, and the files that go with it."""

import re
import tomllib
from pathlib import Path

import pytest

import autogram
from tests.release.__main__ import NEEDED, check_names

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


def test_names_agree() -> None:
    """URLs of the repository and of its pages, wherever they are written."""
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    cited = dict(re.findall(r"^(repository-code|url): (\S+)$", _text("CITATION.cff"), re.MULTILINE))
    assert cited["repository-code"] == project["urls"]["Homepage"]
    assert cited["url"] == project["urls"]["Documentation"]
    for name in ("Changelog", "Issues"):
        assert project["urls"][name].startswith(cited["repository-code"] + "/")


def test_a_release_of_other_names_is_refused() -> None:
    """Nothing is built for a tag that is not the version, or in another repository."""
    home = tomllib.loads(_text("pyproject.toml"))["project"]["urls"]["Homepage"]
    check_names(ROOT, f"v{autogram.__version__}", home)
    check_names(ROOT, None, None)
    with pytest.raises(SystemExit, match=r"The tag is v0\.0\.0, and the version"):
        check_names(ROOT, "v0.0.0", home)
    with pytest.raises(SystemExit, match="This is a fork, and the package says"):
        check_names(ROOT, None, "a fork")


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
