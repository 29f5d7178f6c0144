"""Recordings: what remains of a recorded forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from autogram._capture.tracked import Tracked

# Called with the use, the tensors that its tap saved, and the cotangent (k, *output).
Receiver = Callable[[Any, tuple[Tensor, ...], Tensor], None]


class Channel:
    """What an engine and the taps of its graphs share.

    Attributes:
        anchor: An input of every tap, whose gradient is never produced. Differentiating with
            respect to it visits exactly the taps that the losses depend on.
        receive: Who is shown the cotangents, while a driver runs.
        hidden: The size of the leading dimension that a batched pass hides, or ``None``.
        is_blocked: Whether taps stop the backward pass, so that what lies between a tensor and
            the nearest taps can be differentiated alone.
        recordings: Those whose graph is still alive.
    """

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.receive: Receiver | None = None
        self.hidden: int | None = None
        self.is_blocked = False
        self.recordings: WeakSet[Recording] = WeakSet()

    @contextmanager
    def visiting(self, receive: Receiver, hidden: int | None = None) -> Iterator[None]:
        """Shows cotangents to ``receive``."""
        before = self.receive, self.hidden
        self.receive, self.hidden = receive, hidden
        try:
            yield
        finally:
            self.receive, self.hidden = before

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Stops backward passes at the taps."""
        before = self.is_blocked
        self.is_blocked = True
        try:
            yield
        finally:
            self.is_blocked = before


@dataclass(eq=False)
class Recording:
    """What remains of one recorded forward pass. The taps of its graph keep it alive."""

    channel: Channel
    names: dict[Tensor, str]
    """The parameters of the modules, by tensor."""
    uses: dict[Tensor, int] = field(default_factory=dict)
    """How many uses each parameter had, directly or through derived tensors."""
    count: int = 0
    is_batchable: bool = True
    """Whether a backward pass through it may be batched."""
    structure: int = 0
    """A hash of the recorded calls: functions and flags."""
    signature: int = 0
    """The same, with the shapes of outputs."""

    def add(self, tracked: Tracked) -> None:
        """Counts one more use of a tracked tensor."""
        tracked.uses += 1
        for source in tracked.sources:
            self.uses[source] = self.uses.get(source, 0) + 1
