"""Groups of parameters, and weights of the objectives for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autogram._arguments import Grouping, Names, labels
from autogram.errors import InvalidOperandError, listed

Groups = dict[str, dict[Tensor, str]]
"""The parameters of each group, with their names."""


def groups_of(by: Grouping | None, names: Names) -> Groups:
    """The parameters of each group; by default, each is its own group."""
    groups: Groups = {}
    for parameter, label in labels(by, names).items():
        groups.setdefault(label, {})[parameter] = names[parameter]
    return groups


def check_groups(what: str, values: Mapping[Any, Any], groups: Groups) -> None:
    """Refuses a dict by group that lacks a group, or has an unknown one.

    Args:
        what: A name for the entries, for the message.
        values: An entry for each group.
        groups: All groups.
    """
    if values.keys() == groups.keys():
        return
    unknown = [f"`{name}`" for name in values if name not in groups]
    missing = [f"`{name}`" for name in groups if name not in values]
    differences = [
        f"it {verb} {listed(names)}"
        for verb, names in (("has", unknown), ("lacks", missing))
        if names
    ]
    raise InvalidOperandError(
        f"The dict of {what} does not fit the groups of parameters: {', and '.join(differences)}. "
        "Pass an entry for each group that `by` gives; without `by`, each parameter is its own "
        "group. Losses of several tasks take one tensor `(m,)`."
    )
