"""Ordinary passes: rows of objectives of the whole batch, by a backward pass for each of them.

Where the batch is one sample, the Gramian of most layers is computed from rows, and a row is what
PyTorch gives as a gradient. A pass for all objectives at once would need their cotangents at the
same time, and many operators are slow with a further dimension.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from autogram._blocks import Region, as_real, rows_block
from autogram._capture.autograd.graph import in_dense
from autogram._capture.autograd.passes import Pass
from autogram._capture.backward.assembly import Assembly
from autogram._capture.backward.run import Run, Summary
from autogram._capture.backward.verification import without_hooks
from autogram._capture.recording import Recording
from autogram._capture.tracked import track_parameter
from autogram._capture.uses import FallbackUse

# The pass for all objectives holds the cotangents of a node's result and input together.
_HELD_BY_A_PASS = 2


def are_rows_cheaper(run: Run, known: Summary | None) -> bool:
    """Whether to make a pass for each objective, by what is ``known`` of such a graph.

    Not if factors are asked for, or if the Gramian of most columns is computed without rows; if all
    rows together need more memory than there is room for, and than the cotangents of all objectives
    do; or if the device would wait for the launches of more passes. Behind a wrong guess, a pass
    for all objectives might need many times the memory of a step.
    """
    survey, m = run.survey, run.objectives.per_sample
    is_alone = run.channel.before_pass is None and run.channel.listener is None
    if m == 1 or run.form == "factors" or not is_alone or survey.may_hide_taps:
        return False
    parameters, sizes = survey.inside, [prod(use.shape) for use in survey.uses]
    read = {p for use in survey.uses for tracked in use.reads for p in tracked.sources}
    if not read.issubset(parameters):
        return False  # some are no leaves
    elements = sum(p.numel() for p in parameters)
    device, dtype = run.objectives.losses.device, run.objectives.losses.dtype
    kernels = run.devices.on(device)
    room = max(kernels.room(device), _HELD_BY_A_PASS * m * max(sizes, default=0))
    if not parameters or m * elements > room:
        return False
    prices = kernels.prices(dtype)
    waits = len(sizes) * prices.call > prices.memory * sum(sizes)
    are_rows = known is not None and 2 * known.elements_of_rows >= elements
    return run.is_misled or (are_rows and not waits)


def assemble_rows(run: Run) -> None:
    """Gives a run the columns of all parameters, as :func:`assemble` does, from ordinary passes."""
    losses, parameters = run.objectives.losses, run.survey.inside
    cotangents = run.objectives.cotangents()
    gradients: dict[Tensor, list[Tensor | None]] = {parameter: [] for parameter in parameters}
    for number, cotangent in enumerate(cotangents, 1):
        is_needed = run.retain_graph or number < len(cotangents)
        current = Pass(run.channel, is_step=run.is_step)
        with without_hooks(parameters):
            # A copy, because the backward pass of `as_strided_scatter` is wrong for a part.
            own = cotangent.clone()
            found = current.differentiate(losses, parameters, own, retain_graph=is_needed)
        for rows_of, gradient in zip(gradients.values(), found, strict=True):
            rows_of.append(gradient)
    assembly = Assembly(run, is_by_use=False)
    whole = Recording(run.channel, run.survey.names, count=-1)
    use = FallbackUse.of(whole, "an ordinary pass", losses, (), ())
    while gradients:
        parameter, rows_of = gradients.popitem()
        dense = [None if x is None else as_real(in_dense(x)) for x in rows_of]
        like = next((x for x in dense if x is not None), None)
        if like is not None:
            rows = torch.stack([torch.zeros_like(like) if x is None else x for x in dense])
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            tracked, region = track_parameter(parameter), Region.of_parameter(parameter)
            assembly.add(use, None, None, (tracked, region, rows_block(rows.unsqueeze(1))))
            assembly.finish(parameter)
    assembly.complete()
