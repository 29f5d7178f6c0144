"""A chorus: all ranks make equally many passes, where each pass gathers parameters from all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autogram._distributed.agreement import Agreement
from autogram._distributed.group import Group
from autogram._errors import RankError

_DONE, _PASS, _FAILED = range(3)


class Chorus:
    """Lets ranks vote before each pass, until all of them are done.

    How many passes a rank makes depends on what it knows: where the samples lie, whether a check
    is due. A rank that is done goes along with the passes of others.

    Args:
        group: The ranks.
        agreement: Raises errors of one rank on all.
    """

    def __init__(self, group: Group, agreement: Agreement) -> None:
        self._group = group
        self._agreement = agreement
        self._is_open = False
        self.passes = 0
        """How many passes this rank has gone along with."""

    def before_pass(self) -> None:
        """Waits until all ranks are ready for a pass.

        Raises:
            RankError: A rank has failed.
        """
        if self._is_open:
            self._vote(_PASS)

    @contextmanager
    def call(self, go_along: Callable[[], None]) -> Iterator[None]:
        """One call of an engine, on all ranks.

        Args:
            go_along: Makes a pass whose result nobody needs.

        Raises:
            RankError: A rank has failed.
        """
        if self._is_open:
            yield
            return
        self._is_open = True
        try:
            yield
            while self._vote(_DONE):
                self.passes += 1
                go_along()
        except RankError:
            raise
        except Exception as error:
            self._vote(_FAILED, error)
        finally:
            self._is_open = False

    def _vote(self, vote: int, error: Exception | None = None) -> bool:
        """Whether some rank makes a pass now."""
        votes = [vote for (vote,) in self._group.gather_numbers(vote)]
        if _FAILED in votes:
            self._agreement.confirm(error)
        return _PASS in votes
