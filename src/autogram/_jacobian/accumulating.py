"""Products Jᵀ w that are added into ``.grad``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from autogram._arguments import Grouping, Names
from autogram._blocks import Limit
from autogram._capture.autograd.exact import exact
from autogram._capture.autograd.grad import add_to_grad, as_gradients, check_addable
from autogram._capture.autograd.nested import running_pass
from autogram._capture.distribution import refuse_gradients
from autogram._capture.limit import retried_with_less
from autogram._jacobian.groups import check_groups, groups_of
from autogram._jacobian.operator import MatrixForm
from autogram._jacobian.parts import Parts
from autogram._weights import FiniteWeights
from autogram.errors import InvalidOperandError, UnsupportedError


class Accumulating(MatrixForm):
    """A Jacobian that adds to ``.grad`` of its parameters."""

    _parts: Parts
    _limit: Limit
    _finite: FiniteWeights
    _is_exchanged: bool

    def accumulate_grad(self, w: Tensor | Mapping[str, Tensor], by: Grouping | None = None) -> None:
        """Adds Jᵀ w to ``.grad`` of the parameters, like a backward pass.

        A gradient has the dtype of its parameter, or its ``grad_dtype``, and hooks on parameters
        run. A parameter's gradient is unchanged if no objective depends on it, or if it was
        frozen in the meantime. The gradient of a sparse embedding is dense.

        Args:
            w: Weights of shape ``(m,)`` or of the losses' shape; or a dict with such weights for
                each group of parameters, as for clipping by layer.
            by: The groups of such a dict, as for :meth:`autogram.Jacobian.block_gramians`. By
                default, each parameter is its own group, by name. The gradient of a parameter
                outside all groups is unchanged.

        Raises:
            InvalidOperandError: ``w`` has another shape; or it lacks a group or has one too many;
                or ``by`` is not a grouping, or is given although ``w`` is one tensor.
            NonFiniteError: ``w`` is not finite. On a GPU, zeros are added, and a later call raises.
            UnsupportedError: `DistributedDataParallel` would exchange the gradients; or a backward
                pass of an engine is under way.
        """
        if self._is_exchanged:
            refuse_gradients("accumulate_grad")
        self._finite.check()
        if isinstance(w, Mapping):
            groups = groups_of(by, self._names)
            check_groups("weights", w, groups)
            for weights in w.values():
                self._parts.weights_of(weights)
            usable = {name: self._finite.usable(weights, self.dtype) for name, weights in w.items()}
            pairs = [(groups[name], weights) for name, weights in usable.items()]
            self._add(self._gradients_of_groups(pairs))
            return
        if by is not None:
            raise InvalidOperandError(
                "Groups of parameters are given, but only one tensor of weights. Pass a dict with "
                "weights for each group, or leave out `by`."
            )
        self._parts.weights_of(w)  # raises if the shape does not fit
        self._add(self._gradients_of(self._finite.usable(w, self.dtype)))

    @retried_with_less
    def _gradients_of(self, w: Tensor) -> dict[Tensor, Tensor]:
        """The gradients for :meth:`accumulate_grad`, from the last parameter to the first."""
        self._check_addable()
        with exact(self.device):
            sums = self._parts.weighted_sums(self._parts.weights_of(w))
            gradients = _at_parameters(sums)
            self._parts.check_sums("The gradient Jᵀ w", gradients, w, self.dtype)
            return gradients

    @retried_with_less
    def _gradients_of_groups(self, groups: Sequence[tuple[Names, Tensor]]) -> dict[Tensor, Tensor]:
        """The gradients for :meth:`accumulate_grad`, if each group of parameters has weights."""
        self._check_addable()
        with exact(self.device):
            sums: dict[Tensor, Tensor | None] = {}
            for parameters, w in groups:
                sums |= self._parts.weighted_sums(self._parts.weights_of(w), parameters)
            gradients = _at_parameters({p: sums[p] for p in self._names if p in sums})
            product, dtype = "The gradient Jᵀ w", self.dtype
            self._parts.check_sums_by_group(product, gradients, groups, dtype)
            return gradients

    def _check_addable(self) -> None:
        """Refuses to add to gradients if that is not possible now."""
        if running_pass() is not None:
            raise UnsupportedError(
                "A hook or a custom autograd Function adds gradients to `.grad` inside a backward "
                "pass of an engine. The engine repeats such passes to look for samples, and they "
                "leave `.grad` unchanged. Add them outside the pass."
            )
        check_addable({p: None for part in self._parts.each for p in part.columns}, self._names)

    def _add(self, gradients: dict[Tensor, Tensor]) -> None:
        """Adds gradients to ``.grad``, and drops them."""
        with exact(self.device):
            add_to_grad(gradients.popitem() for _ in range(len(gradients)))


def _at_parameters(sums: Mapping[Tensor, Tensor | None]) -> dict[Tensor, Tensor]:
    """Weighted sums as gradients, each on the device of its parameter."""
    return as_gradients([(p, None if x is None else x.to(p.device)) for p, x in sums.items()])
