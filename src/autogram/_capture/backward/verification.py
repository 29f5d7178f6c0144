"""Verification: compares Jᵀ u by the engine with one ordinary backward pass."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import hypot, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from autogram._blocks import Columns, as_real, weighted_sums
from autogram._capture.autograd.graph import dtypes_of, in_dense
from autogram._capture.autograd.passes import Pass
from autogram._capture.backward.rounding import Rounding, difference_of, tolerance
from autogram._capture.backward.witness import Witness, norm
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram._containers import Latest
from autogram._undo import undone

Verify = Literal["first", "always", "never"]

# The most calls between two checks: checks then take about one percent of the time.
_LONGEST = 64


@dataclass
class Comparison:
    """Jᵀ u for one parameter, by the engine and by autograd."""

    parameter: Tensor
    name: str
    elements: int
    engine: float
    """The norm of Jᵀ u, by the engine."""
    autograd: float
    distance: float
    """The norm of the difference of both."""
    entry: tuple[int, ...] = ()
    """The index of the largest difference, if it is large."""
    uses: dict[str, Use] = field(default_factory=dict)
    """The recorded uses, by function."""

    @property
    def size(self) -> float:
        """The larger of both norms."""
        return max(self.engine, self.autograd)

    @property
    def gap(self) -> float:
        """The distance, relative to the size."""
        return self.distance / self.size if self.size else 0.0


class Check:
    """Compares Jᵀ u, entry by entry, with an ordinary backward pass, for a random vector u.

    The ordinary pass comes first. An assembly restarts the check, and shows it each use, and
    each parameter's columns unless these are kept.

    Args:
        survey: The graph behind the losses.
        vector: u, of the losses' shape.
    """

    def __init__(self, survey: Survey, vector: Tensor) -> None:
        self.survey = survey
        self.vector = vector
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._compared: dict[Tensor, Comparison] = {}
        self._hidden: set[Tensor] = set()  # parameters whose Gramian is known, but not their rows
        self._uses: defaultdict[Tensor, dict[str, Use]] = defaultdict(dict)
        # Dtypes between the losses and the parameters, as far as they are known.
        self._dtypes = dtypes_of(survey.losses, survey.nodes)
        self._by_sample = vector
        self._rounding: Rounding

    def begin(self) -> None:
        """Makes the ordinary backward pass."""
        self._gradients = _differentiate(self.survey, self.vector)
        self._dtypes |= {p.dtype for p, gradient in self._gradients.items() if gradient is not None}

    def restart(self, objectives: Objectives) -> None:
        """Forgets the engine's earlier pass."""
        # Like weights of a step: in the dtype that programs for weighted sums accept.
        dtype = torch.promote_types(self.vector.dtype, torch.float32)
        self._by_sample = objectives.by_sample(self.vector.to(dtype))
        # A method of the check would keep the graph alive in a cycle.
        differentiate = partial(_differentiate, self.survey)
        self._rounding = Rounding(self.vector, self._gradients, objectives, differentiate)
        for each in (self._compared, self._hidden, self._uses):
            each.clear()

    def see_use(self, use: Use, cotangent: Tensor, *, is_hidden: bool = False) -> None:
        """Notes a call that uses parameters, its precision, and whether their rows are hidden."""
        self._dtypes |= {cotangent.dtype, *use.recording.dtypes}
        for tracked in use.reads:
            for parameter in tracked.sources:
                self._uses[parameter][use.function] = use
                if is_hidden:
                    self._hidden.add(parameter)

    def see_columns(self, parameter: Tensor, columns: Columns) -> None:
        """Takes in all columns of one parameter, if they are not kept."""
        total = columns.weighted_sum(self._by_sample.to(parameter.device).unsqueeze(0))
        self._compared[parameter] = self._compare(parameter, None if total is None else total[0])

    def compare(self, kept: Mapping[Tensor, Columns]) -> list[Comparison]:
        """A comparison for each trainable parameter, except for those with hidden rows.

        The weighted sums of ``kept`` columns are computed like those of a step.
        """
        sums = weighted_sums(kept, self._by_sample) if kept else {}
        for parameter in {**self._gradients, **sums}:
            if parameter not in self._compared and parameter not in self._hidden:
                self._compared[parameter] = self._compare(parameter, sums.pop(parameter, None))
        compared = {p: self._compared[p] for p in self._gradients if p in self._compared}
        for parameter, comparison in compared.items():
            comparison.uses = self._uses[parameter]
        return list(compared.values())

    def differing(self, compared: Iterable[Comparison]) -> list[Comparison]:
        """The parameters for which rounding cannot explain the distance of both sides.

        If the parts of a gradient cancel (a bias before a normalisation), only their rounding is
        left; the size of these parts is estimated from the network's whole gradient. If gradients
        vanish, each product may be below the smallest number. Remaining differences are compared
        with autograd's rounding errors, which takes additional passes.
        """
        t, losses = self.tolerance, self.survey.losses
        total = hypot(*[c.size for c in compared])
        dtype = torch.promote_types(losses.dtype, torch.float32)
        lost = torch.finfo(dtype).tiny * losses.numel()
        return [
            c
            for c in compared
            if c.distance > (limit := t * c.size + t * sqrt(t) * total + lost * sqrt(c.elements))
            and not self._rounding.explains(c.parameter, c.distance, limit)
        ]

    @property
    def has_hidden(self) -> bool:
        """Whether some parameters have rows that cannot be compared."""
        return bool(self._hidden)

    @property
    def tolerance(self) -> float:
        """The largest relative error of a right result."""
        return tolerance(self._dtypes, self.survey.nodes, is_cuda=self.survey.losses.is_cuda)

    def witness(self, *, is_measured: bool = False) -> Witness | None:
        """A reference for products of J, or ``None`` if J has columns that autograd lacks.

        If it ``is_measured``, additional passes measure the effect of rounding, unless the
        comparison of J has already made them.
        """
        if not self._gradients.keys() >= self._compared.keys() | self._hidden:
            return None  # frozen in the meantime
        gradients = {p: x for p, x in self._gradients.items() if x is not None}
        rounding = self._rounding.most if is_measured or self._rounding.is_measured else 0.0
        return Witness(self.vector.flatten(), gradients, self.tolerance, rounding)

    def _compare(self, parameter: Tensor, found: Tensor | None) -> Comparison:
        """Compares the engine's result with the gradient."""
        gradient, name = self._gradients.get(parameter), self.survey.names.get(parameter, "")
        elements, norms = parameter.numel(), (norm(found), norm(gradient))
        compared = Comparison(parameter, name, elements, *norms, 0.0)
        if found is None or gradient is None:
            compared.distance = compared.size
            return compared
        difference = difference_of(found, gradient)
        compared.distance = norm(difference)
        if compared.distance > self.tolerance * compared.size:
            places = torch.unravel_index(difference.abs().argmax(), difference.shape)
            compared.entry = tuple(int(place) for place in places)
        return compared


