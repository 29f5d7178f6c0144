"""Lets Dynamo find the backend by name, without importing either of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from pathlib import Path
from typing import Any

from autogram._extras import DISTRIBUTION

_ENTRY_POINT = "[torch_dynamo_backends]\nautogram = autogram._compiled:autogram\n"


def register() -> None:
    """Tells Dynamo about the backend. Dynamo looks for it when something is compiled.

    Dynamo looks for entry points only once. It finds those of an installed package anyway.
    """
    if "torch._dynamo" in sys.modules:  # it may have looked already
        from torch._dynamo import register_backend

        from autogram._compiled.backend import autogram

        register_backend(autogram)
    elif not _is_installed():
        sys.meta_path.append(_Finder())


def _is_installed() -> bool:
    """Whether the entry point is among those of installed packages."""
    try:
        return bool(distribution(DISTRIBUTION).entry_points)
    except PackageNotFoundError:
        return False


class _Metadata(Distribution):
    """The entry point of a package that is imported from its source.

    Its name differs from the package's, whose metadata may exist from an older version
    without the entry point.
    """

    def read_text(self, filename: str) -> str | None:
        texts = {"METADATA": "Name: autogram-backend\n", "entry_points.txt": _ENTRY_POINT}
        return texts.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(__file__).parents[2].joinpath(path)


class _Finder(DistributionFinder):
    """Finds metadata where those of all packages are looked for. It finds no modules."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        return [_Metadata()] if getattr(context, "name", None) is None else []
