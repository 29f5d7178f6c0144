"""Accounts: the blocks that have arrived, for each parameter and each derived tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from autogram._blocks import Columns, Region
from autogram._capture.backward.run import Run
from autogram._capture.tracked import Tracked
from autogram._errors import UnsupportedError


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


@dataclass(eq=False)
class Accounts(dict["Tensor | Tracked", Account]):
    """The accounts of parameters and derived tensors, opened when first asked for.

    A region of a parameter has the account of the parameter.
    """

    run: Run

    def __missing__(self, owner: Tensor | Tracked) -> Account:
        if isinstance(owner, Tracked) and owner.region is not None:
            (parameter,) = owner.sources
            account = self[owner] = self[parameter]
            assert account.columns is not None
            if owner.place not in (None, account.columns.parameter):
                name = self.run.channel.parameters([parameter]).get(parameter)
                # The region tells where the elements were.
                raise UnsupportedError(
                    f"`{name}` was moved in memory after the forward pass, into another memory "
                    "format or a buffer. Compute the losses again, with the parameter where it is "
                    "now."
                )
            return account
        if isinstance(owner, Tracked):
            region, device = Region.contiguous(owner.shape), owner.device
            for parameter in owner.sources:
                self[parameter].expected += 1
        else:
            region, device = Region.of_parameter(owner), owner.device
        account = self[owner] = Account(owner, Columns(region, self.run.devices.on(device)))
        return account
