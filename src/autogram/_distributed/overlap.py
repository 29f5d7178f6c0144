"""Overlap: rows leave bucket by bucket while the backward pass goes on.

A rank that has seen the same graph before foresees what it will have. Where all ranks do, the plan
is known before the pass. If a rank turns out to have something else, all of them exchange again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autogram._blocks import Columns
from autogram._capture.recording import Channel
from autogram._containers import Latest
from autogram._distributed.agreement import Agreement
from autogram._distributed.exchange import Exchange
from autogram._distributed.share import Data, Share
from autogram._distributed.signals import held

Foresight = Latest[Hashable, tuple[Share, int]]
"""What a rank had last behind a graph, and how often that was not what it had before."""

_ERRORS = 3  # after which a graph does not tell what a rank will have


@dataclass(eq=False)
class Overlap:
    """A listener to one pass, which sends what is complete."""

    agreement: Agreement
    foresight: Foresight  # of this rank
    channel: Channel
    kind: str  # what the pass is for, as what is kept depends on it
    start: Callable[[Sequence[Share], torch.device], Exchange]  # for tensors on a device
    key: tuple[str, Hashable] | None = None  # that of the graph, once the others were asked
    exchange: Exchange | None = None  # goes on, if all ranks have foreseen what they have
    _passes: int = 0
    _names: Mapping[Tensor, str] = field(default_factory=dict)

    def begin(
        self, key: Hashable, device: torch.device, error: BaseException | None = None
    ) -> None:
        """Asks the other ranks what they foresee, before the first pass, or behind a missing one.

        A second attempt, with less memory, asks nobody.
        """
        if self.key is not None:
            return
        with held():
            self.key = self.kind, key
            share, errors = self.foresight.get(self.key, (None, 0))
            own = share if errors < _ERRORS else None
            shares = self.agreement.foreseen(own, error)
            if shares is not None:
                self._names = self.channel.parameters()
                self.exchange = self.start(shares, device)

    def learn(self, share: Share) -> None:
        """Notes what this rank had. What differs from time to time is not foreseen any more."""
        known, errors = self.foresight.get(self.key, (share, 0))
        self.foresight[self.key] = share, errors + (known.digest != share.digest)

    def restart(self, objectives: object) -> None:
        """Notes that a pass begins."""
        del objectives
        self._passes += 1

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Takes the columns of a parameter, which are complete."""
        name = self._names.get(parameter)
        if self.exchange is not None and self._passes == 1 and name is not None:
            with held():
                self.exchange.take(name, [(0, columns)] if columns.dtype is not None else [])

    def finish(self, data: Data | None, error: BaseException | None) -> Tensor | None:
        """The Gramian of all ranks, or ``None`` if they did not have what they have foreseen."""
        exchange = self.exchange
        assert exchange is not None
        is_right = data is not None and self._passes <= 1 and exchange.fits(data.share)
        total = exchange(data if is_right else None)
        failure = error if error is not None else exchange.failure
        exchange.is_confirmed = self.agreement.holds(is_right, failure)
        return total if exchange.is_confirmed else None
