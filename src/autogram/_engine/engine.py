"""The engine: the interface for a training loop."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.amp import GradScaler

from autogram._arguments import check_keep
from autogram._blocks import Keep
from autogram._capture.distribution import is_exchanged
from autogram._capture.samples.objectives import Objectives
from autogram._distributed import Wrappers, together
from autogram._engine.clipping import Clipping
from autogram._engine.scale import Scale
from autogram._engine.training import Training
from autogram._jacobian import Jacobian, JacobianPart, Sketch, Sketching
from autogram._losses import L, Losses, are_single, shapes_of, weights_like
from autogram._undo import undoing
from autogram._weights import Weighting, weights_of


class Engine(Training, Clipping):
    """Computes products with the Jacobian of a vector of losses, without forming it.

    J is the Jacobian of m objectives with respect to the n trainable parameters of some modules.
    The engine hooks these modules once. Their forward passes then record where parameters are used,
    and :meth:`compute_gramian` turns one backward pass through the activations into the Gramian
    J Jᵀ. With gradients disabled the hooks do nothing, and ordinary backward passes give the same
    gradients as without an engine. Several threads may use one engine at once. The hooks are
    removed by :meth:`remove`, at the end of a ``with Engine(model) as engine:`` block, or when the
    engine is dropped.

    Args:
        modules: The modules whose trainable parameters are the columns of J. None may be inside
            another.
        batch_dim: The dimension of the losses that counts the samples. ``None`` treats the whole
            batch as one sample: correct for any losses, with a backward pass for each loss.
            ``"auto"`` takes dimension 0; for objectives that are not per-sample, it warns once and
            acts like ``None``.
        memory_limit_bytes: The size above which an intermediate result of a contraction is computed
            in parts. The smallest part is one row of the Jacobian for one parameter.
        verify: When results are compared with one ordinary backward pass: ``"first"`` at the calls
            1, 2, 4, ..., 64, then each 64th, and whenever the graph of the losses is new in
            more than sizes; ``"always"``; or ``"never"``.
        unseen: How to treat parameters that are used where calls are not recorded: in a penalty,
            a custom autograd Function, a gradient that is differentiated again (except matrix
            products), a forward pass from before the engine was made. ``"rows"`` computes their
            rows with vector-Jacobian products, exactly, and warns once; ``"error"`` refuses them.
        distributed: The processes whose objectives share one Gramian, and which make each call
            together: ``True`` for all, a `ProcessGroup` or a `DeviceMesh` for some, or ``False``
            for this process alone.

    Raises:
        InvalidModulesError: No module is given, an argument is not one, or one is inside another.
        InvalidBatchDimError: ``batch_dim`` is neither a dimension, nor ``None``, nor ``"auto"``.
        InvalidOptionError: Another option has an invalid value, or this process is not in the
            group that ``distributed`` names.
        UnsupportedError: Parameters are spread over processes, except by `fully_shard` with
            ``distributed``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import Engine
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> engine = Engine(model)
        >>> losses = model(torch.randn(5, 3)).square().squeeze(1)
        >>> engine.compute_gramian(losses).shape
        torch.Size([5, 5])
        >>> engine.report().parameters[0].plan
        'factors'
        >>> engine.verify(losses)
        >>> engine.backward(losses, lambda gramian: gramian.diagonal().rsqrt()).shape
        torch.Size([5])

    References:
        Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024,
        arXiv:2406.16232, section 6 and algorithm 3.
    """

    def compute_gramian(self, losses: Losses) -> Tensor:
        """The Gramian of the Jacobian of the losses.

        Args:
            losses: The objectives, a floating-point tensor of any shape with m elements, computed
                from the outputs of the engine's modules. Or a list or a dict of such tensors, one
                for each task: read as ``(K,)`` if each is one number, and as ``(B, K)`` if the
                first dimension of each counts the samples. Their graph is kept.

        Returns:
            All inner products of the objectives' gradients, ``(m, m)``, in the row-major order of
            the losses, in the dtype of the parameters and at least float32, detached.

            Cost: a backward pass through the activations, and contractions that cost from a few
            percent to the whole of a forward pass. The first call with a graph examines all of its
            nodes. Verification is an ordinary backward pass.

        Raises:
            InvalidLossesError: The losses are not floating-point, or have no graph.
            InvalidBatchDimError: ``batch_dim`` is not a dimension of the losses.
            NotConnectedError: The losses do not depend on the engine's parameters.
            MixedSamplesError: ``batch_dim`` is an integer, and the losses are not per-sample.
            VerificationError: The result was verified, and is wrong.
            UnseenUseError: ``unseen`` is ``"error"``, and a parameter is used unseen.
            FreedGraphError: An earlier backward pass has freed the graph.
            UnsupportedError: A call does not have a gradient for each objective; a parameter was
                frozen after the forward pass; the pass would disturb a wrapper of
                `torch.distributed`; or a custom Function or a hook adds to `.grad` of parameters
                during the pass.
            MemoryLimitError: Memory ran out, and again with an eighth of the limit. If an eighth
                suffices, the engine and its Jacobians keep this limit.
            RemovedEngineError: The engine was removed.
        """
        if self._ranks is None:
            return self._run(losses).gramian
        gramian = self._ranks.gramian(partial(self._jacobian_of_rank, losses))
        self._form = shapes_of(losses)
        return gramian

    def jacobian(self, losses: Losses, *, keep: Keep = "auto") -> Jacobian:
        """The Jacobian of the losses, as an operator that keeps factors instead of rows.

        Args:
            losses: As for :meth:`compute_gramian`. The Jacobian does not need their graph.
            keep: What to keep for a parameter whose Gramian costs less from explicit rows.
                ``"factors"``: the factors, from which each product starts anew. ``"auto"``: rows,
                if they are not larger than the factors. ``"rows"``: also larger rows, until
                these fill the memory limit; on a GPU, if reading them is faster than contracting
                again, until these fill half of the free memory, or a third of the memory in use
                without them. Later products only read rows.

        Returns:
            The Jacobian, for the cost of :meth:`compute_gramian`, less the contractions.

        Raises:
            InvalidOptionError: ``keep`` has another value.
            AutogramError: As for :meth:`compute_gramian`.
        """
        with together(self._ranks, losses, "jacobian"):
            check_keep(keep)
            run = self._run(losses, form=keep, is_summed=False)
        exchanged, names = is_exchanged(self._channel, run.survey.losses), run.names
        part = JacobianPart.of(run, names)
        return Jacobian([part], names, self._limit, self._finite, is_exchanged=exchanged)

    @undoing
    def weights(self, losses: L, weighting: Weighting, *, scaler: GradScaler | None = None) -> L:
        """Only the weights, in the form of the losses, for your own backward pass.

        ``losses.backward(engine.weights(losses, weighting))`` is a step in two passes. For several
        losses, it is ``torch.autograd.backward(losses, weights)`` with two lists.

        Args:
            losses: As for :meth:`compute_gramian`. Their graph is kept.
            weighting: As for :meth:`backward`.
            scaler: As for :meth:`backward`; then call ``scaler.scale(losses).backward(weights)``.

        Returns:
            The same weights as :meth:`backward`.

        Raises:
            AutogramError: As for :meth:`backward`.
        """
        scale = Scale(weighting, scaler)
        if (ranks := self._ranks) is not None:
            compute = partial(self._jacobian_of_rank, losses, scale)
            every, gramian = ranks.weights("weights", compute, scale.weights, scale.number)
            weights, self._form = ranks.own(every), shapes_of(losses)
        else:
            scale.check()
            total = self._checked(losses)
            with scale.applied(total) as scaled:
                run = self._drivers.run(scaled, are_single=are_single(losses))
                gramian = run.gramian
            every = weights = scale.weights(gramian)
            weights_of(weights, Objectives(total, None))  # raises if the shape does not fit
        scale.usable(every, gramian, self._finite)  # or an error, perhaps of a later call
        return weights_like(weights, losses, self._batch_dim)  # type: ignore[no-any-return]  # their form

    def sketch(self, losses: Losses, dimensions: int = 4096, seed: int = 0) -> Sketch:
        """The rows of the Jacobian in a few random dimensions, for thousands of samples.

        Args:
            losses: As for :meth:`compute_gramian`. Their graph is kept.
            dimensions: d. The error falls with its square root.
            seed: Equal seeds give the same projection everywhere.

        Returns:
            The sketch, with ``rows`` of shape ``(m, d)`` and an unbiased ``gramian()``.

            Cost: a backward pass through the activations, and for each parameter forming
            its rows, or projecting its factors if these have fewer elements. RAM: rows of one
            parameter, in parts within the memory limit.

        Raises:
            InvalidOptionError: ``dimensions`` is not positive, or one of the two is not an integer.
            AutogramError: As for :meth:`compute_gramian`.

        References:
            Charikar, Chen and Farach-Colton 2002; Pham and Pagh 2013, doi:10.1145/2487575.2487591.
        """
        sketching = Sketching(self._channel, dimensions, seed)
        run = self._run(losses, sinks=[sketching], is_summed=False)
        return Sketch(sketching.rows(run.objectives), sketching.seed)

    def _jacobian_of_rank(self, losses: Losses, scale: Scale | None = None) -> Jacobian:
        """The Jacobian of the losses of this rank, times the scale if there is one."""
        assert self._ranks is not None
        with self._ranks.passing(losses, Wrappers(self._ranks.group), "Gramian"):
            if scale is None:
                return self.jacobian(losses)
            scale.check()
            with scale.applied(self._checked(losses)) as scaled:
                return self.jacobian(scaled)
