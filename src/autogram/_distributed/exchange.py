"""The exchange: carries out a plan, so that each rank gets its part of all inner products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Columns, Factors, block_of
from autogram._distributed.group import Group
from autogram._distributed.plan import UNDER_WAY, ExchangePlan, Offsets, Packet, Slice
from autogram._distributed.share import Data, Share, flat, shaped

# Instead of an error: data that this rank has sent turned out to be out of date.
_VOID = RuntimeError("void")


class Exchange:
    """One step. It keeps an error of this rank, so that all ranks make the same calls to the end.

    Results are collected on ``device``.

    Attributes:
        shares: The share of each rank.
        is_confirmed: Whether all ranks know that none of them has failed.
        early: Number of buckets that were sent before all columns were complete.
    """

    def __init__(
        self, group: Group, shares: Sequence[Share], plan: ExchangePlan, device: torch.device
    ) -> None:
        self._group = group
        self._own = shares[group.rank]
        self._plan = plan
        self._buckets = list(plan.buckets[::-1])  # not yet sent, the next one last
        self._pending: list[Callable[[], None]] = []
        self._columns: dict[str, list[tuple[int, Columns]]] = {}
        self.shares = shares
        self._device = device
        self._error: BaseException | None = None
        self.early = 0
        self.is_confirmed = False
        self.starts = [0, *accumulate(share.m for share in shares)]
        dtype = reduce(torch.promote_types, [share.dtype for share in shares])
        m = self.starts[-1]
        self._total = torch.zeros(m, m, dtype=dtype, device=device)

    def take(self, name: str, found: list[tuple[int, Columns]]) -> None:
        """Takes the columns of a parameter, and begins to exchange the buckets that are complete.

        All ranks send buckets in the same order. One is contracted while the next are under way.
        """
        self._columns[name] = found
        while self._buckets and all(self._has(part.name) for part in self._buckets[-1]):
            self._add_pending(self._exchange(self._buckets.pop()))
            self.early += 1

    def __call__(self, data: Data | None) -> Tensor:
        """The Gramian of all ranks' objectives ``(M, M)``, rank after rank, equal on all ranks.

        Args:
            data: Data of this rank, or ``None`` if it failed or sent wrong data.
        """
        if data is None and self._error is None:
            self._error = _VOID
        if data is not None:
            self._columns = {name: list(data.columns(name)) for name in self._plan.ways}
        while self._buckets:
            self._add_pending(self._exchange(self._buckets.pop()))
        for packet in self._plan.packets:
            self._add_pending(self._pass_on(packet, data))
        names = [name for name, way in self._plan.ways.items() if way == "ring"]
        self._attempt(self._add_own, data, names)  # while the last packets are under way
        while self._pending:
            self._pending.pop(0)()
        self._group.add_up(self._total).wait()
        return (self._total + self._total.mT) / 2

    def fits(self, share: Share) -> bool:
        """Whether this rank has the share for which the exchange was planned."""
        return share.digest == self._own.digest

    @property
    def failure(self) -> BaseException | None:
        """The error of this rank, if any."""
        return None if self._error is _VOID else self._error

    def _has(self, name: str) -> bool:
        """Whether this rank's columns of a parameter are complete."""
        return name in self._columns or name not in self._own.pieces

    def _add_pending(self, contract: Callable[[], None]) -> None:
        """Queues an exchange that has begun, and contracts the oldest if too many are under way."""
        self._pending.append(contract)
        while len(self._pending) > UNDER_WAY:
            self._pending.pop(0)()

    def _attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function, or ``None`` once something has failed."""
        if self._error is None:
            try:
                return function(*args)
            except BaseException as error:
                self._error = error
        return None

    # Rows

    def _exchange(self, bucket: Sequence[Slice]) -> Callable[[], None]:
        """Begins to exchange rows; returns a function that waits for them and contracts them."""
        world, share = self._group.size, self._own
        step = -(-sum(part.elements for part in bucket) // world)
        sent = self._attempt(self._rows, bucket, step)
        if sent is None:
            sent = self._total.new_zeros(world * share.m * step)
        received = sent.new_empty(self.starts[-1] * step)
        sizes = [of.m * step for of in self.shares]
        work = self._group.exchange(sent, received, sizes)

        def contract() -> None:
            work.wait()
            assert sent is not None  # keeps it alive until it is sent
            rows = received.view(-1, step)  # of all objectives, in a slice of the parameters
            self._attempt(self._total.addmm_, rows, rows.mT)

        return contract

    def _rows(self, bucket: Sequence[Slice], step: int) -> Tensor:
        """Rows of this rank, slice after slice for each rank, flattened."""
        world, share = self._group.size, self._own
        local = self._total.new_zeros(share.m, step * world)
        at = 0
        for part in bucket:
            for number, columns in self._columns.get(part.name, ()):
                rows = columns.slice(part.start, part.stop).flatten(0, 1)
                numbers = share.numbers[number].flatten().to(self._device)
                local[numbers, at : at + part.elements] = rows.to(local)
            at += part.elements
        return local.view(share.m, world, step).transpose(0, 1).reshape(-1)

    # Factors

    def _pass_on(self, packet: Packet, data: Data | None) -> Callable[[], None]:
        """Begins to send factors to half of the ranks; the result contracts factors of others.

        Each pair of ranks meets once.
        """
        world, rank = self._group.size, self._group.rank
        sizes = [packet.places_in(share)[1] for share in self.shares]
        sent = torch.zeros(sizes[rank], dtype=torch.uint8, device=self._device)
        self._attempt(self._pack, sent, data, packet)
        to: list[int] = []
        received: dict[int, Tensor] = {}
        for distance in range(1, world // 2 + 1):
            source = (rank - distance) % world
            # Of two opposite ranks, one gets the other's factors, in turns from packet to packet.
            takes = 2 * distance != world or (rank < source) == (packet.turn == 0)
            if takes:
                received[source] = sent.new_empty(sizes[source])
            if 2 * distance != world or not takes:
                to.append((rank + distance) % world)
        works = self._group.pass_on(sent, to, received)

        def contract() -> None:
            for work in works:
                work.wait()
            assert len(sent) == sizes[rank]  # keeps it alive until it is sent
            while received:
                self._attempt(self._contract, data, packet, *received.popitem())

        return contract

    def _pack(self, buffer: Tensor, data: Data, packet: Packet) -> None:
        """Writes the factors of this rank into a buffer, one after the other."""
        places, _ = packet.places_in(data.share)
        for where, operand, samples in places.values():
            elements = flat(data.tensors[operand.slot], operand, samples)
            buffer[where].view(operand.dtype).copy_(elements)

    def _contract(self, data: Data, packet: Packet, rank: int, buffer: Tensor) -> None:
        """Adds the products of this rank's rows with those of another, whose factors are here."""
        share, own = self.shares[rank], data.share
        places, _ = packet.places_in(share)
        before, start = self.starts[self._group.rank], self.starts[rank]
        for name in packet.names:
            for number, columns in data.columns(name):
                first = (own.numbers[number].flatten() + before).to(self._device)
                others = self._arrived(data, name, rank, columns, buffer, places)
                for part, other in others.items():
                    samples = packet.samples(share.sizes[part][1])
                    among = share.numbers[part][:, samples]
                    product = columns.cross_gram(other) if among.numel() else None
                    if product is None:
                        continue
                    second = (among.flatten() + start).to(self._device)
                    product = product.flatten(0, 1).flatten(1).to(self._total)
                    self._total[first.unsqueeze(1), second] += product
                    self._total[second.unsqueeze(1), first] += product.mT

    def _arrived(
        self, data: Data, name: str, rank: int, like: Columns, buffer: Tensor, places: Offsets
    ) -> dict[int, Columns]:
        """The columns of another rank's parameter, by part."""
        device = data.device_of(name)
        factors: dict[int, list[Factors]] = {}
        for piece in self.shares[rank].pieces.get(name, ()):
            operands = []
            for operand in piece.operands:
                where, _, samples = places[operand.slot, operand.sample]
                elements = buffer[where].view(operand.dtype)
                operands.append(shaped(elements, operand, samples).to(device))
            block = block_of(piece.equation, tuple(operands))
            factors.setdefault(piece.part, []).append((piece.region, block))
        return {part: Columns.of(like.parameter, like.kernels, x) for part, x in factors.items()}

    def _add_own(self, data: Data, names: Sequence[str]) -> None:
        """Adds the products of this rank's rows with one another, for some parameters."""
        jacobian, first = data.jacobian, self.starts[self._group.rank]
        parameters = [data.parameters[name] for name in names]
        product = jacobian._parts.products(jacobian._parts, parameters, jacobian.dtype)
        last = first + len(product)
        self._total[first:last, first:last] += product.to(self._total)
