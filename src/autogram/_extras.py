"""Packages that autogram does not install by default, and the extra that installs each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTION = "torch-autogram"
"""What pip installs the package by; `autogram` is the name of another distribution."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports in a block what an extra of the package installs.

    Raises:
        ModuleNotFoundError: It is not installed. The message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "autogram":
            raise
        raise ModuleNotFoundError(
            f"The package `{package}` is not installed, which this part of autogram needs. Install "
            f'it by `pip install "{DISTRIBUTION}[{name}]"`.',
            name=error.name,
        ) from error
