"""The exchange: carries out a plan, so that each rank has its part of all inner products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Columns, Factors
from autogram._distributed.group import Group
from autogram._distributed.plan import Packet, Plan, Slice
from autogram._distributed.share import Data, Share, cut, flat, shaped

_ALIGNED = 16  # bytes, so that each tensor in a buffer can be viewed in its dtype

Places = dict[tuple[int, int | None], tuple[int, int, torch.dtype]]
"""Where tensors begin in a buffer, with their elements and dtype.

By the slot, and the dimension along which it is cut into samples.
"""


class Exchange:
    """One step. An error on this rank is kept, so that all ranks make the same calls to the end.

    Args:
        group: The group.
        data: What this rank has.
        shares: What each rank has.
        device: Where results are put together.

    Attributes:
        error: The first error.
        sent: How many bytes this rank has sent, by the way.
    """

    def __init__(
        self, group: Group, data: Data, shares: Sequence[Share], device: torch.device
    ) -> None:
        self._group = group
        self._data = data
        self._shares = shares
        self._device = device
        self.error: Exception | None = None
        self.sent: dict[str, int] = {"rows": 0, "gathered": 0, "ring": 0}
        starts = [0]
        for share in shares:
            starts.append(starts[-1] + share.m)
        self.starts = starts
        dtype = shares[0].dtype
        for share in shares:
            dtype = torch.promote_types(dtype, share.dtype)
        self._total = torch.zeros(starts[-1], starts[-1], dtype=dtype, device=device)

    def __call__(self, plan: Plan) -> Tensor:
        """The Gramian of all ranks' objectives ``(M, M)``, rank after rank, the same on all."""
        before: Callable[[], None] | None = None
        for bucket in plan.buckets:  # a bucket is contracted while the next one is under way
            following = self.begin(bucket)
            if before is not None:
                before()
            before = following
        if before is not None:
            before()
        own = {name: None for _, packet in plan.packets for name in packet.names}
        self._attempt(self._add_own, list(own))
        for way, packet in plan.packets:
            if way == "gathered":
                self._gather(packet)
            else:
                self._pass_on(packet)
        return self.finish()

    def finish(self) -> Tensor:
        """Adds up what the ranks have computed."""
        self._group.add_up(self._total).wait()
        return (self._total + self._total.mT) / 2

    def _attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function, or ``None`` once something has failed."""
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:
                self.error = error
        return None

    # Rows

    def begin(self, bucket: Sequence[Slice]) -> Callable[[], None]:
        """Begins to exchange rows, and returns what contracts them when they have arrived."""
        world, share = self._group.size, self._data.share
        step = -(-sum(part.elements for part in bucket) // world)
        sent = self._attempt(self._rows, bucket, step)
        if sent is None:
            sent = self._total.new_zeros(world * share.m * step)
        received = sent.new_empty(self.starts[-1] * step)
        sizes = [of.m * step for of in self._shares]
        work = self._group.exchange(sent, received, sizes)
        self.sent["rows"] += share.m * step * (world - 1) * sent.element_size()

        def contract() -> None:
            work.wait()
            assert sent is not None  # it lives until it has left
            self._attempt(self._contract_rows, received.view(-1, step))

        return contract

    def _rows(self, bucket: Sequence[Slice], step: int) -> Tensor:
        """Rows of this rank, slice after slice for each rank, flattened."""
        world, share = self._group.size, self._data.share
        local = self._total.new_zeros(share.m, step * world)
        at = 0
        for part in bucket:
            for number, columns in self._data.columns(part.name):
                rows = columns.slice(part.start, part.stop).flatten(0, 1)
                places = share.places[number].to(self._device)
                local[places, at : at + part.elements] = rows.to(local)
            at += part.elements
        return local.view(share.m, world, step).transpose(0, 1).reshape(-1)

    def _contract_rows(self, rows: Tensor) -> None:
        """Adds the products of a slice of the rows of all objectives."""
        self._total.addmm_(rows, rows.mT)

    # Factors

    def _gather(self, packet: Packet) -> None:
        """Gives the factors of all ranks to all."""
        needs = [_needs(share, packet) for share in self._shares]
        width = max(size for _, size in needs)
        own = self._attempt(self._packed, packet, width)
        if own is None:
            own = torch.zeros(width, dtype=torch.uint8, device=self._device)
        found = [torch.empty_like(own) for _ in self._shares]
        self._group.gather(own, found).wait()
        self.sent["gathered"] += width * (self._group.size - 1)
        for rank, buffer in enumerate(found):
            if rank != self._group.rank:
                self._attempt(self._contract, packet, rank, buffer, 0.5)

    def _pass_on(self, packet: Packet) -> None:
        """Gives the factors of this rank to half of the others: each pair meets once."""
        world, rank = self._group.size, self._group.rank
        sizes = [_needs(share, packet)[1] for share in self._shares]
        own = self._attempt(self._packed, packet, sizes[rank])
        if own is None:
            own = torch.zeros(sizes[rank], dtype=torch.uint8, device=self._device)
        waiting: tuple[int, Tensor] | None = None
        for distance in range(1, world // 2 + 1):
            to, source = (rank + distance) % world, (rank - distance) % world
            # Of two opposite ranks one gets the other's, in turns from packet to packet.
            takes = 2 * distance != world or (rank < source) == (packet.turn == 0)
            gives = 2 * distance != world or not takes
            buffer = own.new_empty(sizes[source]) if takes else None
            works = self._group.shift(own if gives else None, to, buffer, source)
            self.sent["ring"] += len(own) if gives else 0
            if waiting is not None:  # while the next is under way
                self._attempt(self._contract, packet, *waiting, 1.0)
            for work in works:
                work.wait()
            waiting = None if buffer is None else (source, buffer)
        if waiting is not None:
            self._attempt(self._contract, packet, *waiting, 1.0)

    def _packed(self, packet: Packet, size: int) -> Tensor:
        """The factors of this rank, one behind the other."""
        buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        places, _ = _needs(self._data.share, packet)
        for name in packet.names:
            for piece in self._data.share.pieces.get(name, ()):
                samples = packet.samples(self._data.share.sizes[piece.part][1])
                for operand in piece.operands:
                    start, count, dtype = places[operand.slot, operand.sample]
                    found = flat(self._data.tensors[operand.slot], operand, samples)
                    view = buffer[start : start + count * dtype.itemsize].view(dtype)
                    view.copy_(found)
        return buffer

    def _contract(self, packet: Packet, rank: int, buffer: Tensor, weight: float) -> None:
        """Adds the products of this rank's rows with those of another.

        Args:
            packet: What has arrived.
            rank: From whom.
            buffer: The factors.
            weight: What to multiply by, where the other rank adds the same.
        """
        share, own = self._shares[rank], self._data.share
        places, _ = _needs(share, packet)
        before, start = self.starts[self._group.rank], self.starts[rank]
        for name in packet.names:
            for number, columns in self._data.columns(name):
                first = (own.places[number] + before).to(self._device)
                others = self._arrived(packet, name, rank, columns, buffer, places)
                for part, other in others.items():
                    samples = packet.samples(share.sizes[part][1])
                    among = share.places[part].view(share.sizes[part])
                    among = among if samples is None else among[:, samples]
                    product = columns.cross_gram(other) if among.numel() else None
                    if product is None:
                        continue
                    second = (among.flatten() + start).to(self._device)
                    product = product.flatten(0, 1).flatten(1).to(self._total) * weight
                    self._total[first.unsqueeze(1), second] += product
                    self._total[second.unsqueeze(1), first] += product.mT

    def _arrived(
        self, packet: Packet, name: str, rank: int, like: Columns, buffer: Tensor, places: Places
    ) -> dict[int, Columns]:
        """The columns of a parameter of another rank, by part."""
        share = self._shares[rank]
        device = self._data.device_of(name)
        found: dict[int, list[Factors]] = {}
        for piece in share.pieces.get(name, ()):
            samples = packet.samples(share.sizes[piece.part][1])
            operands = []
            for operand in piece.operands:
                start, count, dtype = places[operand.slot, operand.sample]
                elements = buffer[start : start + count * dtype.itemsize].view(dtype)
                operands.append(shaped(elements, operand, samples).to(device))
            factors = Factors(piece.region, piece.equation, tuple(operands))
            found.setdefault(piece.part, []).append(factors)
        return {part: Columns.of(like.parameter, like.kernels, x) for part, x in found.items()}

    def _add_own(self, names: Sequence[str]) -> None:
        """Adds the products of this rank's rows with one another, for some parameters."""
        jacobian, first = self._data.jacobian, self.starts[self._group.rank]
        parameters = [self._data.parameters[name] for name in names]
        product = jacobian._parts.products(jacobian._parts, parameters, jacobian.dtype)
        last = first + len(product)
        self._total[first:last, first:last] += product.to(self._total)


def _needs(share: Share, packet: Packet) -> tuple[Places, int]:
    """Where each tensor is in the buffer of a rank, and the size of the buffer."""
    places: Places = {}
    at = 0
    for name in packet.names:
        for piece in share.pieces.get(name, ()):
            samples = packet.samples(share.sizes[piece.part][1])
            for operand in piece.operands:
                key = operand.slot, operand.sample
                if key not in places:
                    count = cut(operand, samples)[1]
                    places[key] = at, count, operand.dtype
                    at += -(-count * operand.dtype.itemsize // _ALIGNED) * _ALIGNED
    return places, at
