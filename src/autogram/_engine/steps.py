"""A step: rows of the losses, one Gramian, one set of weights, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from autogram._arguments import weights_by
from autogram._blocks import Arena, Keep
from autogram._capture.autograd.exact import without_autocast
from autogram._capture.backward.verification import without_hooks
from autogram._capture.distribution import is_exchanged, refuse_gradients
from autogram._distributed import Ranks, Wrappers, accumulate, gradients_of, together
from autogram._engine.hooked import Hooked
from autogram._engine.scale import Scale
from autogram._jacobian import Jacobian, JacobianPart
from autogram._losses import Losses, parts_of


@dataclass(eq=False)
class Step:
    """The backward pass of a step, in which losses are added one after the other."""

    engine: Hooked
    call: str  # of the user
    keep: Keep
    scale: Scale
    arena: Arena | None = None  # where to put rows, if losses are added once
    error: BaseException | None = None  # what has failed on this rank, to be told to the others

    def __post_init__(self) -> None:
        # What runs the forward passes of several ranks, or `None` where no other one waits.
        ranks = self.engine._ranks
        self.wrappers = None if ranks is None else Wrappers(ranks.group)
        self._parts: list[JacobianPart] = []
        self._names: dict[Tensor, str] = {}
        self._empty: Tensor | None = None  # losses without elements
        self._rest: dict[int, tuple[Tensor, Sequence[Tensor], bool]] = {}
        """By part: losses, leaves that are not of J, and whether to keep the graph."""
        self._last: Losses = []  # where a pass for the sake of other ranks begins

    @contextmanager
    def passing(self, losses: Losses) -> Iterator[None]:
        """Lets passes go through what wraps the model around some losses of the step."""
        if self.wrappers is None:
            yield
            return
        ranks, channel = self.engine._ranks, self.engine._channel
        self._last = losses if channel.before_pass is not None else []
        with together(ranks, channel, losses), self.wrappers.passing(channel, parts_of(losses)):
            yield

    def add(self, losses: Tensor, *, retain_graph: bool, is_only: bool = False) -> Tensor:
        """Takes in the rows of some losses.

        Args:
            losses: The objectives. Without any, others may give gradients to the parameters.
            retain_graph: Whether their graph is needed by others. It is kept until the end of the
                step where leaves that are not of J need it.
            is_only: Whether there are no others, so that the Gramian is added up on the way.

        Returns:
            The Gramian ``(m, m)`` of the scaled losses, empty if it was not added up.
        """
        engine = self.engine
        if not losses.numel():
            self._empty = losses
            return losses.new_zeros(0, 0)
        if self.wrappers is None and is_exchanged(engine._channel, losses):
            refuse_gradients(self.call)
        losses = self.scale.of(losses)
        with self.scale.passing():
            run = engine._drivers.run(
                losses,
                form=self.keep,
                arena=self.arena,
                is_step=True,
                retain_graph=retain_graph or engine._channel.before_pass is not None,
                is_summed=is_only and self.wrappers is None,
            )
        outside, names = run.outside, run.names
        if self.wrappers is not None:
            self.wrappers.check_outside(outside)
        if outside:
            self._rest[len(self._parts)] = losses, outside, retain_graph
        self._parts.append(JacobianPart.of(run.objectives, run.columns, names))
        for parameter, name in names.items():
            self._names.setdefault(parameter, name)
        return run.gramian

    def finish(self, gramian: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weighs what was added, and adds Jᵀ w of the scaled losses to ``.grad`` of all leaves.

        The Gramian of the scaled losses may be known.

        Returns:
            The Gramian ``(m, m)`` of the losses, and the weights of all objectives, one by one or
            in the shape of the losses if these were added once. Of several ranks, the Gramian of
            the objectives of all, and the weights of this one's.
        """
        if self.engine._ranks is not None and self.wrappers is not None:
            gramian, weights = self._finish_with_others(self.engine._ranks, self.wrappers)
            with together(self.engine._ranks, self.engine._channel, self._last):
                self._differentiate_rest(weights)
            return self.scale.unscaled(gramian), weights
        jacobian = Jacobian(self._parts, self._names, self.engine._limit)
        gramian = jacobian.gramian() if gramian is None else gramian
        weights = weights_by(self.scale.weighting, gramian)
        gradients = jacobian._gradients_of(weights)
        # A hook on a parameter may take a step of it, which neither factors nor graph would bear.
        self._differentiate_rest(weights)
        jacobian._add(gradients)
        return self.scale.unscaled(gramian), weights

    def _differentiate_rest(self, weights: Tensor) -> None:
        """Lets go of rows, and adds gradients of leaves that are not of J to their ``.grad``."""
        rest, before_pass = list(self._rest_of(weights)), self.engine._channel.before_pass
        self._parts.clear()
        self._rest.clear()
        for losses, outside, cotangent, retain_graph in rest:
            if leaves := self._without_wrapped(outside):
                if before_pass is not None:
                    before_pass()
                    retain_graph = True  # for passes of other ranks
                # Autocast would round what the nodes of this pass multiply.
                with without_autocast(losses.device):
                    torch.autograd.backward([losses], [cotangent], retain_graph, inputs=leaves)

    def _rest_of(self, weights: Tensor) -> Iterator[tuple[Tensor, Sequence[Tensor], Tensor, bool]]:
        """For losses: leaves that are not of J, the cotangent, and whether to keep the graph."""
        parts = weights.flatten().split([part.m for part in self._parts])
        for i, (losses, outside, retain_graph) in self._rest.items():
            yield losses, outside, parts[i].reshape(losses.shape).to(losses), retain_graph

    def _without_wrapped(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Those of some leaves that are not frozen since, and no affair of a wrapper."""
        wrappers = self.wrappers
        return [x for x in leaves if x.requires_grad and not (wrappers and wrappers.has(x))]

    def _wrapped_rest(self, weights: Tensor, wrappers: Wrappers) -> dict[Tensor, Tensor]:
        """Gradients of leaves that are not of J, and that wrappers exchange, summed over the parts.

        A wrapper exchanges each gradient once. Hooks are called where it is handed over.
        """
        found: dict[Tensor, Tensor] = {}
        for losses, outside, cotangent, retain_graph in self._rest_of(weights):
            leaves = [x for x in outside if x.requires_grad and wrappers.has(x)]
            if not leaves:
                continue
            must_retain = retain_graph or bool(self._without_wrapped(outside))
            with without_hooks(leaves), without_autocast(losses.device):
                gradients = torch.autograd.grad(
                    [losses], leaves, [cotangent], must_retain, materialize_grads=True
                )
            for leaf, gradient in zip(leaves, gradients, strict=True):
                found[leaf] = found[leaf] + gradient if leaf in found else gradient
        return found

    def _finish_with_others(self, ranks: Ranks, wrappers: Wrappers) -> tuple[Tensor, Tensor]:
        """One Gramian and one set of weights for all ranks, and the sum of their Jᵀ w."""
        found: list[Jacobian] = []

        def jacobian() -> Jacobian:
            if self.error is not None:
                raise self.error
            wrappers.check_waiting()
            if self._parts:
                found.append(Jacobian(self._parts, self._names, self.engine._limit))
            else:
                found.append(self.engine._without_objectives(self._empty))
            return found[0]

        weights, gramian = ranks.weights(
            jacobian, self.scale.weighting, self.scale.number, wrappers.wrapped
        )
        own = ranks.own(weights)
        with ranks.agreeing():
            rest = self._wrapped_rest(own, wrappers)
            gradients = gradients_of(found[0], own)
        names = found[0]._names
        accumulate(ranks.group, gradients, names, ranks.reached, wrappers, ranks.shards, rest)
        return gramian, own
