"""Verification: the Gramian against one ordinary backward pass."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from autogram._blocks import Columns, as_real
from autogram._capture.autograd.graph import dtypes_of, kind_of_node, use_of
from autogram._capture.autograd.passes import Pass
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram._containers import Latest
from autogram._undo import undone

Verify = Literal["first", "always", "never"]

# With TF32, matrix products and convolutions keep ten bits of each number in float32.
_EPSILON_OF_TF32 = 2.0**-10
_EXACT = {"none", "ieee"}
_BY_CUDNN = ("Convolution", "CudnnRnn")

# The most calls from one check to the next: checks then take about one percent of the time.
_LONGEST = 64


@dataclass
class Comparison:
    """Both sides of the check for one parameter, or for some that were contracted together.

    Each side of the whole is a sum over the parameters.
    """

    name: str = ""
    gramian: float = 0.0
    """uᵀ G u, by the engine."""
    scale: float = 0.0
    """The sum of the squared norms of the rows times u: uᵀ G u on average over the signs of u."""
    gradient: float = 0.0
    """The squared norm of Jᵀ u, by autograd."""
    elements: int = 0
    uses: dict[str, Use] = field(default_factory=dict)
    """The uses that were seen, by function."""

    @property
    def gap(self) -> float:
        """The difference of both sides, relative to the largest of both and of the scale."""
        largest = max(self.gramian, self.gradient, self.scale)
        return abs(self.gramian - self.gradient) / largest if largest else 0.0


class Check:
    """Freivalds' check: uᵀ (J Jᵀ) u = ‖Jᵀ u‖² for a random vector u, of the objectives' shape.

    An assembly shows each use, and the columns of each parameter, to the check.
    """

    def __init__(self, survey: Survey, vector: Tensor) -> None:
        self.survey = survey
        self.vector = vector
        self._alone: defaultdict[Tensor, Comparison] = defaultdict(Comparison)
        # Of parameters that were contracted together.
        self._together: defaultdict[tuple[Tensor, ...], Comparison] = defaultdict(Comparison)
        self._uses: defaultdict[Tensor, dict[str, Use]] = defaultdict(dict)
        # Between the losses and the parameters, as far as they are known.
        self._dtypes = dtypes_of(survey.losses, survey.nodes)
        self._by_sample = vector

    def restart(self, objectives: Objectives) -> None:
        """Forgets an earlier pass."""
        self._by_sample = objectives.by_sample(self.vector)
        for each in (self._alone, self._together, self._uses):
            each.clear()

    def see_use(self, use: Use, cotangent: Tensor) -> None:
        """Notes which calls a parameter is used in, and their precision."""
        self._dtypes |= {cotangent.dtype, *use.recording.dtypes}
        for tracked in use.reads:
            for parameter in tracked.sources:
                self._uses[parameter][use.function] = use

    def see_columns(self, parameter: Tensor, columns: Columns, *, are_kept: bool) -> Tensor | None:
        """Takes in the columns of one parameter. Kept columns are checked by their weighted sum.

        Returns:
            The Gramian ``(k, b, k, b)`` of the columns, if it was needed and is not zero.
        """
        u = self._by_sample.to(parameter.device)
        part = None
        if are_kept:
            gradient, norms = columns.weighted_sum(u.unsqueeze(0)), columns.square_norms()
            if gradient is None or norms is None:
                return None
            gramian = _squared_norm(gradient)
            scale = float((u.square().to(norms) * norms).sum(dtype=torch.float64))
        else:
            part = columns.gram()
            if part is None:
                return None
            gramian, scale = _form_of(u, part)
        # Both are added last: if memory runs out before, the columns are shown again.
        comparison = self._alone[parameter]
        comparison.gramian += gramian
        comparison.scale += scale
        return part

    def see_contracted(self, uses: Iterable[Use], parts: Iterable[Tensor | None]) -> None:
        """Takes in parts of the Gramian of parameters that nothing but these uses reads.

        A program or a compiled part has contracted them together.
        """
        parameters = dict.fromkeys(p for use in uses for of in use.reads for p in of.sources)
        comparison = self._together[tuple(parameters)]
        for part in parts:
            if part is not None:
                gramian, scale = _form_of(self._by_sample, part)
                comparison.gramian += gramian
                comparison.scale += scale

    def compare(self) -> list[Comparison]:
        """Makes the ordinary backward pass. Returns a comparison for each trainable parameter.

        Those that were contracted together are compared together, and alone too if columns of each
        are kept.
        """
        survey, names = self.survey, self.survey.names
        parameters = [p for p in names if p.requires_grad and p not in survey.left_out]
        # Also of leaves that are not the engine's, if they are not frozen since: a pass inside of
        # this one may add to these.
        leaves = parameters + [x for x in survey.outside if x.requires_grad]
        with without_hooks(leaves):
            gradients = Pass(survey.channel).differentiate(survey.losses, leaves, self.vector)
        norms: dict[Tensor, float] = {}
        for parameter, gradient in zip(parameters, gradients, strict=False):
            norms[parameter] = 0.0 if gradient is None else _squared_norm(gradient)
            if gradient is not None:
                self._dtypes.add(parameter.dtype)
        hidden = {p for of in self._together for p in of} - self._alone.keys()
        each = [((p,), self._alone[p]) for p in parameters if p not in hidden]
        for of, comparison in (*each, *self._together.items()):
            own = [p for p in of if p in norms]
            comparison.name = ", ".join(names[p] for p in own)
            comparison.elements = sum(p.numel() for p in own)
            comparison.gradient = sum(norms[p] for p in own)
            comparison.uses = {name: use for p in own for name, use in self._uses[p].items()}
        return [*[comparison for _, comparison in each], *self._together.values()]

    def differing(self, compared: Sequence[Comparison]) -> list[Comparison]:
        """The parameters for which rounding cannot explain how far both sides are apart.

        A sum of n numbers errs by about √n roundings, and no longer changes beyond n = 1 / ε: so a
        right computation may be off by √ε, relative to the average of uᵀ G u. Where the parts of a
        gradient cancel (the bias in front of a normalisation), only their rounding is left, whose
        square is ε² of theirs; the size of these parts is taken from the network's whole gradient.
        Where gradients vanish, each product in the Gramian may be below the smallest number.
        """
        losses = self.survey.losses
        is_tf32 = losses.is_cuda and _may_be_tf32(self.survey.nodes)
        t = sqrt(max(_epsilon(dtype, is_tf32=is_tf32) for dtype in self._dtypes))
        total = sum(max(c.scale, c.gradient) for c in compared)
        dtype = torch.promote_types(losses.dtype, torch.float32)
        lost = torch.finfo(dtype).tiny * losses.numel() ** 2
        return [
            c
            for c in compared
            if abs(c.gramian - c.gradient)
            > t * max(c.scale, c.gramian) + t * t * total + lost * c.elements
        ]


class Schedule:
    """When to verify, and with which vector.

    ``"first"`` is for the calls 1, 2, 4, ..., 64, then each 64th, and whenever the graph behind the
    losses is new in more than sizes.
    """

    def __init__(self, mode: Verify) -> None:
        self.calls = 0
        self.confirmed = 0  # the number of the last call whose check has found nothing wrong
        self._mode = mode
        self._due = 1
        self._checked = Latest[bytes, None]()  # structures of graphs
        # A generator of its own, so that the user's random state is not changed.
        self._generator = torch.Generator("cpu").manual_seed(0)

    def next(self, survey: Survey, *, must: bool) -> Check | None:
        """The check of the next call, with a new vector, if a check is due or must be made.

        The entries of the vector are 1 or 1/2, with random signs: products with powers of two are
        exact, and with entries up to 1 cotangents overflow no sooner than in the pass that is
        verified. Equal entries would not show that samples are mixed, and entries whose sum is zero
        would not show a part that is missing from all objectives alike. Neither is used.
        """
        self.calls += 1
        if self._mode == "first":
            must |= self.calls >= self._due or survey.structure not in self._checked
        if not must and self._mode != "always":
            return None
        losses, m = survey.losses, survey.losses.numel()
        entries = torch.tensor([-1, -0.5, 0.5, 1], device="cpu")
        while True:
            u = entries[torch.randint(4, (m,), generator=self._generator, device="cpu")]
            if m == 1 or (u.sum() != 0 and bool((u != u[0]).any())):
                return Check(survey, u.to(losses.device, losses.dtype).view(losses.shape))

    @property
    def is_confirmed(self) -> bool:
        """Whether a result was found right, or results are never checked."""
        return self._mode == "never" or self.confirmed > 0

    def note_checked(self, survey: Survey, *, is_confirmed: bool) -> None:
        """Notes that the last call was checked. A call that failed before leaves its check due."""
        self._checked[survey.structure] = None
        if is_confirmed:
            self.confirmed = self.calls
        if self.calls >= self._due:
            self._due = self.calls + min(self.calls, _LONGEST)


_SILENCING = threading.Lock()
# Hooks that are kept from running, and by which blocks, by the `id` of the dict that held them.
_SILENT: dict[int, tuple[dict[int, Any], set[object]]] = {}


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keeps hooks on gradients from running: a user's hook may count, send, or change gradients."""
    hooks = [p._backward_hooks for p in parameters if p._backward_hooks is not None]
    block = object()
    with undone(partial(_put_back, hooks, block)):
        with _SILENCING:
            for held in hooks:
                _SILENT.setdefault(id(held), (dict(held), set()))[1].add(block)
                held.clear()  # autograd holds the same object
        yield


