"""What runs on other machines calls what is here, with the versions that the package names."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def _load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text("utf-8"))


def _targets(text: str) -> list[str]:
    """What a command asks `make` for."""
    return re.findall(r"\bmake (?:--[\w-]+ )*([a-z-]+)", text)


def _values(node: Any) -> list[str]:
    """All texts in a workflow, but for its comments."""
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        return [text for part in node for text in _values(part)]
    return [str(node)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_are_there(path: Path) -> None:
    """Targets of `make`, scripts, and actions of a named version."""
    jobs = _load(path)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    for command in commands:
        if command.startswith("make"):
            targets = _targets(command) or _values(jobs["versions"]["strategy"])
        else:
            assert (ROOT / command).is_file(), command
            targets = _targets((ROOT / command).read_text("utf-8"))
        named = [x for x in targets if re.fullmatch("[a-z-]+", x)]
        assert named
        for target in named:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    assert all("@" in step["uses"] for step in steps if "uses" in step)


def test_every_version_is_tried() -> None:
    """Each Python that the package names, the oldest PyTorch, the pinned one and the newest."""
    jobs = _load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]
    values = _values(jobs)
    prefix = "Programming Language :: Python :: 3."
    named = {x.rpartition(" ")[2] for x in PROJECT["classifiers"] if x.startswith(prefix)}
    assert {x for x in values if re.fullmatch(r"3\.\d+", x)} == named
    assert {"unit", "test-oldest", "test-newest"} <= set(values)
    oldest = min(named, key=lambda x: int(x.partition(".")[2]))
    assert PROJECT["requires-python"] == f">={oldest}"


def test_a_release_is_checked_first() -> None:
    """Nothing is published before `make release` has compared its names."""
    jobs = _load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    (command,) = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert "--tag $TAG" in command
    assert "--repository $REPOSITORY" in command
    assert jobs["publish"]["needs"] == "build"


def test_hooks_before_a_commit_run_the_installed_tools() -> None:
    """On the folders of the Makefile, or on part of these."""
    (sources,) = re.findall(r"^SOURCES := (.*)$", MAKEFILE, re.MULTILINE)
    (repository,) = _load(ROOT / ".pre-commit-config.yaml")["repos"]
    for hook in repository["hooks"]:
        command = hook["entry"].split()[0]
        assert command.startswith(".venv/bin/")
        assert f"$(BIN)/{Path(command).name}" in MAKEFILE
        (folders,) = re.findall(r"^\^\((.*)\)/$", hook["files"])
        assert set(folders.split("|")) <= set(sources.split())
