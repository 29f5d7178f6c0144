"""The documentation in a browser, with the network off."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[3]
BROWSERS = "chromium", "chromium-browser", "google-chrome"
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom"),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="needs Chromium"),
    pytest.mark.skipif(find_spec("sphinx_design") is None, reason="needs `make docs`"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the documentation, built."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    subprocess.run(build, check=True, cwd=ROOT, timeout=600)
    return folder


def opened(address: str, folder: Path) -> tuple[str, set[str]]:
    """A page as it is after its scripts have run, and the machines that it asks."""
    log = folder / "requests.json"
    command = [BROWSER, *OPTIONS, f"--log-net-log={log}", f"--user-data-dir={folder}", address]
    page = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    # The browser may end before it has closed the list.
    addresses = re.findall(r'"url":("[^"]*")', log.read_text("utf-8"))
    parts = [urlsplit(json.loads(found)) for found in addresses]
    return page, {of.hostname or "" for of in parts if of.scheme in ("http", "https", "ws", "wss")}


def asked(address: str, folder: Path) -> tuple[str, set[str]]:
    """A page, and the machines that it asks, without those that the browser asks for itself."""
    _, by_itself = opened("about:blank", folder)
    page, machines = opened(address, folder)
    return page, machines - by_itself


def test_requests_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="https://pictures.invalid/one.png">')
    _, machines = asked(page.as_uri(), tmp_path)
    assert machines == {"pictures.invalid"}


@pytest.mark.parametrize("name", ["index", "method", "api", "api/autogram.Engine"])
def test_a_page_asks_no_other_machine(name: str, site: Path, tmp_path: Path) -> None:
    page, machines = asked((site / f"{name}.html").as_uri(), tmp_path)
    assert "</html>" in page
    assert not machines


def test_formulas_are_drawn(site: Path, tmp_path: Path) -> None:
    source = (site / "method.html").read_text("utf-8")
    page, _ = opened((site / "method.html").as_uri(), tmp_path)
    formulas = source.count('class="math ')
    assert formulas > 50
    assert page.count("<mjx-container ") >= formulas
    assert "<mjx-merror" not in page


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("mtl_backward", "coming_from.html"),
        ("DPSGD", "clipping.html"),
        ("influence", "attribution.html"),
        ("attribution", "attribution.html"),
        ("UPGrad", "api/autogram.weightings.UPGrad.html"),
    ],
)
def test_the_search_finds(words: str, found: str, site: Path, tmp_path: Path) -> None:
    page, _ = opened(f"{(site / 'search.html').as_uri()}?q={words}", tmp_path)
    results = page[page.index('id="search-results"') :]
    assert f'href="{found}' in results, results[:2000]