def _put_back(hooks: Sequence[dict[int, Any]], block: object) -> None:
    """Puts hooks back that a block has silenced, unless another thread is in the middle of one."""
    with _SILENCING:
        for held in hooks:
            silent, blocks = _SILENT.get(id(held), ({}, set()))
            if not blocks - {block}:
                held.update(silent)
                _SILENT.pop(id(held), None)
            blocks.discard(block)


def _form_of(u: Tensor, part: Tensor) -> tuple[float, float]:
    """uᵀ G u of a part of the Gramian, and its mean over the signs of u."""
    u = u.flatten().to(part.device, torch.float64)
    matrix = part.reshape(len(u), len(u)).to(torch.float64)
    return float(u @ matrix @ u), float(u.square() @ matrix.diagonal())


def _squared_norm(gradient: Tensor) -> float:
    """The squared norm of a gradient, in double precision."""
    values = as_real(gradient.coalesce().values() if gradient.is_sparse else gradient)
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)  # PyTorch promotes no float8
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _epsilon(dtype: torch.dtype, *, is_tf32: bool) -> float:
    """The distance from 1 to the next number of a dtype, or what TF32 products keep of it."""
    is_coarse = is_tf32 and dtype == torch.float32
    return _EPSILON_OF_TF32 if is_coarse else float(torch.finfo(dtype).eps)


def _may_be_tf32(nodes: Iterable[Any]) -> bool:
    """Whether a GPU may have rounded what was multiplied in float32 behind some nodes.

    PyTorch's default is that convolutions and recurrent layers do, and matrix products do not.
    """
    backends: Any = torch.backends  # typed without these modules
    if backends.cuda.matmul.fp32_precision not in _EXACT:
        return True
    of_cudnn = backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision
    return not set(of_cudnn) <= _EXACT and any(map(_may_call_cudnn, nodes))


def _may_call_cudnn(node: Any) -> bool:
    """Whether a node is a convolution or a recurrent layer, or may hide one."""
    operation = kind_of_node(node.__class__).operation
    return operation.startswith(_BY_CUDNN) if operation else use_of(node) is None
