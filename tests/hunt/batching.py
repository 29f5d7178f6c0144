"""Compares batched backward passes of PyTorch with a loop: `make batching`.

For every operator in PyTorch's own sample inputs, several cotangents go through its backward pass
together, under `torch.vmap`, and one by one. The same for the backward pass of that backward pass,
and for operators that change a tensor, or a slice of one, in place. The numbers of cotangents
include the sizes of the tensors, because a rule that takes the hidden dimension for another one is
right, or raises, wherever the two have different sizes.

What is found wrong belongs into the table of `autogram._capture.autograd.cotangents`, and is marked
with a star if it is not there yet.
"""

import argparse
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from autogram._capture.autograd.cotangents import is_batchable
from autogram._capture.autograd.graph import nodes_behind

from .samples import OpInfo, SampleInput, name_of, operators, samples_of

_LARGEST_COUNT = 10
_MOST_COUNTS = 4

RIGHT, WRONG, RAISES, NONE = "right", "wrong", "raises", "not differentiable"
KINDS = ("backward", "backward of backward", "in place", "in place, in a slice")


@dataclass
class Graph:
    """A piece of a graph that cotangents go through."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]


@dataclass
class Found:
    """What was found for all operators, one kind of graph each.

    Attributes:
        counts: By verdict, the operators with how often it was given.
        examples: The first example of what is not right, by verdict and operator.
        missed: The operators that are wrong and not in the table.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)


def graphs(kind: str, operator: OpInfo, sample: SampleInput) -> Graph | None:
    """The graph of one kind that a sample gives, if it gives one."""
    if kind == "backward":
        return _made(operator.op, sample)
    if kind == "backward of backward":
        graph = _made(operator.op, sample)
        return graph and _differentiated(graph)
    if operator.inplace_variant is None or not isinstance(sample.input, Tensor):
        return None
    if kind == "in place":
        return _made(lambda x, *a, **k: operator.inplace_variant(x.clone(), *a, **k), sample)

    def change_slice(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        base = torch.stack([x, x], -1).clone()
        operator.inplace_variant(base[..., 1], *args, **kwargs)
        return base

    return _made(change_slice, sample)


def _made(function: Callable[..., object], sample: SampleInput) -> Graph | None:
    """The graph of a call."""
    inputs = _leaves(sample)
    outputs = _differentiable(function(sample.input, *sample.args, **sample.kwargs))
    return Graph(outputs, inputs) if inputs and outputs else None


def _differentiated(graph: Graph) -> Graph | None:
    """The graph of a graph's backward pass."""
    cotangents = [torch.randn_like(x, requires_grad=True) for x in graph.outputs]
    found = torch.autograd.grad(
        graph.outputs, graph.inputs, cotangents, create_graph=True, allow_unused=True
    )
    outputs = _differentiable(found)
    return Graph(outputs, [*graph.inputs, *cotangents]) if outputs else None


def _leaves(sample: SampleInput) -> list[Tensor]:
    """The inputs that require a gradient."""
    flat = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return [x for x in flat if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]


def _differentiable(value: object) -> list[Tensor]:
    """The tensors in a value that depend on something, sparse and nested ones aside."""
    tensors = [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    return [x for x in tensors if x.requires_grad and x.layout == torch.strided and not x.is_nested]


def counts_of(graph: Graph) -> list[int]:
    """The numbers of cotangents to try."""
    sizes = {n for x in (*graph.outputs, *graph.inputs) for n in x.shape}
    fitting = sorted(n for n in sizes - {3} if 1 < n <= _LARGEST_COUNT)
    return [3, *fitting[: _MOST_COUNTS - 1]]


def compare(graph: Graph, count: int) -> str:
    """The verdict on some cotangents."""
    cotangents = [torch.randn(count, *x.shape, dtype=x.dtype) for x in graph.outputs]
    used: list[int] = []

    def differentiate(*some: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(
            graph.outputs, graph.inputs, some, retain_graph=True, allow_unused=True
        )
        used[:] = [i for i, x in enumerate(found) if x is not None]
        return tuple(x.to_dense() if x.is_sparse else x for x in found if x is not None)

    try:
        # Copies: the backward pass of `as_strided_scatter` is wrong for a part of a tensor.
        single = [differentiate(*(x[i].clone() for x in cotangents)) for i in range(count)]
    except RuntimeError:  # `NotImplementedError` is one: there is no derivative on this device
        return NONE
    if not used:
        return NONE
    try:
        together = torch.vmap(differentiate, randomness="error")(*cotangents)
    except RuntimeError:
        return RAISES
    expected = [torch.stack(some) for some in zip(*single, strict=True)]
    # Beside the largest of all: where a gradient is zero, rounding is all that there is of it.
    scale = max(0.1, *(float(x[x.isfinite()].abs().sum()) for x in expected))
    are_close = (_is_close(x, y, scale) for x, y in zip(together, expected, strict=True))
    return RIGHT if all(are_close) else WRONG


def _is_close(actual: Tensor, expected: Tensor, scale: float) -> bool:
    """Whether two tensors agree to rounding, infinities and what is not a number included."""
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=1e-8, atol=1e-10 * scale, equal_nan=True
    )


def hunt(kind: str, chosen: Sequence[OpInfo], most: int) -> Found:
    """Compares one kind of graph for some operators."""
    found = Found()
    for operator in chosen:
        name = name_of(operator)
        for sample in samples_of(operator, most):
            try:
                graph = graphs(kind, operator, sample)
            except (RuntimeError, TypeError, ValueError):
                continue  # a sample of an error, or one that nothing can be differentiated of
            for count in counts_of(graph) if graph else ():
                verdict = compare(graph, count)
                found.counts[verdict][name] += 1
                if verdict in (WRONG, RAISES):
                    shapes = ", ".join(str(tuple(x.shape)) for x in graph.inputs)
                    found.examples.setdefault((verdict, name), f"{shapes}; {count} cotangents")
                if verdict == WRONG and is_batchable(_nodes(graph)):
                    found.missed.add(name)
    return found


def _nodes(graph: Graph) -> Iterator[object]:
    """The nodes that cotangents pass."""
    for output in graph.outputs:
        yield from nodes_behind(output)


def lines(kind: str, found: Found) -> Iterator[str]:
    """What was found, in the words of the documentation."""
    judged = {name for verdict in (RIGHT, WRONG, RAISES) for name in found.counts[verdict]}
    total = sum(found.counts[verdict].total() for verdict in (RIGHT, WRONG, RAISES))
    yield f"{kind}: {len(judged)} operators, {total} comparisons"
    for verdict in (WRONG, RAISES):
        counts = found.counts[verdict]
        yield f"  {verdict}: {len(counts)} operators, {counts.total()} comparisons"
        for name, number in sorted(counts.items()):
            star = " *" * (verdict == WRONG and name in found.missed)
            example = found.examples[verdict, name]
            yield f"    {name}{star}: {number}, first for {example}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is found, and returns 1 if the table lacks something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operator", help="operators whose name begins so (all if left out)")
    parser.add_argument("--samples", type=int, default=60, help="of each operator, at most")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    random.seed(0)
    chosen = [x for x in operators() if name_of(x).startswith(options.operator or "")]
    print(f"torch {torch.__version__}, {len(chosen)} operators with a gradient in float64")
    is_complete = True
    for kind in KINDS:
        found = hunt(kind, chosen, options.samples)
        print(*lines(kind, found), sep="\n", flush=True)
        is_complete &= not found.missed
    return 0 if is_complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
