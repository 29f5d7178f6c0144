"""The process group of an engine: a separate one, whose order of calls depends on no wrapper."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch import distributed as dist

from autogram.errors import InvalidOptionError

# To measure a link: the side of a square matrix, elements per rank, and attempts.
_SIDE = 512
_ELEMENTS = 2**17
_ATTEMPTS = 3

# Groups made so far, by the group of all processes; they end with it.
_GROUPS: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

Given = Any
"""A user's choice of processes: ``True``, a `ProcessGroup` or a `DeviceMesh`."""


@dataclass(frozen=True)
class Link:
    """The cost of a connection of two ranks, in multiply-adds that take a rank the same time."""

    element: float  # sending one element of four bytes
    call: float  # beginning and ending one message


class Group:
    """Communication of the processes that compute one Gramian together.

    It makes two groups of these processes: one for tensors, and one on the CPU for agreements,
    so that nobody waits for a device.

    Raises:
        InvalidOptionError: There is no process group, or this process is not in it.
    """

    def __init__(self, given: Given) -> None:
        self.members, outer = _processes_of(given)
        if dist.get_rank() not in self.members:
            raise InvalidOptionError(
                f"`distributed` has the processes {self.members}, and this is {dist.get_rank()}. "
                "Pass a group that contains this process."
            )
        self.members = sorted(self.members)  # PyTorch sorts those of a new group, too
        self.rank, self.size = self.members.index(dist.get_rank()), len(self.members)
        backend, timeout = str(dist.get_backend_config(outer)), _timeout_of(outer)
        self._data = _new(self.members, backend, timeout)
        self._control = self._data
        if "cpu" not in backend:
            self._control = _new(self.members, "gloo", timeout)

    def gather_numbers(self, *numbers: int) -> list[list[int]]:
        """Gathers some integers of each rank, on the CPU."""
        row = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self._control)
        return [x.tolist() for x in rows]

    def gather_objects(self, own: object) -> list[Any]:
        """Gathers an object of each rank."""
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, own, group=self._control)
        return objects

    def add_up(self, tensor: Tensor) -> dist.Work:
        """Begins to replace a tensor by its sum over the ranks, the same on all of them."""
        work: dist.Work = dist.all_reduce(tensor, group=self._data, async_op=True)
        return work

    def broadcast(self, tensor: Tensor, rank: int = 0) -> None:
        """Replaces a tensor by that of one rank."""
        dist.broadcast(tensor, self.members[rank], group=self._data)

    def exchange(self, sent: Tensor, received: Tensor, sizes: Sequence[int]) -> dist.Work:
        """Begins an all-to-all: sends equal parts, and receives parts of the given sizes."""
        split = [len(sent) // self.size] * self.size
        work: dist.Work = dist.all_to_all_single(
            received, sent, list(sizes), split, group=self._data, async_op=True
        )
        return work

    def measure(self, device: torch.device) -> Link:
        """Measures a matrix product and two exchanges; all ranks get the slowest rank's link."""
        square = torch.ones(_SIDE, _SIDE, device=device)
        few, many = (torch.zeros(self.size, n, device=device) for n in (1, _ELEMENTS))

        def seconds(function: Callable[[], Tensor]) -> float:
            times = []
            for _ in range(_ATTEMPTS):
                start = time.perf_counter()
                float(function().view(-1)[0])  # waits for the device
                times.append(time.perf_counter() - start)
            return min(times)

        def exchanged(tensor: Tensor) -> Tensor:
            flat, received = tensor.view(-1), torch.empty_like(tensor).view(-1)
            self.exchange(flat, received, [tensor.shape[1]] * self.size).wait()
            return received

        product = seconds(lambda: square @ square)
        call, whole = (seconds(partial(exchanged, tensor)) for tensor in (few, many))
        sent = _ELEMENTS * max(self.size - 1, 1)
        costs = (product / _SIDE**3, call, max(0.0, whole - call) / sent)
        rows = self.gather_numbers(*[round(x * 1e18) for x in costs])
        multiply_add, call, element = (max(1, *numbers) for numbers in zip(*rows, strict=True))
        return Link(element / multiply_add, call / multiply_add)

    def pass_on(
        self, sent: Tensor, to: Sequence[int], received: Mapping[int, Tensor]
    ) -> list[dist.Work]:
        """Begins to send a tensor to some ranks, and to receive one from each of some others."""
        calls = [dist.P2POp(dist.isend, sent, self.members[rank], self._data) for rank in to]
        for rank, tensor in received.items():
            calls.append(dist.P2POp(dist.irecv, tensor, self.members[rank], self._data))
        calls = [call for call in calls if call.tensor.numel()]
        return list(dist.batch_isend_irecv(calls)) if calls else []


def _processes_of(given: Given) -> tuple[list[int], Any]:
    """The processes that a user chose, and an existing group of all or some of them."""
    is_known = given is True or (
        dist.is_available() and isinstance(given, dist.ProcessGroup | dist.device_mesh.DeviceMesh)
    )
    if not is_known:
        raise InvalidOptionError(
            f"`distributed` is {given!r}. Pass `True` for all processes, a `ProcessGroup` or a "
            "`DeviceMesh` for some, or leave it out if each process is on its own."
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidOptionError(
            "`distributed` is given, but this process is not in a group. Call "
            "`torch.distributed.init_process_group` before the engine is made, or leave out "
            "`distributed`."
        )
    if isinstance(given, dist.device_mesh.DeviceMesh):
        members: list[int] = given.mesh.flatten().tolist()
        return members, given.get_group(0) if dist.get_rank() in members else None
    group = dist.group.WORLD if given is True else given
    return dist.get_process_group_ranks(group), group


def _new(members: list[int], backend: str, timeout: timedelta | None) -> Any:
    """A group of some processes. These alone create it, and all engines of a process share it."""
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    key = tuple(members), backend, timeout
    if key not in groups:
        is_of_some = len(members) < dist.get_world_size()
        groups[key] = dist.new_group(
            members, timeout, backend, use_local_synchronization=is_of_some
        )
    return groups[key]


def _timeout_of(group: Any) -> timedelta | None:
    """How long a group's calls wait for other ranks, if the backend tells."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
