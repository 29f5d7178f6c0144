"""The engine's lifecycle: modules, hooks, reports, captured steps and removal."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Never, Self

from torch import Tensor, nn

from autogram._arguments import (
    check_losses,
    check_modules,
    check_options,
    count_of,
    dim_of,
    refuse_options,
)
from autogram._blocks import Devices
from autogram._capture.backward.driver import BatchDim, Driver, Drivers
from autogram._capture.backward.run import Run
from autogram._capture.backward.unseen import Unseen
from autogram._capture.backward.verification import Verify
from autogram._capture.distribution import is_distributed, refuse_pass, refuse_shards
from autogram._capture.forward.checkpoints import Checkpoints
from autogram._capture.forward.session import Parameters, Session, hook_all
from autogram._capture.from_graph.noting import NotingSession
from autogram._capture.from_graph.tensor_hooks import note_hooks
from autogram._capture.limit import limit_of_bytes
from autogram._capture.recording import Channel
from autogram._capture.samples.replays import Replays
from autogram._capture.shards import Shards
from autogram._distributed import Ranks, together
from autogram._losses import Losses, are_single, as_one_tensor, weights_like
from autogram._report import Report, make_report
from autogram._weights import FiniteWeights
from autogram.errors import InvalidOperandError, RemovedEngineError, UnsupportedError
from autogram.hooks import HookManager


class Hooked:
    """Modules with an engine's hooks, until these are removed.

    The arguments are those of :class:`autogram.Engine`, which adds the products.
    """

    def __init__(
        self,
        *modules: nn.Module,
        batch_dim: BatchDim = "auto",
        memory_limit_bytes: int = 2**29,
        verify: Verify = "first",
        unseen: Unseen = "rows",
        distributed: Any = False,
        **unknown: Never,
    ) -> None:
        refuse_options(self, unknown, Hooked.__init__)
        check_modules(modules)
        check_options(verify, unseen)
        memory_limit_bytes = count_of(
            "memory_limit_bytes", memory_limit_bytes, ", such as the default, `2**29`"
        )
        is_alone = distributed is None or distributed is False
        refuse_shards(modules, with_others=not is_alone)
        self._batch_dim = batch_dim = dim_of(batch_dim)
        hooks = HookManager()
        parameters = Parameters(modules, hooks)
        self._channel = channel = Channel(parameters, parameters.left_out)
        channel.reads_graph &= is_alone  # other processes run the same recorded calls
        self._limit = limit_of_bytes(memory_limit_bytes)
        if channel.reads_graph:
            note_hooks()
        kind = NotingSession if channel.reads_graph else Session
        self._session = session = kind(channel, parameters, Checkpoints())
        self._devices = devices = Devices(self._limit)
        self._replays = Replays()
        self._finite = FiniteWeights(self._replays)
        self._drivers = Drivers(
            partial(Driver, channel, batch_dim, devices, verify, unseen, self._replays)
        )
        self._hooks = hooks
        self._ranks = ranks = None if is_alone else Ranks(distributed, session, channel)
        self._form: Losses | None = None  # of the losses of the last Gramian of all ranks
        shards = None if ranks is None else ranks.shards
        self._remove = weakref.finalize(self, _take_off, hooks, session, shards)
        hook_all(session, hooks)

    def verify(self, losses: Losses) -> None:
        """Compares J and the Gramian of some losses with one ordinary backward pass.

        For a random vector u, Jᵀ u must be the gradient of each parameter, entry by entry, and
        uᵀ G u its squared norm, to within the square root of the precision of the coarsest dtype on
        the way: 1.5e-8 in float64, 3.5e-4 in float32, 9e-2 in bfloat16, and 3e-2 on a GPU that may
        use TF32. The random state, ``.grad``, and hooks on parameters are not touched. Costs
        :meth:`compute_gramian`, an ordinary backward pass and :meth:`autogram.Jacobian.vjp`.

        Args:
            losses: As for :meth:`compute_gramian`. Their graph is kept.

        Raises:
            VerificationError: They do not agree; the error names the parameters.
            NonFiniteError: A gradient is infinite or not a number, so the check is impossible.
            AutogramError: As for :meth:`compute_gramian`.

        References:
            Freivalds, Probabilistic Machines Can Use Less Running Time, 1977.
        """
        with together(self._ranks, losses, "verify"):
            self._run(losses, must_verify=True)

    def report(self) -> Report:
        """How the last Gramian was computed; ``print(engine)`` shows it as a table.

        Small parameters are contracted together, but listed as if each were contracted alone.
        """
        return make_report(self._drivers.last.summary)

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        if not self._remove.alive:
            return "Engine(removed)"
        roots = self._session.parameters.roots.values()
        names = ", ".join([type(root).__name__ for root in roots])
        count = len({p for root in roots for p in root.parameters() if p.requires_grad})
        return f"Engine({names}; {count} parameters, batch_dim={self._batch_dim!r})"

    def prepare_capture(self) -> None:
        """Lets the next steps be captured into CUDA graphs, and replayed.

        Call it on the stream of the capture, after a few eager runs of the steps to capture. A
        replay gives the same result as an eager step on the same values, except for the
        last bits where a kernel adds up in any order. Captured steps are not verified.

        Raises:
            UnsupportedError: The engine must find the samples anew in each step; or no
                step was verified yet. During a capture: the step differs from the eager steps.

        Example:
            `docs/cuda_graphs.md` shows a whole training loop.
        """
        if not self._drivers.last.is_settled:
            raise UnsupportedError(
                "A step cannot be captured: no step was verified yet, or in the last one the "
                "engine could not remember where the samples are. Run the step eagerly before "
                "capturing it; pass `batch_dim=None` to `Engine` if that does not help."
            )
        self._replays.prepare({parameter.device for parameter in self._channel.parameters_now()})

    def check_replays(self) -> None:
        """Raises if replays of CUDA graphs had values for which the captured step is wrong.

        The places of samples may depend on index values and masks. Each replay compares them with
        those of the captured step, and checks whether its weights are finite. This method reads the
        answer for all replays since its last call, and waits for the device. It also reads
        whether the weights of other steps on a GPU were finite.

        Raises:
            StaleCaptureError: A replay had such values.
            NonFiniteError: The weights of a step that was not captured were not finite.
        """
        self._finite.check(waits=True)
        self._replays.check()

    def paused(self) -> AbstractContextManager[None]:
        """Lets the modules run in a block, and in this thread, as if the engine was not there.

        Losses of forward passes from before the block may be used inside.
        """
        return self._session.paused()

    @property
    def hooks(self) -> HookManager:
        """The hooks of the engine on its modules, of the kind ``"around"``.

        A module whose hook is inactive keeps its own parameters out of J, from the next forward
        pass on, unless another module has them too. To J they are constants, and :meth:`backward`
        gives them their gradient like other leaves. ``deactivate(module=...)`` switches the hooks
        of all modules inside, too, and ``print(engine.hooks)`` shows each one.

        Example:
            >>> from torch import nn
            >>> from autogram import Engine
            >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
            >>> engine = Engine(model)
            >>> engine.hooks.deactivate(module=model[0])  # J is of `1.weight` and `1.bias` now
        """
        return self._hooks

    def own(self, weights: Tensor) -> Any:
        """This rank's part of weights for the objectives of all ranks, of the last Gramian.

        Args:
            weights: ``(M,)``, in the order of the Gramian.

        Returns:
            The part, in the form of this rank's losses, or ``(m,)`` for several micro-batches.
            ``losses.backward(own)`` is the backward pass of a step in two passes.

        Raises:
            InvalidOperandError: The weights have another shape, or the engine was made without
                ``distributed``.
        """
        if self._ranks is None:
            raise InvalidOperandError(
                "The engine computes the Gramian of this process alone, to which all weights "
                "belong. Make it with `Engine(model, distributed=True)`, or use the weights "
                "unchanged."
            )
        own = self._ranks.own(weights)
        return own if self._form is None else weights_like(own, self._form, self._batch_dim)

    def remove(self) -> None:
        """Removes the engine from its modules for good, without leaving a trace on them."""
        self._remove()
        self._devices.free()

    def _run(self, losses: Losses, **asked: Any) -> Run:
        """One call of a driver, for losses in the user's form."""
        total = self._checked(losses)
        is_one = isinstance(losses, Tensor)
        return self._drivers.run(total, are_single=not is_one and are_single(losses), **asked)

    def _checked(self, losses: Losses) -> Tensor:
        """Losses as one tensor. Refuses losses without a Jacobian for this engine."""
        if not self._remove.alive:
            raise RemovedEngineError(
                "The engine has no modules: it was removed by `remove` or at the end of its `with` "
                "block, or it is a copy or a pickle. Make a new one: `Engine(model)`."
            )
        # All ranks must raise in the same call, however far their devices are.
        self._finite.check(waits=self._ranks is not None)
        losses = as_one_tensor(losses, self._batch_dim, self._channel.told)
        if self._ranks is not None:
            self._ranks.shards.check(self._session.parameters.roots)
            if not (losses.numel() or losses.requires_grad):
                losses = losses.detach().requires_grad_()  # a rank without objectives
        check_losses(losses, self._batch_dim, self._channel.told)
        if is_distributed():
            refuse_pass(self._channel, self._session.parameters.roots.values(), losses)
        return losses

    def __reduce__(self) -> tuple[Callable[[type[Self]], Hooked], tuple[type[Self]]]:
        return _removed, (type(self),)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _take_off(hooks: HookManager, session: Session, shards: Shards | None) -> None:
    """Removes everything that an engine has added to modules."""
    hooks.remove()
    session.remove()
    if shards is not None:
        shards.remove()


def _removed(kind: type[Hooked]) -> Hooked:
    """A removed engine, in place of a copy: the copied modules have no hooks."""
    engine = kind(nn.Identity())
    engine.remove()
    return engine
