"""Tools for tests against plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Columns, Folded, Kernels, Layout, Limit, Region, Routed, as_real
from autogram._capture.autograd.cotangents import visit
from autogram._capture.forward.calls import kind_of
from autogram._capture.forward.recorder import Recorder
from autogram._capture.forward.tapping import Tapping
from autogram._capture.recording import Channel
from autogram._capture.uses import RuleUse, Use, one_sample_each
from autogram._containers import map_tensors, tensors_in
from autogram.errors import RuleCheckError
from autogram.rules import find_rule

__all__ = ["check_rule", "reference_jacobian"]


def reference_jacobian(losses: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The Jacobian from plain autograd, one objective at a time.

    Args:
        losses: Objectives, any shape with m elements. Their graph is kept.
        parameters: Tensors with n elements in total, in the order of the columns. Those that do
            not require a gradient are left out.

    Returns:
        ``(m, n)``, with rows in the row-major order of the losses, from m backward passes; on the
        device of the losses. A complex number has two columns, for its real and imaginary part.
    """
    trainable = [p for p in parameters if p.requires_grad]
    rows = []
    for loss in losses.flatten():
        gradients = torch.autograd.grad(
            loss, trainable, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        dense = [as_real(gradient.to_dense()) for gradient in gradients]
        columns = [gradient.flatten().to(losses.device) for gradient in dense]
        rows.append(torch.cat(columns))
    return torch.stack(rows)


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_PRECISION = 5e-2  # the reference itself is rounded to two or three digits
_PER_SAMPLE = (1, 3)  # numbers of objectives for each sample
_NO_LIMIT = Limit(2**40)


def check_rule(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Compares the rule of a function with plain autograd, for one call.

    The call is recorded as in an engine. The rows of its blocks are compared with autograd's rows
    for random cotangents: with the batch as one sample, with the samples in each
    dimension of the output that the rule allows, with the samples folded with other positions in
    both orders, and with samples in irregular places; each with one and with three objectives
    for each sample.

    Args:
        function: A function with a rule, or one that calls such a function once.
            For a custom autograd Function, the class or its ``apply``.
        args: The arguments of the call. Tensors that require a gradient are the parameters, each
            of which must get a recipe; the other tensors are the inputs, and there must be one.
            Use float64, different sizes, and four or six samples, which can be folded.
        kwargs: Keyword arguments of the call.

    Raises:
        RuleCheckError: The rule is wrong by more than rounding (1e-9 of the largest entry of the
            rows in float64, 1e-4 in float32, 5e-2 in half precision), or has no recipe for a
            parameter. In training, rows would then be computed without the rule: exact, but slower.

    Example:
        >>> import torch
        >>> from autogram.testing import check_rule
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        >>> check_rule(torch.nn.functional.linear, x, weight)
    """
    named = {
        x: f"`args[{key}]`" if isinstance(key, int) else f"`{key}`"
        for key, argument in (*enumerate(args), *kwargs.items())
        for x in tensors_in(argument)
    }
    copies = {x: x.detach().clone().requires_grad_(x.requires_grad) for x in named}
    args, kwargs = map_tensors((args, kwargs), copies.__getitem__)
    names = {copies[x]: name for x, name in named.items() if x.requires_grad}
    if not names:
        raise RuleCheckError(
            "No argument requires a gradient: pass the tensors for which the rule has recipes "
            "with `requires_grad=True`."
        )
    channel = Channel(lambda: names)
    recorder = Recorder(Tapping(channel.begin()))
    recorder.begin((args, kwargs))
    is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    called = function.apply if is_function else function  # type: ignore[attr-defined]  # as just seen
    with recorder:
        output = called(*args, **kwargs)
    computed = args[0] if output is None and args else output  # assignments return nothing
    outputs = [tensor for tensor in tensors_in(computed) if tensor.requires_grad]
    if not outputs:
        raise RuleCheckError(
            f"`{kind_of(function).name}` returned a {type(output).__name__}, not a tensor that "
            "requires a gradient."
        )
    for tensor in outputs:
        _check_output(function, channel, tensor, names)


def _check_output(
    function: Callable[..., Any], channel: Channel, output: Tensor, names: dict[Tensor, str]
) -> None:
    """Checks the blocks of one tensor that the call returned."""
    use, saved, cotangents = _only_use(function, channel, output)
    read = {tracked.sources[0] for tracked in use.reads}
    missed = [name for p, name in names.items() if p not in read]
    if not isinstance(use, RuleUse) or missed:
        raise RuleCheckError(_why_unanswered(function, use, missed or list(names.values())))
    for layout in (None, *_layouts(use)):
        expected = _rows_of_autograd(layout, output, cotangents, names)
        samples = f"for each sample and the samples in {layout} of the output"
        for count in _PER_SAMPLE:
            of = "of the whole batch" if layout is None else samples
            setting = f"with {count} objective{'s' if count > 1 else ''} {of}"
            try:
                rows = _rows_of_blocks(use, layout, cotangents[:count], saved, names)
            except Exception as error:
                raise RuleCheckError(
                    f"The rule of `{use.function}` fails to give a block {setting}: {error}"
                ) from error
            for parameter, name in names.items():
                gap = _gap(name, rows[parameter], expected[parameter][:count])
                if not gap <= _TOLERANCES.get(parameter.dtype.to_real(), _HALF_PRECISION):
                    raise RuleCheckError(
                        f"The rule of `{use.function}` is wrong for {name} of shape "
                        f"{tuple(parameter.shape)}: {setting}, its rows are off by {gap:.1e} of "
                        "their largest entry by plain autograd."
                    )


def _only_use(
    function: Callable[..., Any], channel: Channel, output: Tensor
) -> tuple[Use, tuple[Tensor, ...], Tensor]:
    """The only recorded use, the tensors saved by its tap, and cotangents ``(3, *output)``."""
    shape = (max(_PER_SAMPLE), *output.shape)
    generator = torch.Generator().manual_seed(0)  # the user's random state is not changed
    dtype = torch.complex128 if output.is_complex() else torch.float64
    random = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    cotangents = random.to(output.device, output.dtype)
    shown: list[tuple[Use, tuple[Tensor, ...], Tensor]] = []
    with torch.no_grad():
        visit(channel, output, cotangents, lambda: lambda *of_use: shown.append(of_use))
    if len(shown) != 1 or not torch.equal(shown[0][2], cotangents):
        raise RuleCheckError(
            f"`{kind_of(function).name}` is not a single call in which an input meets parameters: "
            f"{len(shown)} were recorded. Check one call at a time, and give it an input."
        )
    return shown[0]


def _why_unanswered(function: Callable[..., Any], use: Use, missed: list[str]) -> str:
    """The message for a call that the fallback computed."""
    reason = f"The rule of `{kind_of(function).name}` does not take these arguments,"
    hint = "A tensor that is passed twice needs two recipes."
    if find_rule(function) is None:
        reason = f"`{use.function}` has no rule, or its rule"
        hint = "Register the function that a `torch.overrides.TorchFunctionMode` sees."
    return (
        f"{reason} returned `None`, or has no recipe for {', '.join(missed)}, so the fallback "
        f"computes the call: exact, but slower. {hint}"
    )


def _layouts(use: Use) -> Iterator[Layout]:
    """Samples in each dimension that the rule allows: alone, folded with others, and routed.

    And routed in several dimensions together.
    """
    for dim in use.dims:
        size = use.shape[dim]
        if size > 1:
            yield Folded(dim, 1, size, 1)
        factor = next((n for n in range(2, size) if size % n == 0), None)
        if factor:
            yield Folded(dim, factor, size // factor, 1)
            yield Folded(dim, 1, size // factor, factor)
        if size > 2:
            yield Routed(dim, 2, torch.arange(size, device="cpu").flip(0) % 3 - 1)
    for depth in range(2, use.depth + 1) if 0 in use.dims else ():
        places = use.shape[:depth]
        numbers = torch.arange(math.prod(places), device="cpu")
        if len(numbers) > 2:
            yield Routed(0, 2, (numbers * 2 % 3 - 1).view(places))


def _rows_of_blocks(
    use: Use,
    layout: Layout | None,
    cotangent: Tensor,
    saved: tuple[Tensor, ...],
    parameters: Collection[Tensor],
) -> dict[Tensor, Tensor | None]:
    """Rows ``(k, b, *parameter)`` of each parameter."""
    columns = {p: Columns(Region.of_parameter(p), Kernels(_NO_LIMIT)) for p in parameters}
    samples = torch.arange(1 if layout is None else layout.batch, device=cotangent.device)
    with torch.no_grad():
        contributions = use.contributions(layout, cotangent, saved, _NO_LIMIT)
        for tracked, region, block in contributions:
            columns[tracked.sources[0]].add(region, block)
        return {parameter: known.rows(samples) for parameter, known in columns.items()}


def _rows_of_autograd(
    layout: Layout | None, output: Tensor, cotangents: Tensor, parameters: Collection[Tensor]
) -> dict[Tensor, Tensor]:
    """Rows from plain autograd: a sample's rows are those of its part of the output."""
    (masked,) = one_sample_each(layout, cotangents, _NO_LIMIT.elements, 1)  # (k, b, *output)
    # For complex numbers, the cotangent g is that of the real part of conj(g) y.
    products = (masked.conj() * output).real if output.is_complex() else masked * output
    losses = products.reshape(*masked.shape[:2], -1).sum(2)
    jacobian = reference_jacobian(losses, parameters)
    shapes = [as_real(p).shape for p in parameters]
    parts = jacobian.split([shape.numel() for shape in shapes], 1)
    return {
        p: part.view(*losses.shape, *shape)
        for p, part, shape in zip(parameters, parts, shapes, strict=True)
    }


def _gap(name: str, found: Tensor | None, expected: Tensor) -> float:
    """The distance of rows from plain autograd's, relative to the largest entry of these."""
    scale = float(expected.abs().max())
    if scale == 0:
        raise RuleCheckError(
            f"The gradient of {name} is zero, so the check shows nothing. Take other inputs."
        )
    if found is None or found.shape != expected.shape:
        return math.inf
    return float((found - expected).abs().max()) / scale
