"""Decisions: what is to be done with a torch call, by the statuses of the tensors that it reads.

No call is carried out here. The only thing noted is the edge of a derived tensor at its first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autogram._capture.autograd.exact import autocast_dtype
from autogram._capture.forward.calls import Kind, changed_part, first_of, inlined
from autogram._capture.tracked import BATCHED, UNTAPPED, Status, Tracked, as_of_now
from autogram._capture.uses import KeptRecipe
from autogram._errors import UnsupportedError
from autogram.rules import Rule, find_rule, holds_for_complex
from autogram.rules.composed import COMPOSED
from autogram.rules.expansion import EXPANSIONS, SPREADS, formula_of_expansion, spread_shape

Reads = list[tuple[Tensor, Tracked]]
"""The tracked tensors that a call reads, with their statuses, as often as the call reads them."""


class NoUse(NamedTuple):
    """No use: the call is carried out as it is."""

    is_batched: bool
    """Whether the results depend on the samples."""
    origins: Sequence[Tracked] = ()
    """The tensors that results are derived from, if not batched; none where they are constants."""


class Answer(NamedTuple):
    """The recipes of a rule for one result of a call."""

    reads: list[Tracked]
    """The tracked tensors that have recipes, once for each recipe."""
    recipes: list[KeptRecipe]
    saved: list[Tensor]
    """The tensors that the tap has to save. Each recipe knows which of these it needs."""
    from_result: dict[int, Callable[[Tensor], tuple[Tensor, ...] | None]]
    """What gives other tensors to save, from the result, by the position of the recipe."""


class UseRule(NamedTuple):
    """A use whose blocks a rule knows."""

    rule: Callable[..., Any]
    answers: dict[int, Answer]
    """Keys: the index of the result."""
    is_guess: bool = False
    """Whether a size alone shows that samples are in the results."""


class Batch(NamedTuple):
    """What is known of the samples, to tell whether a tensor is expanded over them."""

    samples: Any = 1
    """How many there are; 1 where nothing is to be taken for expanded over them."""
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
    if not is_batched:
        derived = NoUse(is_batched=False, origins=[status for _, status in tracked])
        return _spread_use(kind, args, kwargs, reads, batch) or derived
    is_sparse = is_complex = False
    for tensor, _ in reads:
        if tensor.is_nested:
            # Without a shape of numbers, a tensor shows no places of samples.
            raise UnsupportedError(
                f"`{kind.name}` was called with a nested tensor and a parameter. Pad the samples "
                "to one length, and mask what was added; or put them one behind the other in one "
                "tensor."
            )
        is_sparse |= tensor.layout != torch.strided
        is_complex |= tensor.is_complex()
    now: Reads = []
    for tensor, status in tracked:
        if tensor.is_inference():
            raise UnsupportedError(
                f"`{kind.name}` was called with a parameter that was made in inference mode, of "
                "which PyTorch drops some gradients. Make the module outside of "
                "`torch.inference_mode`, or put `nn.Parameter(parameter.clone())` in the place of "
                "its parameters."
            )
        now.append((tensor, status if tensor.is_leaf else as_of_now(tensor, status)))
    # Sparse tensors are no factors.
    is_special = is_sparse or (is_complex and not holds_for_complex(kind.function))
    rule = None if is_bare or is_special else find_rule(kind.function)
    # Of an expanded tensor, a call may save more. A tap on a part of a tensor would be no node of
    # the graph, and an expansion has a tap of its own.
    is_change = kind.changes_slices and changed_part(kind, args, kwargs) is not None
    may_expand = not is_bare and (rule is None or is_change)
    if may_expand and (expansions := _expansions(kind, args, kwargs, now)):
        return UseExpanded(expansions)
    body = inlined(kind.function) if rule is None else None
    if rule in COMPOSED:
        body = COMPOSED[rule](args)
    if body is not None:
        return RunBody(body)
    if rule is None:
        return UseRows(now)
    answers = _ask(rule, args, kwargs, now)
    return UseRows(now) if answers is None else UseRule(rule, answers)


def _spread_use(
    kind: Kind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reads: Sequence[tuple[Tensor, Status]],
    batch: Batch,
) -> UseRule | UseExpanded | None:
    """A use by a call that reads no batched tensor, if the call spreads parameters over samples.

    Such a call expands or repeats a tracked tensor, or reads a constant that is for all samples, as
    an embedding does with the positions of all. Of a tensor that is derived so, each row would
    be pulled back through all samples.
    """
    if batch.samples in (0, 1):
        return None
    tracked = [(x, status) for x, status in reads if isinstance(status, Tracked)]
    if any(p in batch.unspread for _, status in tracked for p in status.sources):
        return None
    if kind.function in SPREADS:
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
        now = as_of_now(tensor, status)
        return _use_of_expansion(spread_shape, tensor, now, shape)._replace(is_guess=True)
    # A constant that is for all samples counts as batched.
    of_samples = [status is None and are_of_samples(x, batch) for x, status in reads]
    if True not in of_samples:
        return None
    marked = [(x, BATCHED if is_so else s) for (x, s), is_so in zip(reads, of_samples, strict=True)]
    use = decide(kind, args, kwargs, marked, is_bare=False, batch=NO_BATCH)
    if isinstance(use, UseExpanded):
        guesses = [x._replace(use=x.use._replace(is_guess=True)) for x in use.expansions]
        return UseExpanded(guesses)
    return use._replace(is_guess=True) if isinstance(use, UseRule) else None


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


def _use_of_expansion(
    find: Callable[..., Any], tensor: Tensor, status: Tracked, shape: tuple[int, ...]
) -> UseRule:
    """The use by a call that expands a tensor to a shape."""
    recipe = KeptRecipe((status,), formula_of_expansion(tensor, shape), slice(0, 0))
    return UseRule(find, {0: Answer([status], [recipe], [], {})})


def _expansions(
    kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], reads: Reads
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
        use = _use_of_expansion(find, tensor, status, shape)
        found.append(Expansion(tensor, dtype, shape, use))
    return found


_range = lru_cache(maxsize=64)(slice)  # few are different, and each use keeps some


def _ask(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], now: Reads
) -> dict[int, Answer] | None:
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
    answers = {0: Answer([], [], [], {})}
    for tensors, formula, saved, output, from_result in recipes:
        operands = tuple([tracked.get(id(tensor)) for tensor in tensors])
        known = [status for status in operands if status is not None]
        if known:
            if output not in answers:
                answers[output] = Answer([], [], [], {})
            reads, kept, to_save, from_results = answers[output]
            start = len(to_save)
            reads += known
            to_save += saved
            if from_result is not None:
                from_results[len(kept)] = from_result
            kept.append(KeptRecipe(operands, formula, _range(start, len(to_save))))
    # A tensor that is passed twice must have two recipes, or a part of its block would be missing.
    expected = [status for _, status in now]
    for answer in answers.values():
        if answer.reads != expected and sorted(map(id, answer.reads)) != sorted(map(id, expected)):
            return None
    return answers
