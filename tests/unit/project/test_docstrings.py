"""The examples of docstrings run as they stand, as from an empty prompt."""

import doctest
import importlib
import pkgutil
import sys
from collections.abc import Iterator

import pytest
import torch

import autogram


def _examples() -> Iterator[doctest.DocTest]:
    """Those of every module; nothing that a module has imported is defined in them."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for found in pkgutil.walk_packages(autogram.__path__, "autogram."):
        if found.name != "autogram.__main__":
            module = importlib.import_module(found.name)
            yield from (x for x in finder.find(module, globs={}) if x.examples)


@pytest.mark.parametrize("example", [pytest.param(x, id=x.name) for x in _examples()])
def test_examples_run(example: doctest.DocTest) -> None:
    torch.set_default_dtype(torch.float32)  # as for a user
    with torch.random.fork_rng(devices=[]):
        result = doctest.DocTestRunner().run(example, out=sys.stderr.write, clear_globs=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_an_example_that_is_wrong_is_seen() -> None:
    """What the test above would say, which prints what was expected."""
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    with pytest.raises(AssertionError):
        test_examples_run(wrong)
