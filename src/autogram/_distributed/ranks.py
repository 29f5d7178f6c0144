"""The ranks of an engine: one Gramian, one vector of weights and one gradient for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from autogram._capture.autograd.exact import exact
from autogram._capture.autograd.passes import Pass
from autogram._capture.forward.session import Session
from autogram._capture.recording import Channel
from autogram._capture.shards import Shards
from autogram._containers import Latest
from autogram._distributed.agreement import Agreement
from autogram._distributed.exchange import Exchange
from autogram._distributed.group import Given, Group, Link
from autogram._distributed.overlap import Foresight, Overlap
from autogram._distributed.plan import ExchangePlan, Way, make_plan
from autogram._distributed.share import Data, Share, data_of
from autogram._distributed.signals import held
from autogram._distributed.wrapper import Wrappers
from autogram._jacobian import Jacobian
from autogram._losses import Losses, parts_of
from autogram._undo import undone
from autogram._weights import Weighting
from autogram.errors import InvalidOperandError, RankError

T = TypeVar("T")

_MOST = 64  # remembered plans and graphs


class Ranks:
    """Operations of an engine together with the engines of the other ranks.

    Each method is called on all ranks, in the same order. A function computes this rank's part;
    if it fails, all ranks raise an error.

    Attributes:
        way: The way for all parameters, or ``None`` for the cheapest way of each.
        link: The connection of the ranks, measured once.
        plan: The plan of the last step.
        early: That of the last step's exchange.
        repeated: Number of steps exchanged again, because a rank did not have the foreseen share.
    """

    def __init__(self, given: Given, session: Session, channel: Channel) -> None:
        self.group = Group(given)  # raises its errors before shards get hooks
        self.shards = Shards(session.parameters.roots, session)
        self.agreement = Agreement(self.group)
        self.channel = channel
        if self.shards:  # passes gather parameters from all ranks
            channel.before_pass = self.agreement.before_pass
            channel.shard_of = self.shards.__getitem__
        self.link: Link | None = None
        self.way: Way | None = None
        self.plan: ExchangePlan | None = None
        self.early = 0
        self.repeated = 0
        self._overlap: Overlap | None = None
        self._foresight = Foresight(_MOST)
        self._shares: Sequence[Share] = ()
        self._plans = Latest[tuple[object, ...], ExchangePlan](_MOST)  # by the digests of shares

    def gramian(self, compute: Callable[[], Jacobian]) -> Tensor:
        """The Gramian of all ranks' objectives. ``compute`` gives this rank's Jacobian.

        Raises:
            RankError: A rank has failed, or the ranks have different parameters.
        """
        with held():
            self.agreement.begin("compute_gramian")
            exchange, total = self._exchanged(compute)
            if not exchange.is_confirmed:
                self.agreement.confirm(exchange.failure)
        return total

    def weights(
        self,
        kind: str | None,
        compute: Callable[[], Jacobian],
        weighting: Weighting,
        scale: Callable[[], float],
        wrapped: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The weights of all objectives, which the first rank computes, and the Gramian.

        ``weighting`` gives weights that are checked except for their shape. ``scale`` is called
        after ``compute``. Its result and ``wrapped`` are for :meth:`Agreement.confirm`. ``kind`` is
        that of the call, if it begins here.

        Raises:
            RankError: A rank has failed, or the ranks have different parameters, scales or
                wrappers.
        """
        with held():
            if kind is not None:
                self.agreement.begin(kind)
            exchange, gramian = self._exchanged(compute)
            error, number, weights = exchange.failure, 0.0, gramian.new_empty(len(gramian))

            def weigh() -> tuple[float, Tensor]:
                number = scale()
                is_first = self.group.rank == 0
                return number, self._weights_by(weighting, gramian) if is_first else weights

            if error is None:
                weighed, error = attempted(weigh)
                number, weights = weighed or (number, weights)
            self.agreement.confirm(error, number, wrapped)
            self.group.broadcast(weights)
        return weights, gramian

    def own(self, weights: Tensor) -> Tensor:
        """This rank's part of a vector with an entry for each objective of all ranks.

        Raises:
            InvalidOperandError: It has another shape, or there was no step.
        """
        sizes = [share.m for share in self._shares]
        total = sum(sizes)
        if not sizes or weights.shape != (total,):
            raise InvalidOperandError(
                f"The weights have shape {tuple(weights.shape)}, and the last Gramian had {total} "
                "objectives over all ranks. Pass one weight for each, in the order of the Gramian."
            )
        start = sum(sizes[: self.group.rank])
        return weights[start : start + sizes[self.group.rank]]

    @property
    def reached(self) -> list[str]:
        """The parameters that the losses of any rank reach, in the same order on all ranks."""
        reached: set[str] = set()
        for share in self._shares:
            reached |= share.gradients
        return [name for name, _ in self._shares[0].parameters if name in reached]

    def _weights_by(self, weighting: Weighting, gramian: Tensor) -> Tensor:
        """Calls the weighting, and checks its result."""
        weights = weighting(gramian)
        if weights.shape != gramian.shape[:1]:
            raise InvalidOperandError(
                f"The weighting returned the shape {tuple(weights.shape)} for a Gramian of shape "
                f"{tuple(gramian.shape)}, over the objectives of all ranks. Return one weight for "
                "each of these."
            )
        return weights.to(gramian)

    @contextmanager
    def passing(self, losses: Losses, wrappers: Wrappers, kind: str | None) -> Iterator[None]:
        """A block that makes passes for this rank's losses, together with the other ranks.

        Args:
            losses: The losses.
            wrappers: The wrappers that run the forward passes of the step.
            kind: Purpose of the block, if its Jacobian is exchanged next: rows are then sent while
                its pass goes on.
        """
        channel, overlap = self.channel, None
        if kind is not None and not self.shards:
            overlap = Overlap(self.agreement, self._foresight, channel, kind, self._start)
        with undone(partial(setattr, channel, "listener", None)):
            self._overlap = channel.listener = overlap
            with together(self, losses), wrappers.passing(channel, parts_of(losses)):
                yield

    def _start(self, shares: Sequence[Share], device: torch.device) -> Exchange:
        """Begins to exchange the ranks' data, with a plan that is made once."""
        key = tuple([share.digest for share in shares])
        if (plan := self._plans.get(key)) is None:
            self.link = self.link or self.group.measure(device)
            plan = self._plans[key] = make_plan(shares, self.link, self.way)
        self.plan = plan
        return Exchange(self.group, shares, plan, device)

    def _exchanged(self, compute: Callable[[], Jacobian]) -> tuple[Exchange, Tensor]:
        """The joint result of the ranks, before they know whether one of them failed."""
        data: Data | None = None
        device = torch.device("cpu")
        jacobian, error = attempted(compute)
        if jacobian is not None:
            device = jacobian.device
            with exact(device):
                data, error = attempted(partial(data_of, jacobian))
        overlap, self._overlap = self._overlap, None
        exchange, total = None, None
        with exact(device):
            if overlap is not None:
                overlap.begin(None, device, error)  # if there was no pass
                if (exchange := overlap.exchange) is not None:
                    total = overlap.finish(data, error)
                    self.repeated += total is None
            if exchange is None or total is None:
                shares = self.agreement.shares(None if data is None else data.share, error)
                assert data is not None
                if overlap is not None:
                    overlap.learn(data.share)
                exchange = self._start(shares, device)
                total = exchange(data)
        self._shares, self.early = exchange.shares, exchange.early
        return exchange, total


def attempted(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The result of a function, or its error to report to other ranks. Signals may interrupt it.

    Raises:
        RankError: All ranks raise it.
    """
    try:
        with held(are_held=False):
            return function(), None
    except RankError:
        raise
    except BaseException as error:
        return None, error


def together(
    ranks: Ranks | None, losses: Losses, kind: str | None = None
) -> AbstractContextManager[None]:
    """One engine call in which all ranks make equally many passes, if passes communicate.

    The passes begin at the losses. ``kind`` is that of the call, if it begins here.
    """
    if ranks is None or ranks.channel.before_pass is None:
        return nullcontext()
    return ranks.agreement.passes(partial(_go_along, ranks.channel, losses), kind)


def _go_along(channel: Channel, losses: Losses) -> None:
    """Makes a pass for other ranks' sake, which gathers the parameters that theirs gather."""
    total = torch.cat([x.reshape(-1) for x in parts_of(losses)]).sum()
    ones = torch.ones_like(total)
    Pass(channel, is_alone=True).differentiate(total, [channel.anchor], ones)
