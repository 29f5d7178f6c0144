"""The backend of `torch.compile`: inductor, with taps where parameters meet samples."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autogram._capture.forward.session import open_recorders, recorders_of
from autogram._capture.tracked import BATCHED, Tracked
from autogram._compiled.call import CompiledPart, have_failed, nowhere
from autogram._compiled.compilers import COMPILERS
from autogram._compiled.private import missing
from autogram._compiled.tracing.part import Part
from autogram._compiled.tracing.recording import PartInputs
from autogram._compiled.variants import Backward
from autogram.errors import CompiledPartWarning, UnsupportedError, listed, warn_user

Options = Mapping[str, Any]


def autogram(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Options | None = None,
    may_guess: bool = True,
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo so that engines see what happens inside.

    Args:
        graph: The graph.
        inputs: Examples of its inputs.
        mode: As in inductor.
        options: As in inductor. In addition, ``"autogram.inner"`` is ``"inductor"``, or
            ``"aot_eager"`` to compile nothing below autograd, for example in tests.
        may_guess: Whether a size may tell that parameters are expanded over the samples.

    Returns:
        A function that computes the outputs of the graph.
    """
    own = dict(options or {})
    inner = own.pop("autogram.inner", "inductor")
    if names := missing():
        _tell_of_missing(names)
        return _unseen(inner, graph, inputs)
    config = dict(torch._TorchCompileInductorWrapper(mode, own, None).config)  # also checks
    known = _kinds(graph, inputs)
    compile = COMPILERS[inner]
    if not torch.is_grad_enabled():
        return compile(graph, inputs, config, None)
    frozen = [
        i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter) and not x.requires_grad
    ]
    if not (known.parameters or known.derived):
        return _checked(compile(_outer(graph, graph.forward), inputs, config, None), frozen)
    parameters = [inputs[i] for i in known.parameters]
    if not may_guess or have_failed(recorders_of(parameters), parameters):
        known = known._replace(samples=1)
    part = Part(graph, known)
    device = inputs[part.roots[0]].device
    module = _outer(graph, part.trace, "autogram_entry")
    examples = [*inputs, nowhere(device)]
    function = compile(module, examples, config, partial(Backward, part))
    without = partial(autogram, mode=mode, options=options, may_guess=False)
    compile_again = partial(torch.compile, graph, backend=without)
    return _checked(CompiledPart(part, function, compile_again), frozen)


def _checked(function: Callable[..., Any], frozen: Sequence[int]) -> Callable[..., Any]:
    """A compiled function that refuses changes which PyTorch's guards may miss.

    Before PyTorch 2.12, Dynamo may not notice that a parameter starts to require gradients:
    https://github.com/pytorch/pytorch/issues/139476.
    """
    if not frozen:
        return function

    def run(*args: Any) -> Any:
        """Calls the function."""
        freed = [args[i] for i in frozen if args[i].requires_grad]
        if freed and torch.is_grad_enabled():
            raise UnsupportedError(
                f"A parameter of the shape {tuple(freed[0].shape)} was frozen when a part of "
                "the model was compiled, and is trainable now. This version of PyTorch "
                f"({torch.__version__}) does not compile the part anew, so its gradients would be "
                "missing. Call `torch._dynamo.reset()` after unfreezing parameters."
            )
        return function(*args)

    return run


def _unseen(inner: str, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph for explicit rows, if this version of PyTorch can do that."""
    try:
        return COMPILERS[inner](_outer(graph, graph.forward), inputs, {}, None)
    except (ImportError, AttributeError):
        found: Callable[..., Any] = torch._dynamo.lookup_backend(inner)(graph, list(inputs))
        return found


@cache
def _tell_of_missing(names: tuple[str, ...]) -> None:
    """Tells the user once that autogram does not know this version of PyTorch."""
    warn_user(
        "Take a version of PyTorch that `pyproject.toml` names, or a newer autogram. This version "
        f"of PyTorch ({torch.__version__}) does not have {listed(names)}, with which autogram sees "
        "inside compiled parts. Parts are compiled with inductor, and their parameters get "
        "explicit rows: exact, but with a backward pass for each objective.",
        CompiledPartWarning,
    )


def _outer(graph: fx.GraphModule, function: Callable[..., Any], *further: str) -> fx.GraphModule:
    """A graph that calls a function instead of another graph, with additional inputs.

    AOTAutograd caches compiled graphs of calls that it knows. From its cache, it would return
    backward passes that have no variants, and that overwrite tensors which others need.
    """
    outer, inputs = fx.Graph(), []
    for node in graph.graph.find_nodes(op="placeholder"):
        given = outer.placeholder(node.target)
        given.meta = copy.copy(node.meta)
        given._dynamo_source = getattr(node, "_dynamo_source", None)
        inputs.append(given)
    for name in further:
        inputs.append(outer.placeholder(name))
        inputs[-1]._dynamo_source = None
    called = outer.call_function(function, tuple(inputs))
    count = len(graph.graph.output_node().args[0])  # type: ignore[arg-type]  # a tuple
    outer.output(tuple(outer.call_function(operator.getitem, (called, i)) for i in range(count)))
    module = fx.GraphModule({}, outer)
    module.meta = dict(graph.meta)
    if hasattr(graph, "_param_name_to_source"):
        module._param_name_to_source = graph._param_name_to_source
    return module


def _kinds(graph: fx.GraphModule, inputs: Sequence[Any]) -> PartInputs:
    """Classifies the inputs of a graph.

    Open recordings know the kinds. Without one, as where a module's recording begins, masks and
    indices without a dimension of samples count as constants. A wrong kind costs time, but never
    correctness.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    parameters, others = [], []
    for position, (node, x) in enumerate(zip(nodes, inputs, strict=True)):
        is_parameter = isinstance(x, nn.Parameter)
        if is_parameter and x.requires_grad:
            parameters.append(position)
        elif isinstance(x, Tensor) and (x.requires_grad or not (is_parameter or _is_buffer(node))):
            others.append(position)
    recorders = open_recorders()
    statuses = {i: [x.statuses.tapped(inputs[i])[1] for x in recorders] for i in others}
    derived = [i for i in others if any(isinstance(x, Tracked) for x in statuses[i])]
    others = [i for i in others if i not in derived]
    if recorders:
        known = [i for i in others if inputs[i].requires_grad or BATCHED in statuses[i]]
        counts = [x.recording.counted.samples for x in recorders if x.recording.counted]
        return PartInputs(parameters, derived, known, next((n for n in counts if n != 1), 1))
    differentiable = [i for i in others if inputs[i].requires_grad]
    shapes = [inputs[i].shape for i in (*differentiable, *others) if not inputs[i].is_nested]
    size = next((int(shape[0]) for shape in shapes if len(shape) and int(shape[0]) != 1), 1)

    def is_batched(x: Tensor) -> bool:
        has_samples = x.is_nested or size in [int(n) for n in x.shape[:2]]
        return x.requires_grad or (has_samples and not _counts(x))

    return PartInputs(parameters, derived, [i for i in others if is_batched(inputs[i])], size)


def _counts(x: Tensor) -> bool:
    """Whether a tensor holds consecutive integers, such as positions in a sequence."""
    if (
        x.is_nested
        or x.is_floating_point()
        or x.dtype == torch.bool
        or x.numel() != x.shape[-1:].numel()
    ):
        return False
    x = x.detach().flatten()
    return len(x) > 1 and bool((x[1:] - x[:-1] == 1).all())


def _is_buffer(node: fx.Node) -> bool:
    """Whether an input is a buffer of a module."""
    return "'_buffers'" in repr(getattr(node, "_dynamo_source", None))
