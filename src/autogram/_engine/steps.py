"""A step: rows of the losses, one Gramian, one set of weights, and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from autogram._arguments import is_retained
from autogram._blocks import Arena, Keep
from autogram._capture.autograd.exact import without_autocast
from autogram._capture.autograd.grad import check_addable, has_hooks
from autogram._capture.backward.verification import without_hooks
from autogram._capture.distribution import is_exchanged, refuse_gradients
from autogram._distributed import (
    Ranks,
    Wrappers,
    accumulate,
    attempted,
    gradients_of,
    held,
    together,
)
from autogram._engine.hooked import Hooked
from autogram._engine.scale import Scale
from autogram._jacobian import Jacobian, JacobianPart
from autogram._losses import Losses, are_single, shapes_of, weights_like
from autogram._undo import undoing
from autogram.errors import InvalidOptionError

GradientsOutside = Literal["sum", "weighted"]
"""The gradient of leaves outside J: that of the sum of losses, or of the weighted losses."""


def check_outside(gradients_outside: object) -> None:
    """Refuses an unknown choice of the gradients of leaves outside J."""
    if gradients_outside not in get_args(GradientsOutside):
        raise InvalidOptionError(
            f"`gradients_outside` is {gradients_outside!r}. Pass "
            '"sum", so that parameters outside J get the gradient of the sum of the losses, or '
            '"weighted", for that of the weighted losses.'
        )


@dataclass(eq=False)
class Step:
    """The backward pass of a step, to which losses are added one after the other."""

    engine: Hooked
    keep: Keep
    scale: Scale
    gradients_outside: GradientsOutside  # of leaves outside J
    is_only: bool = False  # whether losses are added once: the pass then adds up the Gramian
    arena: Arena | None = None  # where to put rows in that case

    def __post_init__(self) -> None:
        # The wrappers around the forward passes of several ranks, `None` without other ranks.
        ranks = self.engine._ranks
        self._wrappers = None if ranks is None else Wrappers(ranks.group)
        self._parts: list[JacobianPart] = []
        self._names: dict[Tensor, str] = {}
        self._forms: list[tuple[Losses, int]] = []  # of the losses, with their numbers of elements
        self._gramian: Tensor | None = None  # of the scaled losses, if it was added up
        self._rest: dict[int, tuple[Tensor, Sequence[Tensor], bool]] = {}
        """By part: losses, leaves outside J, and whether to keep the graph."""
        self._has_rest = False  # whether any losses had such leaves
        self._few: list[dict[Tensor, Tensor]] = []
        """By objective: gradients of leaves outside J, if the pass has computed them."""
        self._has_begun = False  # whether other ranks know of the call
        self._has_met = False  # whether the ranks have met at the end of the step
        self._last: Losses = []  # the start of a pass that only other ranks need

    def add(self, losses: Losses, *, retain_graph: bool) -> None:
        """Adds the rows of some losses.

        Args:
            losses: The objectives, possibly none: other losses may give gradients.
            retain_graph: Whether others need their graph. It is kept until the end of the
                step if leaves outside J need it.
        """
        with self._passing(losses):
            retain_graph = is_retained(retain_graph)
            total = self.engine._checked(losses)
            if self.is_only:  # else it was checked before the first losses
                self.scale.check()
            self._take(total, retain_graph=retain_graph, are_single=are_single(losses))
        self._forms.append((losses if self.is_only else shapes_of(losses), total.numel()))

    @contextmanager
    def _passing(self, losses: Losses) -> Iterator[None]:
        """Lets passes for some losses of the step go through the wrappers of the model."""
        ranks = self.engine._ranks
        if ranks is None or self._wrappers is None:
            yield
            return
        self._begin(ranks)
        self._last = losses if ranks.channel.before_pass is not None else []
        with ranks.passing(losses, self._wrappers, "step" if self.is_only else None):
            yield

    def _begin(self, ranks: Ranks) -> None:
        """Begins the call, which all ranks must make."""
        if not self._has_begun:
            self._has_begun = True
            ranks.agreement.begin("backward" if self.is_only else "accumulate")

    def _take(self, losses: Tensor, *, retain_graph: bool, are_single: bool = False) -> None:
        """Makes the pass for some losses."""
        engine, channel = self.engine, self.engine._channel
        is_alone = self._wrappers is None
        if is_alone and losses.numel() and is_exchanged(channel, losses):
            refuse_gradients("engine.backward" if self.is_only else "engine.accumulate")
        is_summed = self.is_only and is_alone
        with self.scale.applied(losses) as losses:
            run = engine._drivers.run(
                losses,
                form=self.keep,
                arena=self.arena,
                is_step=True,
                retain_graph=retain_graph or channel.before_pass is not None,
                is_summed=is_summed,
                are_single=are_single,
                has_others=is_summed,
            )
        if not retain_graph and losses.numel():
            call = "`engine.backward`" if self.is_only else "`add` of `engine.accumulate`"
            for recording in (*run.survey.recordings, *run.survey.passes):
                recording.freed_by = call
        outside, names = run.survey.outside if losses.numel() else [], run.names
        if self._wrappers is not None:
            self._wrappers.check_outside(outside)
        self._has_rest |= bool(outside)
        self._few = run.rest if run.others else []
        if outside and not run.others:
            self._rest[len(self._parts)] = losses, outside, retain_graph
        self._parts.append(JacobianPart.of(run, names))
        for parameter, name in names.items():
            self._names.setdefault(parameter, name)
        self._gramian = run.gramian if is_summed else None

    @undoing
    def abandon(self, error: BaseException) -> None:
        """Tells other ranks of an interrupt that came before :meth:`finish` could tell them."""
        ranks = self.engine._ranks
        if ranks is not None and self._wrappers is not None and not self._has_met:
            self._finish_with_others(ranks, self._wrappers, error)

    @undoing
    def finish(self, error: BaseException | None) -> tuple[Tensor, list[Any]] | None:
        """Weights the added losses, and adds Jᵀ w of the scaled losses to ``.grad`` of all leaves.

        Args:
            error: The error on this rank, if any, which is sent to the others.

        Returns:
            The Gramian ``(m, m)`` of the losses, of all ranks if there are several; and the weights
            of this rank, for each call of :meth:`add` in the form of its losses. ``None`` if
            there is no other rank, and no objective or an error.
        """
        engine, sizes = self.engine, [size for _, size in self._forms]
        if engine._ranks is not None and self._wrappers is not None:
            gramian, weights = self._finish_with_others(engine._ranks, self._wrappers, error)
            engine._form = shapes_of(self._forms[0][0]) if self.is_only else weights.to("meta")
        elif error is not None or not (self.is_only or any(sizes)):
            return None
        else:
            gramian, weights = self._finish_alone()
        each = zip(weights.flatten().split(sizes), self._forms, strict=True)
        weights_in_form = [weights_like(part, form, engine._batch_dim) for part, (form, _) in each]
        return self.scale.unscaled(gramian), weights_in_form

    def _jacobian(self) -> Jacobian:
        """The rows of all losses. Empty losses count only if there are no others."""
        parts = [part for part in self._parts if part.m] or self._parts[-1:]
        reached = {p: self._names[p] for part in parts for p in part.columns}
        self.engine._channel.refuse_frozen(reached)  # frozen after one of several micro-batches
        return Jacobian(parts, self._names, self.engine._limit, self.engine._finite)

    def _finish_alone(self) -> tuple[Tensor, Tensor]:
        """One Gramian and one set of weights, and Jᵀ w."""
        jacobian = self._jacobian()
        self._check_rest()
        gramian = jacobian.gramian() if self._gramian is None else self._gramian
        weights = self.scale.weights(gramian)
        usable = self.scale.usable(weights, gramian, self.engine._finite)
        # Compute all gradients before adding any: memory may run out, and a hook on a parameter
        # may update it, which would invalidate factors and graph.
        gradients = jacobian._gradients_of(usable)
        _accumulate_rest(self._gradients_of_rest(self._outside_of(weights, usable)))
        jacobian._add(gradients)
        return gramian, weights

    def _finish_with_others(
        self, ranks: Ranks, wrappers: Wrappers, error: BaseException | None
    ) -> tuple[Tensor, Tensor]:
        """One Gramian and one set of weights for all ranks, and the sum of their Jᵀ w."""
        channel = self.engine._channel
        jacobians: list[Jacobian] = []

        def jacobian() -> Jacobian:
            if error is not None:
                raise error
            wrappers.check_waiting()
            if not self._parts:
                device = next((p.device for p in channel.parameters_now()), torch.device("cpu"))
                self._take(torch.zeros(0, device=device, requires_grad=True), retain_graph=False)
            jacobians.append(self._jacobian())
            return jacobians[0]

        def differentiate() -> tuple[dict[Tensor, Tensor], dict[str, Tensor]]:
            self._check_rest()
            return self._wrapped_rest(outside, wrappers), gradients_of(jacobians[0], usable)

        def end() -> None:
            with together(ranks, self._last):
                others = self._gradients_of_rest(outside)
                finish()
            _accumulate_rest(others)

        with held():
            self._has_met = True
            self._begin(ranks)
            weights, gramian = ranks.weights(
                None, jacobian, self.scale.weights, self.scale.number, wrappers.wrapped
            )
            own = ranks.own(weights)
            every = self.scale.usable(weights, gramian, self.engine._finite)
            usable, outside = ranks.own(every), ranks.own(self._outside_of(weights, every))
            gradients, error = attempted(differentiate)
            may_fail = bool(self._rest) or any(map(has_hooks, channel.parameters_now()))
            must_wait = ranks.agreement.is_ready(error, may_fail)
            assert gradients is not None
            finish = accumulate(ranks, gradients[1], jacobians[0]._names, wrappers, gradients[0])
            _, error = attempted(end)
            if must_wait:
                ranks.agreement.end(error)
            elif error is not None:
                raise error
        return gramian, own

    def _outside_of(self, weights: Tensor, usable: Tensor) -> Tensor:
        """The weights of the losses for leaves outside J.

        Ones for the sum of the losses. If the ``weights`` are not finite, the ``usable`` ones, as
        for parameters of J: zeros or NaN.
        """
        if self.gradients_outside == "weighted" or not self._has_rest:
            return usable
        return torch.where(weights.isfinite().all(), torch.ones_like(usable), usable)

    def _gradients_of_rest(self, weights: Tensor) -> dict[Tensor, Tensor]:
        """Drops the rows, and returns the gradients of leaves outside J and outside wrappers."""
        rest, before_pass = list(self._rest_of(weights)), self.engine._channel.before_pass
        of_rest: dict[Tensor, Tensor] = {}
        for weight, gradients in zip(weights.flatten().unbind(), self._few, strict=False):
            for leaf, gradient in gradients.items():
                part = gradient * weight.to(gradient)
                of_rest[leaf] = _sum(of_rest[leaf], part) if leaf in of_rest else part
        self._parts.clear()
        self._rest.clear()
        self._few.clear()
        for losses, outside, cotangent, retain_graph in rest:
            if leaves := self._without_wrapped(outside):
                if before_pass is not None:
                    before_pass()
                    retain_graph = True  # for passes of other ranks
                _add_gradients(of_rest, losses, leaves, cotangent, retain_graph)
        return of_rest

    def _check_rest(self) -> None:
        """Refuses leaves outside J whose gradients cannot be added up."""
        check_addable(leaf for _, outside, _ in self._rest.values() for leaf in outside)
        check_addable(leaf for gradients in self._few for leaf in gradients)

    def _rest_of(self, weights: Tensor) -> Iterator[tuple[Tensor, Sequence[Tensor], Tensor, bool]]:
        """By losses: leaves outside J, the cotangent, and whether to keep the graph."""
        parts = weights.flatten().split([part.m for part in self._parts])
        for i, (losses, outside, retain_graph) in self._rest.items():
            yield losses, outside, parts[i].reshape(losses.shape).to(losses), retain_graph

    def _without_wrapped(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Leaves that still require a gradient and that no wrapper manages."""
        wrappers = self._wrappers
        return [x for x in leaves if x.requires_grad and not (wrappers and wrappers.has(x))]

    def _wrapped_rest(self, weights: Tensor, wrappers: Wrappers) -> dict[Tensor, Tensor]:
        """Gradients of leaves outside J that wrappers exchange, summed over the parts.

        A wrapper exchanges each gradient once, and calls hooks when it receives it.
        """
        gradients: dict[Tensor, Tensor] = {}
        for losses, outside, cotangent, retain_graph in self._rest_of(weights):
            if leaves := [x for x in outside if x.requires_grad and wrappers.has(x)]:
                must_retain = retain_graph or bool(self._without_wrapped(outside))
                _add_gradients(gradients, losses, leaves, cotangent, must_retain)
                gradients |= {x: torch.zeros_like(x) for x in leaves if x not in gradients}
        return gradients


def _add_gradients(
    total: dict[Tensor, Tensor],
    losses: Tensor,
    leaves: Sequence[Tensor],
    cotangent: Tensor,
    retain_graph: bool,
) -> None:
    """Adds the gradients of leaves to a total. No hook on a leaf runs."""
    # Autocast would round the factors in this pass.
    with without_hooks(leaves), without_autocast(losses.device):
        gradients = torch.autograd.grad(
            [losses], leaves, [cotangent], retain_graph, allow_unused=True
        )
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            total[leaf] = _sum(total[leaf], gradient) if leaf in total else gradient


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """The sum of two gradients. PyTorch adds a sparse tensor only to a dense one on its left."""
    return second + first if first.is_sparse and not second.is_sparse else first + second


def _accumulate_rest(gradients: Mapping[Tensor, Tensor]) -> None:
    """Adds gradients of leaves outside J to their ``.grad``.

    Through autograd, which copies gradients that several leaves share, and runs the hooks of
    wrappers that do not know engines.
    """
    if gradients:
        torch.autograd.backward([*gradients], [*gradients.values()])
