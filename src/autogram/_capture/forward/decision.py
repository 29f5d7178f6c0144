"""Decisions: what is to be done with a torch call, by the statuses of the tensors that it reads.

No call is carried out here. The only thing noted is the edge of a derived tensor at its first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.exact import autocast_dtype
from autogram._capture.forward.calls import Kind, changed_part, first_of, inlined
from autogram._capture.tracked import BATCHED, UNTAPPED, Status, Tracked, as_of_now
from autogram.errors import UnsupportedError
from autogram.rules import Recipe, Rule, find_rule, holds_for_complex
from autogram.rules.composed import COMPOSED
from autogram.rules.expansion import EXPANSIONS, SPREADS, recipe_of_expansion, spread_shape

Reads = list[tuple[Tensor, Tracked]]
"""The tracked tensors that a call reads, with their statuses, as often as the call reads them."""


class NoUse(NamedTuple):
    """No use: the call is carried out as it is."""

    is_batched: bool
    """Whether the results depend on the samples."""
    origins: Sequence[Tracked] = ()
    """The tensors that results are derived from, if not batched; none where they are constants."""


Answer = tuple[tuple[Tracked | None, ...], Recipe]
"""A recipe of a rule, and the status of each of its operands: ``None`` where it is not tracked."""


class UseRule(NamedTuple):
    """A use whose blocks a rule knows."""

    rule: Callable[..., Any]
    answers: dict[int, list[Answer]]
    """By the index of the result."""
    is_guess: bool = False
    """Whether a size alone shows that samples are in the results."""


class Batch(NamedTuple):
    """What is known of the samples, to tell whether a tensor is expanded over them."""

    samples: Any = 1
    """How many there are; with 1, no tensor counts as expanded over them."""
    unspread: Collection[Tensor] = ()
    """Parameters that turned out to be expanded over something else of the same size."""

    def is_size(self, size: int) -> bool:
        """Whether a size is that of the samples."""
        return bool(size == self.samples)

    def is_over(self, shape: Sequence[int], expanded: Sequence[bool]) -> bool:
        """Whether some dimensions of a shape, which are expanded, are likely to be of samples."""
        pairs = zip(shape[:2], expanded, strict=False)
        return any(is_expanded and self.is_size(size) for size, is_expanded in pairs)


NO_BATCH = Batch()


class Expansion(NamedTuple):
    """What becomes of a tensor before a call."""

    tensor: Tensor
    dtype: torch.dtype
    """As autocast would round the tensor for the call."""
    shape: tuple[int, ...]
    use: UseRule
    """What is known of the expansion, as a call of its own."""


class UseExpanded(NamedTuple):
    """A use that broadcasts tracked tensors, which are expanded and tapped before the call."""

    expansions: list[Expansion]


class RunBody(NamedTuple):
    """A use in a function whose body, in Python, is carried out and recorded instead."""

    body: Callable[..., Any]


class UseRows(NamedTuple):
    """A use without a rule."""

    reads: Reads


Decision = NoUse | UseRule | UseExpanded | RunBody | UseRows

_BATCHED, _CONSTANT = NoUse(is_batched=True), NoUse(is_batched=False)


def decide(
    kind: Kind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reads: Sequence[tuple[Tensor, Status]],
    *,
    is_bare: bool,
    batch: Batch,
) -> Decision:
    """What is to be done with a call, which reads the elements of some tensors.

    A call of tracked tensors and constants derives a tensor. A call in which tracked tensors meet
    batched tensors is a use, and so is one that expands a tracked tensor over the samples of the
    ``batch``. A call that ``is_bare`` may run again unrecorded, so that its tap must save nothing.
    """
    is_batched = False
    tracked: Reads = []
    for tensor, status in reads:
        if status is BATCHED or status is UNTAPPED:
            is_batched = True
        elif status is not None:
            tracked.append((tensor, status))
    if not tracked or not torch.is_grad_enabled():
        return _BATCHED if is_batched else _CONSTANT
    if is_batched:
        return _use(kind, args, kwargs, reads, tracked, is_bare=is_bare)
    derived = NoUse(is_batched=False, origins=[status for _, status in tracked])
    if batch.samples in (0, 1) or any(p in batch.unspread for _, x in tracked for p in x.sources):
        return derived
    # Where it is spread over the samples, each row would be pulled back through all of them.
    if kind.function in SPREADS:
        return _spread(kind, args, kwargs, tracked, batch) or derived
    # A constant that is for all samples counts as batched, as positions that an embedding reads.
    if not any(status is None and are_of_samples(x, batch) for x, status in reads):
        return derived
    use = _use(kind, args, kwargs, reads, tracked, is_bare=is_bare, is_guess=True)
    return use if isinstance(use, (UseRule, UseExpanded)) else derived


def _use(
    kind: Kind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reads: Sequence[tuple[Tensor, Status]],
    tracked: Reads,
    *,
    is_bare: bool,
    is_guess: bool = False,
) -> Decision:
    """How to carry out a use."""
    is_sparse = is_complex = False
    for tensor, _ in reads:
        if tensor.is_nested:
            # Without a shape of numbers, a tensor shows no places of samples.
            raise UnsupportedError(
                f"`{kind.name}` was called with a nested tensor and a parameter. Pad the samples "
                "to one length, and mask the padding; or concatenate them in one tensor."
            )
        is_sparse |= tensor.layout != torch.strided
        is_complex |= tensor.is_complex()
    now: Reads = []
    for tensor, status in tracked:
        if tensor.is_inference():
            raise UnsupportedError(
                f"`{kind.name}` was called with a parameter that was made in inference mode: "
                "PyTorch drops some of its gradients. Make the module outside "
                "`torch.inference_mode`, or replace its parameters by "
                "`nn.Parameter(parameter.clone())`."
            )
        now.append((tensor, status if tensor.is_leaf else as_of_now(tensor, status)))
    # Sparse tensors are no factors.
    is_special = is_sparse or (is_complex and not holds_for_complex(kind.function))
    rule = None if is_bare or is_special else find_rule(kind.function)
    # Of an expanded tensor, a call may save more. A tap on a part of a tensor would be no node of
    # the graph, and an expansion has a tap of its own.
    is_change = kind.changes_slices and changed_part(kind, args, kwargs) is not None
    may_expand = not is_bare and (rule is None or is_change)
    if may_expand and (found := _expansions(kind, args, kwargs, now, is_guess=is_guess)):
        return UseExpanded(found)
    body = inlined(kind.function) if rule is None else None
    if rule in COMPOSED:
        body = COMPOSED[rule](args)
    if body is not None:
        return RunBody(body)
    if rule is None or (answers := _ask(rule, args, kwargs, now)) is None:
        return UseRows(now)
    return UseRule(rule, answers, is_guess)


def _spread(
    kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: Reads, batch: Batch
) -> UseRule | None:
    """The use by a call that expands or repeats a tracked tensor over the samples, if it does."""
    try:
        shape = spread_shape(kind.function, *args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return None  # the call says what is wrong with its arguments
    (tensor, status), *others = tracked
    if others or shape is None:
        return None
    expanded = [*(True,) * (len(shape) - tensor.dim()), *(n == 1 for n in tensor.shape)]
    if not batch.is_over(shape, expanded):
        return None
    answer = (as_of_now(tensor, status),), recipe_of_expansion(tensor, shape)
    return UseRule(spread_shape, {0: [answer]}, is_guess=True)


def are_of_samples(constant: Tensor, batch: Batch) -> bool:
    """Whether a constant is likely to be for all samples: expanded over them, or made for each.

    What a model makes for each sample has their number in front: types of tokens, which are zero,
    boxes of words that have none, waves for the positions of each image, the state in which a
    recurrence begins. A table for pairs of positions has one size twice.
    """
    if constant.layout != torch.strided:
        return False
    if batch.is_over(constant.shape, [n == 0 for n in constant.stride()]):
        return True
    if constant.dim() < 2:
        return False
    size, following = constant.shape[:2]
    return batch.is_size(size) and not batch.is_size(following)


def _expansions(
    kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], reads: Reads, *, is_guess: bool
) -> list[Expansion]:
    """How to expand all tracked tensors of a call, or nothing if that is not known.

    Gradients stay what they are, bit for bit, but for attention in half precision, which may add up
    the samples in float32, and for the last bits of gradients of powers. Of a tensor that is passed
    twice PyTorch adds two sums up, and autocast rounds a leaf once for all calls, so that these are
    not expanded.
    """
    find = EXPANSIONS.get(kind.function)
    if find is None or len({id(tensor) for tensor, _ in reads}) < len(reads):
        return []
    try:
        shapes = {id(x): shape for x, shape in find(*args, **kwargs)}
    except (RuntimeError, TypeError):
        return []  # the call says what is wrong with its arguments
    if kind.is_in_place:
        shapes.pop(id(first_of(args, kwargs)), None)
    found: list[Expansion] = []
    for tensor, status in reads:
        shape, dtype = shapes.get(id(tensor)), tensor.dtype
        if torch._C._is_any_autocast_enabled() and dtype != torch.float64:
            rounded = autocast_dtype(tensor.device.type) or dtype
            is_rounded = kind.is_in_half and dtype != rounded
            if (is_rounded and tensor.is_leaf) or (not kind.is_in_half and dtype != torch.float32):
                return []
            dtype = rounded if kind.is_in_half else dtype
        if shape is None:
            return []
        use = UseRule(find, {0: [((status,), recipe_of_expansion(tensor, shape))]}, is_guess)
        found.append(Expansion(tensor, dtype, shape, use))
    return found


def _ask(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], now: Reads
) -> dict[int, list[Answer]] | None:
    """The answers of a rule for a call, or ``None`` if a tracked tensor has no recipe."""
    try:
        recipes = rule(*args, **kwargs)
    except TypeError as error:
        try:
            inspect.signature(rule).bind(*args, **kwargs)
        except TypeError:
            return None  # an overload of the function that the rule was not written for
        raise error
    if recipes is None:
        return None
    tracked = {id(tensor): status for tensor, status in now}
    answers: dict[int, list[Answer]] = {0: []}
    for recipe in recipes:
        operands = tuple([tracked.get(id(tensor)) for tensor in recipe.operands])
        if any(operands):
            answers.setdefault(recipe.output, []).append((operands, recipe))
    # A tensor that is passed twice must have two recipes, or a part of its block would be missing.
    expected = sorted([id(status) for _, status in now])
    for found in answers.values():
        if (
            sorted([id(status) for operands, _ in found for status in operands if status])
            != expected
        ):
            return None
    return answers
