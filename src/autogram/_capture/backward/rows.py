"""Rows of objectives of the whole batch, with an ordinary backward pass for each of them.

If the batch is one sample, most layers' Gramian is computed from rows, and a row is a gradient by
PyTorch. A single pass for all objectives would hold all their cotangents at the
same time, and many operators are slow with an additional dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._blocks import Devices, Keep, Region, Rows, as_real, rows_block
from autogram._capture.autograd.grad import at_least_single
from autogram._capture.autograd.graph import in_dense, kind_of_node
from autogram._capture.autograd.passes import Pass
from autogram._capture.backward.run import Run, Summary, refuse_unconnected
from autogram._capture.backward.verification import without_hooks
from autogram._capture.recording import Recording
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.tracked import track_parameter
from autogram._capture.uses import FallbackUse

# The pass for all objectives holds the cotangents of a node's result and input together.
_HELD_BY_A_PASS = 2


def are_rows_cheaper(
    survey: Survey, devices: Devices, form: Keep | None, known: Summary | None, *, is_misled: bool
) -> bool:
    """Whether to make a pass for each objective.

    Yes if all rows stay in a cache, whatever factors would cost. Otherwise yes if the Gramian of
    most columns is computed from rows, as is ``known`` from an earlier such graph, and if all rows
    together fit in the available memory, or need no more than the cotangents of all objectives.
    No if factors are requested, or if the device would wait for the launches of more
    passes. After a wrong guess (``is_misled``), a pass for all objectives might need many
    times the memory of a step.
    """
    losses, channel, parameters = survey.losses, survey.channel, survey.inside
    is_alone = channel.before_pass is None and channel.listener is None
    if form == "factors" or not is_alone or survey.may_hide_taps or not parameters:
        return False
    if not all(_is_plain(p, losses.device) for p in parameters):
        return False
    read = {p for use in survey.uses for tracked in use.reads for p in tracked.sources}
    if not read.issubset(parameters):
        return False  # some are not leaves
    kernels, m = devices.on(losses.device), losses.numel()
    elements, sizes = sum([p.numel() for p in parameters]), [prod(x.shape) for x in survey.uses]
    prices = kernels.prices(losses.dtype)
    waits = m > 1 and len(sizes) * prices.call > prices.memory * sum(sizes)
    if not waits and m * elements <= kernels.at_once(m * elements, losses):
        return True
    room = max(kernels.room(losses.device), _HELD_BY_A_PASS * m * max(sizes, default=0))
    are_rows = known is not None and 2 * known.elements_of_rows >= elements
    return m * elements <= room and (is_misled or (are_rows and not waits))


def assemble_rows(run: Run) -> None:
    """Gives a run the columns of all parameters, like :func:`assemble`, from ordinary passes.

    It also gives the gradients of the run's other leaves, objective by objective.
    """
    survey, device = run.survey, run.survey.losses.device
    inside = set(survey.inside)
    parameters = [p for p in survey.names if p in inside]
    n, m = len(parameters), survey.losses.numel()
    dtype = reduce(torch.promote_types, [at_least_single(p.dtype.to_real()) for p in parameters])
    sizes = [as_real(p).numel() for p in parameters]
    matrix = torch.empty(m, sum(sizes), dtype=dtype, device=device)
    nothing, reached = matrix.new_zeros(1), [False] * n
    pending = iter(matrix)

    def take(gradients: tuple[Tensor | None, ...]) -> None:
        parts = []
        for i, size in enumerate(sizes):
            gradient = gradients[i]
            reached[i] |= gradient is not None
            dense = nothing.expand(size) if gradient is None else as_real(in_dense(gradient))
            parts.append(dense.reshape(-1))
        torch.cat(parts, out=next(pending))
        rest = zip(run.others, gradients[n:], strict=True)
        run.rest.append({leaf: x for leaf, x in rest if x is not None})

    run.rest.clear()
    leaves = [*parameters, *run.others]
    with without_hooks(leaves):
        Pass(run.channel, is_step=run.is_step).differentiate_each([*_outputs(run)], leaves, take)
    if not any(reached):
        refuse_unconnected()
    rows = Rows(dict(zip(parameters, reached, strict=True)), matrix, run.devices.on(device))
    for each in (run.check, *run.sinks):
        if each is not None:
            each.restart(run.objectives)
    for sink in run.sinks:
        for parameter, columns in rows.items():
            sink.take(parameter, columns)
    if run.summary is not None:
        _summarise(rows, run, run.summary)
    run.columns = rows
    if run.is_summed:
        run.gramian = rows.gramian()


def few_others(survey: Survey, devices: Devices) -> list[Tensor]:
    """The leaves outside of J, if the gradients of all leaves stay in a cache."""
    losses, others = survey.losses, [x for x in survey.outside if x.requires_grad]
    elements = losses.numel() * sum([x.numel() for x in survey.leaves])
    is_few = elements <= devices.on(losses.device).at_once(elements, losses)
    return others if is_few else []


def _outputs(run: Run) -> Iterator[tuple[Tensor | GradientEdge, Tensor, bool]]:
    """For each objective: what to differentiate, its cotangent, and whether to keep the graph.

    Losses that came one by one are differentiated one by one: otherwise zeros for all others
    would pass through their nodes.
    """
    losses = run.survey.losses
    m, node = losses.numel(), losses.grad_fn
    are_joined = run.are_single and kind_of_node(node.__class__).operation == "Cat"
    following = node.next_functions if are_joined and node is not None else ()
    for number in range(m):
        must_retain = run.retain_graph or number < m - 1
        start, index = following[number] if following else (None, 0)
        if start is not None:
            like = start._input_metadata[index]
            cotangent = torch.ones(1, dtype=like.dtype, device=like.device)
            yield GradientEdge(start, index), cotangent, must_retain
        else:
            cotangent = torch.zeros(losses.shape, dtype=losses.dtype, device=losses.device)
            cotangent.view(-1)[number] = 1
            yield losses, cotangent, must_retain


def _is_plain(parameter: Tensor, device: torch.device) -> bool:
    """Whether a parameter's rows can be stored with those of others on a device."""
    is_dense = type(parameter) in (Tensor, torch.nn.Parameter)
    return is_dense and parameter.device == device and parameter.dtype.itemsize > 1


def _summarise(rows: Rows, run: Run, summary: Summary) -> None:
    """Notes each parameter's rows for a report."""
    summary.restart(Objectives(run.survey.losses, None))
    whole = Recording(run.channel, run.survey.names, count=-1)
    use = FallbackUse.of(whole, "an ordinary pass", run.survey.losses, (), ())
    for parameter in rows:
        region, rows_of_parameter = Region.of_parameter(parameter), rows.of(parameter)
        summary.add(
            use, None, None, (track_parameter(parameter), region, rows_block(rows_of_parameter))
        )
        summary.elements_of_rows += parameter.numel()
