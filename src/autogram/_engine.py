"""The engine: what a training loop talks to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Literal, Self, overload

import torch
from torch import Tensor, nn

from autogram._arguments import (
    check_losses,
    check_modules,
    check_options,
    check_weighting,
    check_weights,
    is_reduced,
)
from autogram._blocks import Arena, Keep
from autogram._capture import (
    BatchDim,
    Channel,
    Driver,
    Drivers,
    Limit,
    Objectives,
    Parameters,
    Session,
    Unseen,
    Verify,
    is_distributed,
    is_exchanged,
    refuse_gradients,
    refuse_pass,
    refuse_shards,
    warn_user,
    without_autocast,
)
from autogram._capture.forward.session import hook_all, take_off
from autogram._errors import (
    CoupledObjectivesWarning,
    InvalidBatchDimError,
    RemovedEngineError,
)
from autogram._gradients import accumulate_grad
from autogram._jacobian import Jacobian
from autogram._report import Report, make_report

Weighting = Callable[[Tensor], Tensor]


class Engine:
    """Computes products with the Jacobian of a vector of losses, without forming it.

    J is the Jacobian of m objectives with respect to the trainable parameters of some modules.
    An engine hooks these modules once. From then on their forward passes record where parameters
    are used, and :meth:`compute_gramian` turns one backward pass through the activations into
    the Gramian J Jᵀ. With gradients disabled the hooks do nothing, and ordinary backward passes
    are not changed in any bit (but for the order in which parts of a gradient are added, where a
    call without a rule reads a parameter several times, and another call reads it, too).

    Several threads may use an engine at once. What runs at the same time learns on its own.

    The hooks are taken off when the engine is dropped, by :meth:`remove`, or at the end of a
    block that begins with ``with Engine(model) as engine:``.

    Args:
        modules: The modules whose trainable parameters J is taken with respect to. None may be
            inside another.
        batch_dim: The dimension of the losses that counts the samples. ``None`` treats the whole
            batch as one sample: right for any losses, such as several of one batch or a single one,
            slower for many of them. ``"auto"`` takes dimension 0, and where the objectives turn out
            not to be per-sample, treats them as coupled and warns once.
        memory_limit_bytes: The size that one intermediate result of a contraction should not
            exceed. Larger ones are computed in parts. A single row of the Jacobian for one
            parameter is the least that is held.
        verify: When :meth:`compute_gramian`, :meth:`jacobian` and :meth:`backward` compare their
            result with one ordinary backward pass: ``"first"`` at the calls 1, 2, 4, ..., 64, then
            each 64th, and whenever the graph behind the losses is new in more than sizes,
            ``"always"``, or ``"never"``.
        unseen: What to do with parameters that are used where calls are not recorded: in a penalty
            among the losses, a custom autograd Function, a gradient that is differentiated again, a
            forward pass from before the engine was made. ``"rows"`` computes their rows by
            vector-Jacobian products, exactly, and warns once; ``"error"`` refuses them.

    Raises:
        InvalidModulesError: No module is given, something else than a module, or one module
            is inside another.
        InvalidOptionError: ``verify`` is none of its values, or ``unseen`` is none of its values.
        UnsupportedError: Parameters are spread over processes, as by `fully_shard`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> engine = Engine(model)
        >>> losses = model(torch.randn(5, 3)).square().squeeze(1)
        >>> gramian = engine.compute_gramian(losses)
        >>> gramian.shape
        torch.Size([5, 5])
        >>> losses.backward(torch.full((5,), 1 / 5))

    References:
        Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024,
        arXiv:2406.16232, section 6.
    """

    def __init__(
        self,
        *modules: nn.Module,
        batch_dim: BatchDim = "auto",
        memory_limit_bytes: int = 2**29,
        verify: Verify = "first",
        unseen: Unseen = "rows",
    ) -> None:
        check_modules(modules)
        check_options(batch_dim, verify, unseen)
        refuse_shards(modules)
        self._batch_dim = batch_dim
        references = tuple(weakref.ref(module) for module in modules)
        self._channel = channel = Channel(Parameters(references))
        self._limit = Limit.of_bytes(memory_limit_bytes)
        self._session = session = Session(channel, references)
        self._drivers = Drivers(partial(Driver, channel, batch_dim, self._limit, verify, unseen))
        self._arena = Arena()
        self._hooks = hook_all(modules, session)
        self._remove = weakref.finalize(self, take_off, self._hooks, session)

    def compute_gramian(self, losses: Tensor) -> Tensor:
        """The Gramian of the Jacobian of the losses.

        Args:
            losses: The objectives, a floating-point tensor of any shape with m elements, computed
                from the outputs of the engine's modules. Their graph is kept.

        Returns:
            All inner products of the objectives' gradients, ``(m, m)``, in the row-major order of
            the losses. In the dtype of the parameters, and at least float32. It is detached.

            Cost: a backward pass through the activations, and contractions that cost between a
            few percent and the whole of a forward pass. The first call makes two further passes
            for each binary digit of B to find the samples. Calls in which only shapes are new, or
            constants that move samples, make one (two with several objectives for each sample),
            and so does the call behind a scheduled check, and every call in which values that
            depend on parameters move samples, as tokens that are routed to experts. Where it is
            verified, one ordinary backward pass, with the gradients of all parameters, comes on
            top.

        Raises:
            VerificationError: It was verified, and is wrong. Where places of samples were
                remembered, it says from which call on results are in doubt.
            UnseenUseError: ``unseen`` is ``"error"``, and there are such parameters.
            InvalidLossesError: The losses are not floating-point or require no gradient, or
                gradients are disabled.
            InvalidBatchDimError: ``batch_dim`` is not a dimension of the losses.
            NotConnectedError: The losses do not depend on the engine's parameters.
            MixedSamplesError: ``batch_dim`` is an integer, and the losses are not per-sample.
            NonFiniteError: The samples were sought, and a cotangent is not finite, though its
                objective is, or no objective is.
            FreedGraphError: An earlier backward pass has freed the graph.
            UnsupportedError: A recorded call has no gradient that belongs to an objective, the pass
                would disturb a wrapper of `torch.distributed`, or a custom autograd Function or a
                hook adds to `.grad` of parameters in the pass.
            RemovedEngineError: The engine was removed.
            MemoryLimitError: Memory ran out, and again with an eighth of the limit. If that is
                enough, this engine and its Jacobians keep the smaller limit.

        References:
            Quinton and Rey 2024, arXiv:2406.16232, section 6 and algorithm 3.
        """
        self._check(losses)
        if losses.numel() == 0:
            dtype = torch.promote_types(losses.dtype, torch.float32)
            return losses.new_zeros(0, 0, dtype=dtype)
        with self._drivers.one() as driver:
            return driver.gramian(losses)

    def jacobian(self, losses: Tensor, *, keep: Keep = "auto") -> Jacobian:
        """The Jacobian of the losses, as an operator that keeps factors and not rows.

        Args:
            losses: As for :meth:`compute_gramian`. Their graph is kept, and is not needed by the
                Jacobian.
            keep: What to keep of a parameter where explicit rows are the cheaper way to the
                Gramian. ``"factors"``: the factors, from which each product starts anew.
                ``"auto"``: rows where they are no larger than the factors. ``"rows"``: rows, which
                later products only read, until those that are larger fill the memory limit.

        Returns:
            The Jacobian. While it lives, so do the cotangents of the activations, and the inputs of
            the calls that read parameters.

            Cost: a backward pass through the activations; the first call looks for the samples.

        Raises:
            InvalidLossesError: As for :meth:`compute_gramian`, and so are the others.
        """
        self._check(losses)
        if losses.numel() == 0:
            return Jacobian(Objectives(losses, None), {}, self._channel.names({}), self._limit)
        with self._drivers.one() as driver:
            objectives, store = driver.columns(losses, keep)
        names = self._channel.names(store.columns)
        exchanged = is_exchanged(self._channel, losses)
        return Jacobian(objectives, store.columns, names, self._limit, is_exchanged=exchanged)

    @overload
    def backward(
        self,
        losses: Tensor,
        weighting: Weighting,
        *,
        retain_graph: bool = ...,
        return_gramian: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def backward(
        self,
        losses: Tensor,
        weighting: Weighting,
        *,
        retain_graph: bool = ...,
        return_gramian: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        losses: Tensor,
        weighting: Weighting,
        *,
        retain_graph: bool = False,
        return_gramian: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A step's whole backward pass: Gramian, weights, and Jᵀ w added into ``.grad``.

        The result is that of ``losses.backward(weighting(self.compute_gramian(losses)))`` to
        rounding. But the activations are passed once: the factors of the Gramian, weighted, give
        the gradients of the engine's parameters too. Other leaves that require a gradient get
        theirs by an ordinary pass through what lies between them and the losses. For heads behind a
        shared trunk that is the heads alone; for something in front of the engine's modules, such
        as inputs that require a gradient, it is all.

        Gradients are dense, also those of sparse embeddings, and hooks on parameters run.
        Activations that retain their gradient get none.

        Args:
            losses: As for :meth:`compute_gramian`.
            weighting: Maps the Gramian ``(m, m)`` to weights, of shape ``(m,)`` or that of the
                losses: any function, or a weighting of torchjd. It is called outside of autocast.
            retain_graph: Whether to keep the graph. If not, it is freed during the pass, but for
                calls that must look for the samples, several objectives per sample, and leaves
                outside of the engine; then it goes with the losses. Do not count on a second pass.
            return_gramian: Whether to return the Gramian as well.

        Returns:
            The weights, detached, and the Gramian ``(m, m)`` if asked for, each in at least
            float32, also under autocast.

            Cost: the Gramian, and the weights' gradients, but no second pass through the
            activations. Memory: the cotangents of all activations until the weights are known, and
            at most the memory limit for rows that serve both. On a CPU, the engine keeps the memory
            of the rows for the next call.

        Raises:
            InvalidOperandError: The weights have another shape, or the weighting is no function of
                a Gramian: it is an aggregator, a weighting of rows, or a tensor.
            UnsupportedError: `DistributedDataParallel` would exchange the gradients.
            MemoryLimitError: As for :meth:`compute_gramian`; or memory ran out in a pass that had
                freed a part of the graph.
            InvalidLossesError: As for :meth:`compute_gramian`, and so are the others.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
            >>> engine = Engine(model)
            >>> losses = model(torch.randn(5, 3)).square().squeeze(1)
            >>> engine.backward(losses, lambda gramian: gramian.diagonal().rsqrt()).shape
            torch.Size([5])

        References:
            Bu, Wang, Zha and Karypis, Differentially Private Optimization on Large Model at Small
            Cost, 2022, arXiv:2210.00038: the weighted gradient from kept cotangents.
        """
        self._check(losses)
        check_weighting(weighting)
        if losses.numel() == 0:
            gramian = self.compute_gramian(losses)
            weights = gramian.new_zeros(0)
            return (weights, gramian) if return_gramian else weights
        if is_exchanged(self._channel, losses):
            refuse_gradients("engine.backward")
        with self._arena.borrowed() as arena:
            with self._drivers.one() as driver:
                objectives, columns, gramian, outside = driver.step(
                    losses, "rows", arena, retain_graph=retain_graph
                )
            with without_autocast(losses.device):
                weights = check_weights(weighting(gramian))
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            accumulate_grad(objectives, columns, weights, self._limit)
            del columns  # before another step may write where its rows are
        if outside:
            cotangent = weights.reshape(losses.shape).to(losses)
            torch.autograd.backward([losses], [cotangent], retain_graph, inputs=outside)
        return (weights, gramian) if return_gramian else weights

    def verify(self, losses: Tensor) -> None:
        """Compares the Gramian of some losses with one ordinary backward pass.

        For a vector u of random numbers, uᵀ G u must be the squared norm of Jᵀ u, parameter by
        parameter, up to the rounding of the coarsest dtype on the way: the square root of its
        precision, as 1.5e-8 in float64, 3.5e-4 in float32 and 9e-2 in bfloat16, and 3e-2 on a GPU
        that may use TF32. The user's random state, gradients in ``.grad``, and hooks on parameters
        are not touched.

        Args:
            losses: As in :meth:`compute_gramian`. Their graph is kept.

            Cost: that of :meth:`compute_gramian` and of an ordinary backward pass, with a gradient
            for every parameter at once.

        Raises:
            VerificationError: They do not agree. The error names the parameters concerned, how far
                they are off, and what is the likely cause.
            NonFiniteError: A gradient is infinite or not a number, so that nothing can be said.
            AutogramError: As in :meth:`compute_gramian`.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> model = nn.Linear(3, 2)
            >>> engine = Engine(model, verify="never")
            >>> engine.verify(model(torch.randn(5, 3)).square().sum(1))

        References:
            Freivalds, Probabilistic Machines Can Use Less Running Time, 1977.
        """
        self._check(losses)
        if losses.numel():
            with self._drivers.one() as driver:
                driver.gramian(losses, verify=True)

    def report(self) -> Report:
        """What the last Gramian was computed from, and how.

        Returns:
            For each parameter the calls that read it, the rules, where the samples lie in them, the
            way of contraction that was chosen and the alternative, and what it costs; and which
            parameters have no part in the Gramian, and why. Small parameters are contracted
            together, and listed as if each was alone. ``print`` of it, or of the engine, is a
            table; ``to_dict()`` of it is for programs.

            Cost: none for :meth:`compute_gramian` where calls and shapes are those of the call
            before; some microseconds for each use of a parameter where they are new.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> model = nn.Linear(3, 2)
            >>> engine = Engine(model)
            >>> gramian = engine.compute_gramian(model(torch.randn(5, 3)).square().sum(1))
            >>> engine.report().parameters[0].plan
            'factors'
        """
        return make_report(self._drivers.last.record)

    def __str__(self) -> str:
        return str(self.report())

    def _check(self, losses: Tensor) -> None:
        """Refuses losses that have no Jacobian here."""
        if not self._remove.alive:
            raise RemovedEngineError(
                "The engine has no modules: it was removed by `remove` or at the end of its `with` "
                "block, or it is a copy or a pickle of another. Make a new one: `Engine(model)`."
            )
        check_losses(losses)
        if is_distributed():  # modules may be wrapped after the engine was made
            refuse_shards(self._session.modules)
            refuse_pass(self._channel, losses)
        if isinstance(self._batch_dim, int) and not (
            -losses.dim() <= self._batch_dim < max(losses.dim(), 1)
        ):
            raise InvalidBatchDimError(
                f"`batch_dim` is {self._batch_dim}, but the losses have shape "
                f"{tuple(losses.shape)}. Keep one loss per sample (`reduction='none'`), or pass "
                "`batch_dim=None` to `Engine`."
            )
        if is_reduced(losses, self._batch_dim) and "reduced" not in self._channel.told:
            self._channel.told.add("reduced")
            warn_user(
                "The losses are one number, so that the Gramian is 1 x 1. Keep one loss for each "
                "sample (`reduction='none'`, and no `.mean()`). If a single objective is meant, "
                "pass `batch_dim=None` to `Engine`.",
                CoupledObjectivesWarning,
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets the modules run inside of a block as if the engine was not there.

        Forward passes of this thread record nothing, and cost less than a microsecond more for each
        module. Those from before the block are kept, and their losses may be used inside.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> model = nn.Linear(3, 1)
            >>> engine = Engine(model)
            >>> with engine.paused():
            ...     model(torch.randn(5, 3)).sum().backward()
        """
        with self._hooks.inactive():
            yield

    def remove(self) -> None:
        """Takes the engine off its modules for good, which leaves nothing on them."""
        self._remove()
        self._arena = Arena()  # lets go of its memory

    def __reduce__(self) -> tuple[Callable[[], Engine], tuple[()]]:
        return _removed, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def _removed() -> Engine:
    """What an engine becomes in a copy, whose modules have no hooks."""
    engine = Engine(nn.Identity())
    engine.remove()
    return engine