def _differentiate(survey: Survey, vector: Tensor) -> dict[Tensor, Tensor | None]:
    """An ordinary backward pass: the gradient of each trainable parameter, in real numbers."""
    parameters = [p for p in survey.names if p.requires_grad and p not in survey.left_out]
    # Includes leaves outside of the engine that are not frozen since: an inner pass may add to
    # their gradients.
    leaves = parameters + [x for x in survey.outside if x.requires_grad]
    with without_hooks(leaves):
        gradients = Pass(survey.channel).differentiate(survey.losses, leaves, vector)
    pairs = zip(parameters, gradients, strict=False)
    return {p: None if x is None else as_real(in_dense(x)) for p, x in pairs}


class Schedule:
    """Decides when to verify, and with which vector.

    ``"first"`` verifies the calls 1, 2, 4, ..., 64, then each 64th, and whenever the graph of the
    losses is new in more than sizes.
    """

    def __init__(self, mode: Verify) -> None:
        self.calls = 0
        self.confirmed = 0  # number of the last call whose check passed
        self._mode = mode
        self._due = 1
        self._checked = Latest[bytes, None]()  # structures of graphs
        # A separate generator, so that the user's random state does not change.
        self._generator = torch.Generator("cpu").manual_seed(0)

    def next(self, survey: Survey, *, must: bool) -> Check | None:
        """The check of the next call, with a new vector, if a check is due or must be made.

        The entries of the vector are 1, 1/2 and 1/4, equally often, with random signs and in random
        order. Products with powers of two are exact, and with entries up to 1, cotangents overflow
        no sooner than in the verified pass. Equal entries would miss samples that are mixed or in
        another order. Entries with sum zero would miss a part that is absent from all objectives
        alike, and entries of one sign would miss a hook that clips.
        """
        self.calls += 1
        if self._mode == "first":
            must |= self.calls >= self._due or survey.structure not in self._checked
        if not must and self._mode != "always":
            return None
        losses, m = survey.losses, survey.losses.numel()
        options: Any = {"generator": self._generator, "device": "cpu"}
        while True:
            u = 0.5 ** (torch.randperm(m, **options) % 3)
            u = torch.where(torch.rand(m, **options) < 0.5, u, -u)
            if u.sum() != 0 and (m == 1 or 0 < (u > 0).sum() < m):
                return Check(survey, u.to(losses.device, losses.dtype).view(losses.shape))

    @property
    def is_confirmed(self) -> bool:
        """Whether a result was found right, or results are never checked."""
        return self._mode == "never" or self.confirmed > 0

    def note_checked(self, survey: Survey, *, is_confirmed: bool) -> None:
        """Notes that the last call was checked. If a call fails before, its check remains due."""
        self._checked[survey.structure] = None
        if is_confirmed:
            self.confirmed = self.calls
        if self.calls >= self._due:
            self._due = self.calls + min(self.calls, _LONGEST)


_SILENCING = threading.Lock()
# Silenced hooks and the blocks that silence them, by the `id` of the dict that held them.
_SILENT: dict[int, tuple[dict[int, Any], set[object]]] = {}


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Silences hooks on gradients: a user's hook may count, send, or change gradients."""
    hooks = [p._backward_hooks for p in parameters if p._backward_hooks is not None]
    block = object()
    with undone(partial(_put_back, hooks, block)):
        with _SILENCING:
            for held in hooks:
                _SILENT.setdefault(id(held), (dict(held), set()))[1].add(block)
                held.clear()  # autograd holds the same object
        yield


def _put_back(hooks: Sequence[dict[int, Any]], block: object) -> None:
    """Restores hooks that a block has silenced, unless another thread is still in such a block."""
    with _SILENCING:
        for held in hooks:
            silent, blocks = _SILENT.get(id(held), ({}, set()))
            if not blocks - {block}:
                held.update(silent)
                _SILENT.pop(id(held), None)
            blocks.discard(block)
