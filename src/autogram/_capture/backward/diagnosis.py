"""Diagnosis: the likely cause of a failed verification, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from autogram._capture.backward.assembly import assemble
from autogram._capture.backward.run import Run, rule_name
from autogram._capture.backward.verification import Check, Comparison
from autogram._capture.backward.witness import wrong_product
from autogram._capture.from_graph.ends import ends_at_parameters
from autogram._capture.recording import Channel
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.samples.tail import showing
from autogram.errors import (
    AutogramError,
    CoupledObjectivesWarning,
    NonFiniteError,
    VerificationError,
    listed,
    warn_user,
)

_MOST_NAMED = 8


def confirm(run: Run, check: Check) -> None:
    """Raises if a check shows that a run's result is wrong; otherwise gives the run a witness."""
    compared = check.compare(run.columns)
    _refuse_non_finite(run.gramian, compared)
    differing = check.differing(compared)
    witness, reason = check.witness(), None
    if run.is_summed and witness is not None and witness.why_wrong(run.gramian) is not None:
        witness = check.witness(is_measured=True)
        reason = None if witness is None else witness.why_wrong(run.gramian)
    if not differing and reason is None:
        run.witness = witness
        return
    if reason is not None and not (differing or check.has_hidden):
        raise wrong_product("The Gramian", reason)
    in_whole = _differing_in_whole(run, check) if run.objectives.samples > 1 else differing
    concerned = in_whole or differing
    lines = [f"  {_describe(c)}" for c in concerned[:_MOST_NAMED]] or [f"  the Gramian: {reason}"]
    if len(concerned) > _MOST_NAMED:
        lines.append(f"  and {len(concerned) - _MOST_NAMED} others")
    parameters = "\n".join(lines)
    raise VerificationError(
        "The result does not agree with an ordinary backward pass: for a random vector u, Jᵀ u is "
        f"not the gradient of u times the losses. Look at\n{parameters}\n{_cause(in_whole)}",
        gaps={c.name: c.gap for c in concerned},
        is_of_samples=not in_whole,
    )


def tell_of_coupling(channel: Channel, samples: int, error: AutogramError) -> None:
    """Tells the user, once, that the whole batch counts as one sample, and why."""
    if "coupled" in channel.told:
        return
    channel.told.add("coupled")
    counted = [of.counted for of in channel.recordings if of.counted is not None]
    sizes = {n for of in counted for some in of.inputs for n in some}
    if sizes and samples not in sizes:
        message = (
            "Pass `batch_dim=None` to `Engine`, which gives the same result without this warning. "
            f"There are {samples} losses, and no input of the modules has as many "
            "samples: each loss depends on the whole batch, as with several tasks."
        )
    else:
        message = (
            "Pass `batch_dim=None` to `Engine`, or a list or a dict of losses, if each loss "
            "depends on the whole batch, as with several tasks. If each loss should depend on one "
            "sample, keep the samples apart. The result is exact either way, but takes one "
            f"backward pass for each loss: {error}"
        )
    warn_user(message, CoupledObjectivesWarning)


def _differing_in_whole(run: Run, check: Check) -> list[Comparison]:
    """Parameters that differ when the losses are one objective of one sample, without layouts."""
    with torch.enable_grad():
        total = (run.survey.losses * check.vector).sum()
    survey = Survey(run.channel, total)
    if run.channel.reads_graph:
        survey.read_at(ends_at_parameters(survey.graph))
    whole = Check(survey, torch.ones_like(total))
    whole.begin()
    objectives = Objectives(total, None)
    of_total = Run(run.channel, run.devices, survey, objectives, whole, form=run.form)
    with showing(survey.tail):
        assemble(of_total)
    return whole.differing(whole.compare(of_total.columns))


def _refuse_non_finite(gramian: Tensor, compared: Sequence[Comparison]) -> None:
    """Raises if a value is infinite or not a number, which makes verification impossible."""
    finite = torch.isfinite(gramian.diagonal())
    if not finite.all():
        bad = [str(i) for i in (~finite).nonzero().flatten().tolist()]
        extent = (
            "Only their rows and columns of the Gramian are concerned."
            if torch.isfinite(gramian[finite][:, finite]).all()
            else "Other entries of the Gramian are not finite either."
        )
        raise NonFiniteError(
            "The Gramian cannot be verified: the gradients of the objectives "
            f"{listed(bad)} (in the row-major order of the losses) are infinite or not a number. "
            f"{extent} Look for a division by zero or an overflow in these samples; "
            "`torch.autograd.detect_anomaly()` finds it."
        )
    names = [f"`{c.name}`" for c in compared if not isfinite(c.engine + c.autograd)]
    if names:
        raise NonFiniteError(
            "The Gramian cannot be verified: the gradients of "
            f"{listed(names)} are infinite or not a number. Look for a division by zero or an "
            "overflow. If the gradients of each single objective are finite, their sum overflows: "
            "in half precision, scale the losses down."
        )


def _cause(in_whole: Sequence[Comparison]) -> str:
    """The likely cause, and its fix, from the parameters that differ if the batch is one sample."""
    if not in_whole:
        return (
            "Pass `batch_dim=None` to `Engine` (exact for any losses, slower). With the whole "
            "batch as one sample, the gradients agree, so no use is missing and every rule is "
            "right: the samples are mixed, or the engine has located them wrongly. Batch "
            "normalisation in training mode and losses that compare samples mix them, and so may a "
            "hook on a gradient, which is not in autograd's graph."
        )
    rules = dict.fromkeys(rule_name(use) for c in in_whole for use in c.uses.values())
    foreign = [f"`{rule}`" for rule in rules if rule and not rule.startswith("autogram.")]
    if foreign:
        return (
            f"The rules {', '.join(foreign)} are not autogram's own: compare the Gramian of a "
            "small model with `autogram.testing.reference_jacobian`, and correct the equation, or "
            "do not register the rule (the call is then exact, but slower)."
        )
    lacking = [f"`{c.name}`" for c in in_whole if c.engine < c.autograd and not c.uses]
    missing = (
        f"A use of {listed(lacking) or 'them, perhaps,'} was not recorded: an operation that the "
        "recorder cannot see, such as one that keeps a parameter outside the modules' "
        "`forward`. Call it in the `forward` of a module given to `Engine`, or write it with torch "
        "functions."
    )
    if lacking:
        return missing
    return (
        f"{missing} Or backward passes differ from each other: a hook that clips, randomness, a "
        "checkpoint that computes something else the second time, running statistics that a later "
        "forward pass has changed. Otherwise, it is a bug of autogram: please report it with these "
        "lines."
    )


def _describe(comparison: Comparison) -> str:
    """Describes a parameter, its error, and the calls that use it."""
    uses = []
    for use in comparison.uses.values():
        rule = rule_name(use)
        uses.append(f"`{use.function}` (" + (f"rule `{rule}`)" if rule else "without a rule)"))
    seen = f"used in {', '.join(uses)}" if uses else "without a recorded use"
    at = f", most at the entry {comparison.entry}" if comparison.entry else ""
    return (
        f"`{comparison.name}`: norms {comparison.engine:.6g} and {comparison.autograd:.6g}, "
        f"{comparison.gap:.1e} apart{at}, {seen}"
    )
