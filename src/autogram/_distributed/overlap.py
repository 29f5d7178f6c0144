"""Overlap: sends rows, bucket by bucket, while the backward pass goes on.

A rank that has seen the same graph before foresees its share. If all ranks do, the plan
is known before the pass. If a rank turns out to have another share, all ranks exchange again.
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
"""For each graph, a rank's last share, and how often the share has changed."""

_ERRORS = 3  # so many changes, and a graph's share is no longer foreseen


@dataclass(eq=False)
class Overlap:
    """A listener to one pass. It sends what is complete."""

    agreement: Agreement
    foresight: Foresight  # of this rank
    channel: Channel
    kind: str  # purpose of the pass, on which the kept tensors depend
    start: Callable[[Sequence[Share], torch.device], Exchange]  # begins an exchange on a device
    key: tuple[str, Hashable] | None = None  # of the graph, set once the others were asked
    exchange: Exchange | None = None  # under way, if all ranks foresee their shares
    _passes: int = 0
    _names: Mapping[Tensor, str] = field(default_factory=dict)

    def begin(
        self, key: Hashable, device: torch.device, error: BaseException | None = None
    ) -> None:
        """Asks the other ranks what they foresee, before the first pass or where there was none.

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
        """Notes this rank's share. One that changes repeatedly is no longer foreseen."""
        known, errors = self.foresight.get(self.key, (share, 0))
        self.foresight[self.key] = share, errors + (known.digest != share.digest)

    def restart(self, objectives: object) -> None:
        """Notes that a pass begins."""
        del objectives
        self._passes += 1

    def take(self, parameter: Tensor, columns: Columns) -> None:
        """Takes the complete columns of a parameter."""
        name = self._names.get(parameter)
        if self.exchange is not None and self._passes == 1 and name is not None:
            with held():
                self.exchange.take(name, [(0, columns)] if columns.dtype is not None else [])

    def finish(self, data: Data | None, error: BaseException | None) -> Tensor | None:
        """The Gramian of all ranks, or ``None`` if some rank's share was not the foreseen one."""
        exchange = self.exchange
        assert exchange is not None
        is_right = data is not None and self._passes <= 1 and exchange.fits(data.share)
        total = exchange(data if is_right else None)
        failure = error if error is not None else exchange.failure
        exchange.is_confirmed = self.agreement.holds(is_right, failure)
        return total if exchange.is_confirmed else None
