"""Accounts: what has arrived, for each parameter, each derived tensor, and the Gramian."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autogram._blocks import Columns, Region
from autogram._capture.backward.run import Run
from autogram._capture.tracked import Tracked
from autogram._capture.uses import Use
from autogram._errors import UnsupportedError

# Small parts of the Gramian are added up together, and larger ones as they come.
_MOST_IN_PARTS = 2**17


@dataclass(eq=False, slots=True)
class Account:
    """The blocks that have arrived for a parameter, or for a tensor derived from parameters."""

    owner: Tensor | Tracked
    columns: Columns | None
    """The blocks that have arrived; ``None`` once they are complete and taken."""
    expected: int = 0
    """How many uses, and derived tensors, have not arrived."""
    is_reached: bool = False
    """Whether a use has arrived, also without a cotangent."""


class Accounts(dict["Tensor | Tracked", Account]):
    """The accounts of parameters and derived tensors, opened when first asked for.

    A region of a parameter has the account of the parameter.

    Args:
        run: The run.
        uses: The uses that are expected to arrive.
    """

    def __init__(self, run: Run, uses: Iterable[Use]) -> None:
        super().__init__()
        self._run = run
        # By the `id` of an owner without an account, of which the uses hold each.
        self._readers: dict[int, list[Use | Tracked]] = {}
        derived: dict[Tracked, None] = {}
        for use in uses:
            for tracked in use.reads:
                owner: Tensor | Tracked = tracked.sources[0]
                if tracked.region is None:
                    derived[tracked], owner = None, tracked
                self._readers.setdefault(id(owner), []).append(use)
        for tracked in derived:
            for parameter in tracked.sources:
                self._readers.setdefault(id(parameter), []).append(tracked)

    def read_by(self, use: Use) -> list[Tensor] | None:
        """The parameters that a use reads, if nothing else does, and each is where it was then."""
        found: dict[int, Tensor] = {}
        for tracked in use.reads:
            place, parameter = tracked.place, tracked.sources[0]
            readers = self._readers.get(id(parameter))
            if readers is None or readers.count(use) < len(readers):
                return None
            if tracked.region is None or place is None:
                return None
            now = parameter.storage_offset(), parameter.shape, parameter.stride()
            if (place.offset, place.shape, place.strides) != now:
                return None
            found[id(parameter)] = parameter
        return list(found.values())

    def __missing__(self, owner: Tensor | Tracked) -> Account:
        if isinstance(owner, Tracked) and owner.region is not None:
            (parameter,) = owner.sources
            account = self[owner] = self[parameter]
            if account.columns is not None and owner.place not in (None, account.columns.parameter):
                name = self._run.channel.parameters([parameter]).get(parameter)
                # The region tells where the elements were.
                raise UnsupportedError(
                    f"`{name}` was moved in memory after the forward pass, into another memory "
                    "format or a buffer. Compute the losses again, with the parameter where it is "
                    "now."
                )
            return account
        if isinstance(owner, Tracked):
            region = Region.contiguous(owner.shape)
        else:
            region = Region.of_parameter(owner)
        columns = Columns(region, self._run.devices.on(owner.device))
        expected = len(self._readers.pop(id(owner), ()))
        account = self[owner] = Account(owner, columns, expected)
        return account


class Sum:
    """The sum of parts of the Gramian.

    Args:
        m: How many rows the Gramian has.
    """

    def __init__(self, m: int) -> None:
        self._m = m
        self._parts: list[Tensor] = []

    def add(self, part: Tensor | None) -> None:
        """Adds a part, ``(m, m)`` or ``(k, b, k, b)``; ``None`` where it is zero."""
        if part is None:
            return
        parts, flat = self._parts, part if part.dim() == 2 else part.reshape(self._m, self._m)
        parts.append(flat.to(parts[0].device) if parts else flat)
        if len(parts) * flat.numel() > _MOST_IN_PARTS:
            self._parts = [_together(parts)]

    def total(self) -> Tensor | None:
        """The sum, ``(m, m)``, or ``None`` if there are no parts."""
        return _together(self._parts) if self._parts else None


def _together(parts: Sequence[Tensor]) -> Tensor:
    """The sum of some tensors of one shape."""
    if len(parts) > 2:
        return torch.stack(tuple(parts)).sum(0)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def closed(reads: Mapping[Use, Sequence[Account]]) -> list[Use]:
    """Those of some uses that read nothing which other uses read, too, by accounts of each."""
    found = dict(reads)
    while True:
        counts = Counter(account for accounts in found.values() for account in accounts)
        others = [
            use
            for use, accounts in found.items()
            if any(x.is_reached or counts[x] != x.expected for x in accounts)
        ]
        if not others:
            return list(found)
        for use in others:
            del found[use]
