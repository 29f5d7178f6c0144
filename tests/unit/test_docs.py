"""The snippets of the README and of the documentation run as they stand."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_snippets_run(page: Path) -> None:
    """One after the other, with the names of the ones before."""
    namespace: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        for match in SNIPPET.finditer(page.read_text(encoding="utf-8")):
            line = page.read_text(encoding="utf-8").count("\n", 0, match.start(1))
            source = "\n" * line + match[1]  # so that a traceback has the page's line numbers
            exec(compile(source, str(page), "exec"), namespace)
