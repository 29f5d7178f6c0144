"""Agreement: what all ranks know before they exchange data, and errors that all of them raise.

Where passes gather parameters from all ranks, all make equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from struct import Struct

from autogram._containers import Latest
from autogram._distributed.group import Group
from autogram._distributed.share import Share
from autogram._errors import RankError, listed

_DONE, _PASS = range(2)
_UNKNOWN = (-2, -2)
_MOST = 64  # steps of different shapes that are remembered
_NUMBER, _INTEGER = Struct("=d"), Struct("=q")  # of the same bits

Digests = tuple[tuple[int, ...], ...]


class Agreement:
    """What the ranks of a group know of one another. The same on all of them, at each step.

    Each method takes the error of this rank, if it has failed. If a rank has failed, all raise a
    `RankError`.

    Attributes:
        calls: How often the ranks have told one another that all is well, or not.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known = Latest[Digests, list[Share]](_MOST)
        self._is_in_call = False
        self.calls = 0

    def shares(self, own: Share | None, error: BaseException | None) -> list[Share]:
        """What each rank has. Shapes that all ranks have seen together are told by a hash.

        Raises:
            RankError: A rank has failed, or the ranks have different parameters.
        """
        digests = self._digests(own, error)
        found = self._known.get(digests)
        if found is None:
            found = self._group.gather_objects(own)
            _compare(found)
        self._known[digests] = found
        return found

    def foreseen(self, own: Share | None, error: BaseException | None) -> list[Share] | None:
        """What each rank will have, if all of them foresee it, and had it together before."""
        return self._known.get(self._digests(own, error))

    def holds(self, is_right: bool, error: BaseException | None) -> bool:
        """Whether all ranks had what they have foreseen."""
        return (0,) not in self._told(error, int(is_right))

    def confirm(self, error: BaseException | None, scale: float = 0.0, wrapped: int = 0) -> None:
        """Waits until all ranks have come here.

        Args:
            error: Why this rank has failed, if it has.
            scale: That of this rank's losses, or zero without a gradient scaler.
            wrapped: How many parameters have gradients that wrappers of this rank exchange.

        Raises:
            RankError: A rank has failed, or the ranks have different scales or wrappers.
        """
        (bits,) = _INTEGER.unpack(_NUMBER.pack(scale))
        found = self._told(error, bits, wrapped)
        _compare_scales([bits for bits, _ in found])
        _compare_wrapped([wrapped for _, wrapped in found])

    def before_pass(self) -> None:
        """Waits until all ranks are ready for a pass, or raises if one has failed."""
        if self._is_in_call:
            self._told(None, _PASS)

    @contextmanager
    def call(self, go_along: Callable[[], None]) -> Iterator[None]:
        """One call of an engine, in which all ranks make equally many passes.

        How many a rank makes depends on what it knows: where the samples lie, whether a check is
        due. Ranks vote before each pass. A rank that is done goes along with the passes of others,
        by a function that makes a pass whose result nobody needs.

        Raises:
            RankError: A rank has failed.
        """
        if self._is_in_call:
            yield
            return
        self._is_in_call = True
        try:
            yield
            while (_PASS,) in self._told(None, _DONE):
                go_along()
        except RankError:
            raise
        except Exception as error:
            self._told(error, _DONE)  # raises
        finally:
            self._is_in_call = False

    def _digests(self, own: Share | None, error: BaseException | None) -> Digests:
        """What each rank has, by a hash."""
        return self._told(error, *(_UNKNOWN if own is None else own.digest))

    def _told(self, error: BaseException | None, *numbers: int) -> Digests:
        """Some numbers of each rank. If some have failed, all ranks raise what happened there."""
        self.calls += 1
        found = self._group.gather_numbers(int(error is not None), *numbers)
        if not any(has_failed for has_failed, *_ in found):
            return tuple(tuple(numbers) for _, *numbers in found)
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts: list[str | None] = self._group.gather_objects(text)
        ranks = [rank for rank, said in enumerate(texts) if said is not None]
        said = texts[ranks[0]]
        others = f" (and {len(ranks) - 1} other ranks)" if len(ranks) > 1 else ""
        raise RankError(
            f"The step failed on rank {ranks[0]}{others}, and all ranks raise this error, so that "
            "none of them waits for another. Correct what that rank says, or skip the step on all "
            f"ranks; the next one works. Rank {ranks[0]} says: {said}",
            ranks=ranks,
        ) from error


def _compare(shares: Sequence[Share]) -> None:
    """Refuses ranks with different parameters."""
    first = dict(shares[0].parameters)
    for rank, share in enumerate(shares):
        own = dict(share.parameters)
        missing = [f"`{name}`" for name in first if name not in own]
        further = [f"`{name}`" for name in own if name not in first]
        if missing or further:
            has = f"lacks {listed(missing)}" if missing else f"has {listed(further)} as well"
            raise RankError(
                f"Rank {rank} {has}, compared with the trainable parameters of rank 0. Make the "
                "same model on all ranks, with the same parameters frozen, and give the same "
                "modules to `Engine`.",
                ranks=[rank],
            )
        for name, region in own.items():
            other = first[name]
            if region != other:
                raise RankError(
                    f"`{name}` has shape {region.shape} and strides {region.strides} on rank "
                    f"{rank}, and {other.shape} and {other.strides} on rank 0. Make the same model "
                    "on all ranks.",
                    ranks=[rank],
                )


def _compare_wrapped(counts: Sequence[int]) -> None:
    """Refuses ranks of which some would wait for wrappers, and others would not call these."""
    ranks = [rank for rank, count in enumerate(counts) if count < max(counts)]
    if ranks:
        raise RankError(
            f"The losses of rank {ranks[0]} do not come from a `DistributedDataParallel` that "
            f"those of rank {counts.index(max(counts))} come from, which would wait for that rank. "
            "Call the wrapped model on all ranks; one without samples passes none: `model(x[:0])`.",
            ranks=ranks,
        )


def _compare_scales(bits: Sequence[int]) -> None:
    """Refuses ranks whose losses have different scales, which are given by their bits."""
    ranks = [rank for rank, of_rank in enumerate(bits) if of_rank != bits[0]]
    if ranks:
        numbers = [_NUMBER.unpack(_INTEGER.pack(of_rank))[0] for of_rank in bits]
        scales = [f"the scale {number:g}" if number else "no scale" for number in numbers]
        raise RankError(
            f"The losses have {scales[0]} on rank 0, and {scales[ranks[0]]} on rank {ranks[0]}. "
            "Give a gradient scaler to the engine on all ranks, made with the same options or from "
            "the same `state_dict`, and call its `step` and `update` on all ranks in the same "
            "steps.",
            ranks=ranks,
        )
