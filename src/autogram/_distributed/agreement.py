"""Agreement: ranks share what they know before they exchange data, and raise errors together.

Where passes gather parameters from all ranks, all ranks make equally many passes. Each message
begins with the rank's call, so that ranks out of step notice it before they exchange anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from functools import partial
from struct import Struct

from autogram._containers import Latest
from autogram._distributed.group import Group
from autogram._distributed.share import Share
from autogram._distributed.signals import held
from autogram._undo import undone
from autogram.errors import RankError, listed

_DONE, _PASS = range(2)
_NUMBERS = 2  # numbers in each message
_UNKNOWN = (-2, -2)
_MOST = 64  # remembered steps of different shapes
_NUMBER, _INTEGER = Struct("=d"), Struct("=q")  # of equally many bits

# The methods of engines in which ranks meet.
CALLS = ("jacobian", "verify", "compute_gramian", "weights", "backward", "accumulate")


class _Stage(IntEnum):
    """Subjects of the ranks' messages."""

    FORESEEN = auto()
    SHARES = auto()
    HOLDS = auto()
    CONFIRM = auto()
    READY = auto()
    VOTE = auto()
    END = auto()


Digests = tuple[tuple[int, ...], ...]


class Agreement:
    """Knowledge that the ranks of a group share, equal on all of them at each step.

    Each method takes this rank's error, if it failed. If a rank failed, or ranks are in different
    calls, all ranks raise a `RankError`. An interrupted rank raises its interrupt.

    Attributes:
        calls: How often the ranks have reported success or failure to one another.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known = Latest[Digests, list[Share]](_MOST)
        self._is_in_call = False
        self._kind = self._number = 0  # kind and number of this rank's call
        self.calls = 0

    def begin(self, kind: str) -> None:
        """Begins a call of an engine method in which the ranks communicate."""
        self._kind, self._number = CALLS.index(kind), self._number + 1

    def shares(self, own: Share | None, error: BaseException | None) -> list[Share]:
        """The share of each rank. Shapes that all ranks have seen together are sent as a hash.

        Raises:
            RankError: A rank has failed, or the ranks have different parameters.
        """
        digests = self._digests(_Stage.SHARES, own, error)
        shares = self._known.get(digests)
        if shares is None:
            shares = self._group.gather_objects(own)
            _compare(shares)
        self._known[digests] = shares
        return shares

    def foreseen(self, own: Share | None, error: BaseException | None) -> list[Share] | None:
        """Each rank's next share, if all ranks foresee theirs, and had these together before."""
        return self._known.get(self._digests(_Stage.FORESEEN, own, error))

    def holds(self, is_right: bool, error: BaseException | None) -> bool:
        """Whether all ranks had the shares that they foresaw."""
        return (0,) not in self._told(_Stage.HOLDS, error, int(is_right))

    def is_ready(self, error: BaseException | None, may_fail: bool) -> bool:
        """Whether the last part may fail on some rank, so that all have to wait for its end."""
        return (1,) in self._told(_Stage.READY, error, int(may_fail))

    def end(self, error: BaseException | None) -> None:
        """Waits until all ranks have reached the end of a call."""
        self._told(_Stage.END, error)

    def confirm(self, error: BaseException | None, scale: float = 0.0, wrapped: int = 0) -> None:
        """Waits until all ranks have reached this point.

        Args:
            error: This rank's error, if it failed.
            scale: The scale of this rank's losses, or zero without a gradient scaler.
            wrapped: Number of parameters whose gradients are exchanged by wrappers of this rank.

        Raises:
            RankError: A rank has failed, or the ranks have different scales or wrappers.
        """
        (bits,) = _INTEGER.unpack(_NUMBER.pack(scale))
        told = self._told(_Stage.CONFIRM, error, bits, wrapped)
        _compare_scales([bits for bits, _ in told])
        _compare_wrapped([wrapped for _, wrapped in told])

    def before_pass(self) -> None:
        """Waits until all ranks are ready for a pass, or raises if one has failed."""
        if self._is_in_call:
            self._told(_Stage.VOTE, None, _PASS)

    @contextmanager
    def passes(self, go_along: Callable[[], None], kind: str | None = None) -> Iterator[None]:
        """A block in which all ranks make equally many passes. Interrupts wait for its end.

        A rank knows by itself how many passes it needs: to locate samples, or for a check that is
        due. Ranks vote before each pass. A rank that is done joins the passes of others, with a
        function that makes a pass whose result nobody needs. The block is a separate call if
        it has a ``kind`` and is not inside of another call.

        Raises:
            RankError: A rank has failed.
        """
        if self._is_in_call:
            yield
            return
        if kind is not None:
            self.begin(kind)
        with held(), undone(partial(setattr, self, "_is_in_call", False)):
            self._is_in_call = True
            try:
                yield
                while (_PASS,) in self._told(_Stage.VOTE, None, _DONE):
                    go_along()
            except RankError:
                raise
            except BaseException as error:
                self._told(_Stage.VOTE, error, _DONE)  # raises

    def _digests(self, stage: _Stage, own: Share | None, error: BaseException | None) -> Digests:
        """A hash of each rank's share."""
        return self._told(stage, error, *(_UNKNOWN if own is None else own.digest))

    def _told(self, stage: _Stage, error: BaseException | None, *numbers: int) -> Digests:
        """Some numbers of each rank. If some ranks failed, all raise what happened there.

        All messages have the same length, so that ranks out of step can read them.
        """
        self.calls += 1
        rest = (0,) * (_NUMBERS - len(numbers))
        numbers_of_rank = int(error is not None), self._kind, self._number, stage, *numbers, *rest
        rows = self._group.gather_numbers(*numbers_of_rank)
        calls = [(kind, number, stage) for _, kind, number, stage, *_ in rows]
        self._number = max(number for _, number, _ in calls)
        if any(has_failed for has_failed, *_ in rows):
            self._raise_of_all(error)
        _compare_calls(calls)
        return tuple(tuple(row[-_NUMBERS:][: len(numbers)]) for row in rows)

    def _raise_of_all(self, error: BaseException | None) -> None:
        """Raises on all ranks what happened on some of them."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts: list[str | None] = self._group.gather_objects(text)
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt, or the end of the process
        ranks = [rank for rank, said in enumerate(texts) if said is not None]
        said = texts[ranks[0]]
        others = f" (and {len(ranks) - 1} other ranks)" if len(ranks) > 1 else ""
        raise RankError(
            f"The step failed on rank {ranks[0]}{others}, and all ranks raise this error, so that "
            "none of them waits for another. Correct the error of that rank, or skip the step on "
            f"all ranks; the next one works. Rank {ranks[0]} says: {said}",
            ranks=ranks,
        ) from error


def _compare_calls(calls: Sequence[tuple[int, int, int]]) -> None:
    """Refuses ranks that are in different calls, or at different points of one call."""
    ranks = [rank for rank, call in enumerate(calls) if call != calls[0]]
    if ranks:
        first, other = (
            f"in the middle of `engine.{CALLS[kind]}`, their call number {number}"
            for kind, number, _ in (calls[0], calls[ranks[0]])
        )
        raise RankError(
            f"The ranks are out of step: rank 0 is {first}, and rank {ranks[0]} {other}. All ranks "
            "raise this error, and nothing was exchanged. Call the same methods of the engine in "
            "the same order on all ranks, also with several engines; a rank that leaves out "
            "a step, or ends its loop sooner, makes the others wait. The next call works.",
            ranks=ranks,
        )


def _compare(shares: Sequence[Share]) -> None:
    """Refuses ranks with different parameters."""
    first = dict(shares[0].parameters)
    for rank, share in enumerate(shares):
        regions = dict(share.parameters)
        missing = [f"`{name}`" for name in first if name not in regions]
        further = [f"`{name}`" for name in regions if name not in first]
        if missing or further:
            has = f"lacks {listed(missing)}" if missing else f"has {listed(further)} as well"
            raise RankError(
                f"Rank {rank} {has}, compared with the trainable parameters of rank 0. Make the "
                "same model on all ranks, with the same parameters frozen, and pass the same "
                "modules to `Engine`.",
                ranks=[rank],
            )
        for name, region in regions.items():
            other = first[name]
            if region != other:
                raise RankError(
                    f"`{name}` has shape {region.shape} and strides {region.strides} on rank "
                    f"{rank}, and {other.shape} and {other.strides} on rank 0. Make the same model "
                    "on all ranks.",
                    ranks=[rank],
                )


def _compare_wrapped(counts: Sequence[int]) -> None:
    """Refuses ranks if some would wait for wrappers that others would not call."""
    ranks = [rank for rank, count in enumerate(counts) if count < max(counts)]
    if ranks:
        raise RankError(
            f"The losses of rank {ranks[0]} do not come from a `DistributedDataParallel` that "
            f"those of rank {counts.index(max(counts))} come from, which would wait for that rank. "
            "Call the wrapped model on all ranks, even without samples: `model(x[:0])`.",
            ranks=ranks,
        )


def _compare_scales(bits: Sequence[int]) -> None:
    """Refuses ranks whose losses have different scales; ``bits`` are those of the scales."""
    ranks = [rank for rank, of_rank in enumerate(bits) if of_rank != bits[0]]
    if ranks:
        numbers = [_NUMBER.unpack(_INTEGER.pack(of_rank))[0] for of_rank in bits]
        scales = [f"the scale {number:g}" if number else "no scale" for number in numbers]
        raise RankError(
            f"The losses have {scales[0]} on rank 0, and {scales[ranks[0]]} on rank {ranks[0]}. "
            "Pass a gradient scaler to the engine on all ranks, made with the same options or from "
            "the same `state_dict`, and call its `step` and `update` on all ranks in the same "
            "steps.",
            ranks=ranks,
        )
