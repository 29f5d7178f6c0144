"""The snippets of the README and of the documentation run as they stand, and links lead there."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import autogram

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
TEXTS = [*PAGES, *GUIDES, *sorted((ROOT / "src").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# Packages that tests do not install: where one is not there, a snippet ends at its import.
OTHERS = {"opacus"}
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Lightning advises workers for loading data, and calls what PyTorch has deprecated.
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_snippets_run(page: Path) -> None:
    """One after the other, with the names of the ones before."""
    namespace: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        for match in SNIPPET.finditer(page.read_text(encoding="utf-8")):
            line = page.read_text(encoding="utf-8").count("\n", 0, match.start(1))
            source = "\n" * line + match[1]  # so that a traceback has the page's line numbers
            try:
                exec(compile(source, str(page), "exec"), namespace)
            except ModuleNotFoundError as error:
                if error.name not in OTHERS:
                    raise


@pytest.mark.parametrize("page", [pytest.param(x, id=str(x.relative_to(ROOT))) for x in TEXTS])
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file), f"{target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page."""
    headings = HEADING.findall(SNIPPET.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_link_to_nowhere_is_seen(tmp_path: Path) -> None:
    """What the test above would say."""
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[here](#one-heading), [not there](#another)\n")
    with pytest.raises(AssertionError, match="#another"):
        test_links_lead_to_files_and_headings(page)


def test_api_reference_has_every_public_package() -> None:
    """Each package that lists what is public, and each module beside these."""
    source = ROOT / "src"
    listed = set(re.findall(r"automodule:: (\S+)", (ROOT / "docs" / "api.md").read_text("utf-8")))
    public = set()
    for file in source.rglob("*.py"):
        parts = file.relative_to(source).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        is_package = parts[-1] == "__init__" and "__all__ = [" in file.read_text("utf-8")
        if not any(name.startswith("_") for name in names) and (
            is_package or (parts[-1] != "__init__" and len(names) == 2)
        ):
            public.add(".".join(names))
    assert public <= listed, public - listed


def test_api_reference_has_every_public_name() -> None:
    """What has no docstring, such as an alias of a type, is not found: the page itself names it."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    for package in re.findall(r"automodule:: (\S+)", page):
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name)
            own = isinstance(found, type) or (callable(found) and hasattr(found, "__name__"))
            if name == "__version__" or (package == "autogram" and is_error(found)):
                continue  # errors have pages in `autogram.errors`
            listed = section_of(page, package)
            if own and found.__doc__:
                assert f"\n   {name}\n" in listed, f"{package}.{name}"
            else:
                assert f"py:data:: {name}\n   :module: {package}\n" in listed, f"{package}.{name}"


def is_error(found: object) -> bool:
    """Whether a public name is an error or a warning."""
    return isinstance(found, type) and issubclass(found, Exception)


def section_of(page: str, package: str) -> str:
    """What the API reference lists of a package."""
    return page.split(f"## {package}\n")[1].split("\n## ")[0]


def test_errors_come_last_in_the_api_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert page.rindex("\n## ") == page.index("\n## autogram.errors\n")
    listed = set(re.findall(r"^   (\w+)$", section_of(page, "autogram.errors"), re.MULTILINE))
    errors = importlib.import_module("autogram.errors")
    assert listed == {name for name in autogram.__all__ if is_error(getattr(autogram, name))}
    assert listed == set(errors.__all__)
