"""Accounts: the blocks that have arrived for each parameter and each derived tensor."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import Tensor

from autogram._blocks import Columns, Region
from autogram._capture.backward.run import Run
from autogram._capture.tracked import Tracked
from autogram._capture.uses import Use
from autogram.errors import UnsupportedError


@dataclass(eq=False, slots=True)
class Account:
    """The blocks that have arrived for a parameter, or for a tensor derived from parameters."""

    owner: Tensor | Tracked
    columns: Columns | None
    """The blocks that have arrived; ``None`` once they are complete and taken."""
    expected: int = 0
    """Number of uses and derived tensors that have not arrived yet."""


class Accounts(dict["Tensor | Tracked", Account]):
    """The accounts of parameters and derived tensors, opened when first asked for.

    Asking for an account means that a use or a block has arrived: open accounts have columns.
    A region of a parameter has the parameter's account. The ``uses`` are expected to arrive.
    """

    def __init__(self, run: Run, uses: Iterable[Use]) -> None:
        super().__init__()
        self._run = run
        # Readers by the `id` of an owner without an account; the uses keep the owner alive.
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

    def read_by(self, use: Use, uses: AbstractSet[Use]) -> list[Tensor] | None:
        """The parameters of a use, if only some uses read them, and none was moved since."""
        owners: dict[int, Tensor] = {}
        for tracked in use.reads:
            place, parameter = tracked.place, tracked.sources[0]
            readers = self._readers.get(id(parameter))
            if readers is None or tracked.region is None or not uses >= set(readers):
                return None
            now = parameter.storage_offset(), parameter.shape, parameter.stride()
            if place is not None and (place.offset, place.shape, place.strides) != now:
                return None
            owners[id(parameter)] = parameter
        return list(owners.values())

    def closed(self, uses: Iterable[Use]) -> set[Use]:
        """The uses among some that share no owner with uses outside of them."""
        closed = set(uses)
        while others := {use for use in closed if self.read_by(use, closed) is None}:
            closed -= others
        return closed

    def __missing__(self, owner: Tensor | Tracked) -> Account:
        if isinstance(owner, Tracked) and owner.region is not None:
            (parameter,) = owner.sources
            account = self[owner] = self[parameter]
            if account.columns is not None and owner.place not in (None, account.columns.parameter):
                name = self._run.channel.parameters([parameter]).get(parameter)
                # The region tells where the elements were.
                raise UnsupportedError(
                    f"`{name}` was moved in memory after the forward pass, to another memory "
                    "format or a buffer. Compute the losses again, with the parameter at its new "
                    "place."
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
