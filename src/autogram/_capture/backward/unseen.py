"""Unseen uses: parameters that are used where nothing is recorded, and the cost of these uses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from typing import Literal

from autogram._capture.autograd.graph import is_compiled, shown_by
from autogram._capture.recording import Channel, Recording
from autogram._capture.samples.survey import Survey
from autogram._capture.tracked import track_parameter
from autogram._capture.uses import FallbackUse, Use
from autogram.errors import (
    CompiledPartWarning,
    UnseenUseError,
    UnseenUseWarning,
    UnsupportedError,
    listed,
    warn_user,
)

Unseen = Literal["rows", "error"]


def use_in_tail(survey: Survey) -> FallbackUse | None:
    """The losses as a use of the parameters that they reach past every tap, or ``None``.

    It leaves out parameters that have uses of single nodes there. Unrecorded uses come from a
    penalty on the weights, a method other than ``forward``, a gradient that is
    differentiated again, or a forward pass from before the engine was made.
    """
    losses, channel, names = survey.losses, survey.channel, survey.names
    known = {p for use in survey.tail for tracked in use.reads for p in tracked.sources}
    known.update(survey.left_out)
    inside = [p for p in survey.leaves_of_tail if p in names and p not in known]
    reads = tuple(track_parameter(p) for p in inside)
    if not reads:
        return None
    if channel.before_pass is not None:
        raise UnsupportedError(
            f"The losses use {listed([f'`{names[p]}`' for p in inside])} where calls are not "
            "recorded, and the model is sharded: vector-Jacobian products of one process would "
            "wait for the others. Use these parameters in the `forward` of a module that is passed "
            "to `Engine` before it runs, and penalties in an ordinary backward pass."
        )
    recording = Recording(channel, names, count=-1)  # no other use has the number -1
    return FallbackUse.of(recording, "the losses", losses, reads, tuple(inside), is_seen=False)


def tell_of_unseen(channel: Channel, uses: Sequence[Use], survey: Survey, policy: Unseen) -> None:
    """Tells the user, once, which parameters are used unseen, and what that costs."""
    if "unseen" in channel.told and policy == "rows":
        return
    channel.told.add("unseen")
    objectives = survey.losses.numel()
    by_function: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for use in uses:
        for parameter in dict.fromkeys(p for tracked in use.reads for p in tracked.sources):
            name = use.recording.names[parameter]
            by_function[use.function][name] += objectives * prod(parameter.shape)
    calls = "; ".join(
        f"in {function}, {listed([f'`{name}` ({n} elements)' for name, n in elements.items()])}"
        for function, elements in by_function.items()
    )
    message = (
        "Use these parameters in the `forward` of a module that is passed to `Engine` before it "
        f"runs: {calls}. Calls elsewhere are not recorded. For a custom autograd Function, "
        "register a rule (`autogram.rules.register_rule`). Otherwise, the parameters get explicit "
        f"rows of J, from {objectives} vector-Jacobian products (one for each objective) through "
        "each place."
    )
    if policy == "error":
        raise UnseenUseError(f'{message} To accept this, pass `unseen="rows"` to `Engine`.')
    warn_user(message, UnseenUseWarning)


def tell_of_compiled(channel: Channel, survey: Survey, policy: Unseen) -> None:
    """Tells the user, once, which parameters are read in compiled parts that hide their calls.

    A part shown to another engine hides nothing: this engine was paused, or is younger.
    """
    hidden = [node for node in survey.nodes if is_compiled(node) and not shown_by(node)]
    if not hidden or ("compiled" in channel.told and policy == "rows"):
        return
    read = [
        getattr(following, "variable", None) for x in hidden for following, _ in x.next_functions
    ]
    names = channel.parameters()
    unseen = [f"`{names[p]}`" for p in dict.fromkeys(read) if p is not None and p in names]
    if not unseen:
        return
    channel.told.add("compiled")
    message = (
        'Compile with `torch.compile(model, backend="autogram")` or '
        '`layer.compile(backend="autogram")`: another compiled part hides its uses of '
        f"{listed(unseen)}, which get explicit rows of J: exact, but with a backward pass through "
        "the part for each objective."
    )
    if policy == "error":
        raise UnseenUseError(f'{message} To accept this, pass `unseen="rows"` to `Engine`.')
    warn_user(message, CompiledPartWarning)
