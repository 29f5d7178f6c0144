"""Derived tensors: their blocks as blocks of the parameters, with no rows in between.

A weight that is scaled, masked, normed, or a product of two others, is derived by nodes whose
vector-Jacobian products multiply a cotangent by what the node saved. Each such node gives the
einsum of a block one more factor, or changes one that is there. A rank that the factors have is
kept so, and no row is formed for autograd to pull it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autogram._blocks import Block, Columns, Kernels, Region
from autogram._blocks.kernels.paths import unused_labels
from autogram._capture.autograd.cotangents import many_vjps
from autogram._capture.autograd.graph import (
    VIEWS,
    explaining_freed_graphs,
    kind_of_node,
    nodes_behind,
)
from autogram._capture.from_graph.tensor_hooks import are_hooked
from autogram._capture.places.transfers.step import signed
from autogram._capture.recording import Channel
from autogram._capture.tracked import Tracked

_MOST = 16  # paths from a derived tensor to its parameters
Pulled = list[tuple[Tensor, Block]]


def pull_back_factors(channel: Channel, derived: Tracked, columns: Columns) -> Pulled | None:
    """Blocks of the parameters of a derived tensor, or ``None`` where its rows are to be formed.

    Rows are formed where a node has no formula; where a call was not seen, so that a hook may
    change a cotangent; and where the Gramian of the tensor's own ``columns`` would be computed from
    rows, if a node makes blocks dearer: rows are small then.
    """
    sources = derived.sources
    is_seen = derived.is_recorded or channel.reads_graph
    if not (is_seen and all(x.is_leaf and x.device == derived.device for x in sources)):
        return None
    assert derived.edge is not None
    factors, has_formula = columns.found(), _is_known
    if columns.is_of_rows:
        has_formula = partial(_keeps_few, is_alone=len(factors) == len(sources) == 1)
    with explaining_freed_graphs(derived.edge):
        nodes = [*nodes_behind(derived.edge)]
        if not all(hasattr(x, "variable") or has_formula(x) for x in nodes):
            return None
    if channel.reads_graph and are_hooked(nodes):
        return None
    whole = Region.contiguous(derived.shape)
    pulled: Pulled = []
    for region, block in factors:
        if not isinstance(block, Block) or region != whole.canonical:
            return None
        labels = ["1"] * len(whole.shape)
        for dim, label in zip(whole.order, block.parameter, strict=True):
            labels[dim] = label
        block = _relabelled(block, labels)
        try:
            with torch.no_grad(), explaining_freed_graphs(derived.edge):
                pulled += _pull_back(channel, derived.edge, block, columns.kernels)
        except _UnknownError:
            return None
    known_ids = {id(x) for x in sources}
    return [(leaf, block) for leaf, block in pulled if id(leaf) in known_ids]


class _UnknownError(Exception):
    """A formula does not hold for a node."""


def _is_known(node: Any) -> bool:
    """Whether there is a formula for a node."""
    return kind_of_node(node.__class__).operation in _FORMULAS


def _keeps_few(node: Any, *, is_alone: bool) -> bool:
    """Whether a node makes no block dearer: it multiplies by a constant, or adds up.

    Of several blocks, or for several parameters, rows would be formed one by one then, unless the
    constant is a number.
    """
    operation = kind_of_node(node.__class__).operation
    if operation not in ("Mul", "Div"):
        return operation in _CHEAP
    (first, _), (second, _) = node.next_functions
    if second is not None and (operation == "Div" or first is not None):
        return False
    return is_alone or (node._saved_self if first is None else node._saved_other).numel() == 1


def _pull_back(channel: Channel, edge: GradientEdge, rows: Block, kernels: Kernels) -> Pulled:
    """Follows all paths from an edge to leaves."""
    pulled: Pulled = []
    pending: list[tuple[Any, int, Block]] = [(edge.node, edge.output_nr, rows)]
    while pending:
        node, result, rows = pending.pop()
        if hasattr(node, "variable"):
            pulled.append((node.variable, rows))
            continue
        operation = kind_of_node(node.__class__).operation
        is_complex = operation != "ViewAsComplex" and node._input_metadata[0].dtype.is_complex
        if result != 0 or is_complex or len(pulled) + len(pending) > _MOST:
            raise _UnknownError
        for position, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            is_leaf = hasattr(following, "variable")
            of = following.variable if is_leaf else following._input_metadata[number]
            if of.dtype.is_complex:
                raise _UnknownError
            given = tuple(of.shape)
            steps = _FORMULAS[operation](_Step(node, position, given, rows, kernels, channel))
            pending += [(following, number, _narrowed(x, given, kernels)) for x in steps]
    return pulled


def _relabelled(rows: Block, labels: Iterable[str]) -> Block:
    """The same factors, with other indices of a tensor's dimensions, ``1`` for a size of one."""
    return replace(rows, equation=f"{','.join(rows.inputs)}->kb{''.join(labels)}")


def _narrowed(rows: Block, given: tuple[int, ...], kernels: Kernels) -> Block:
    """Rows for a tensor of another shape, summed over dimensions in which it was broadcast.

    Their sums are computed here, as they are small.
    """
    kept = rows.parameter[len(rows.parameter) - len(given) :]
    narrowed = _relabelled(rows, ["1" if n == 1 else x for x, n in zip(kept, given, strict=True)])
    is_sum = set(rows.parameter) - set(narrowed.parameter) - {"1"}
    return _summed(narrowed, kernels) if is_sum else narrowed


def _summed(rows: Block, kernels: Kernels) -> Block:
    """The same rows, computed."""
    own = "kb" + rows.parameter.replace("1", "")
    found = kernels.einsum(f"{','.join(rows.inputs)}->{own}", rows.operands)
    return Block(f"{own}->kb{rows.parameter}", (found,))


def _times(rows: Block, factor: Tensor) -> Block:
    """Rows multiplied by a tensor that is broadcast to the one that they are for."""
    _check(factor)
    if factor.numel() == 1:
        return _scaled(rows, factor.view(()))
    aligned = rows.parameter[len(rows.parameter) - factor.dim() :]
    dims = [dim for dim, n in enumerate(factor.shape) if n > 1]
    labels, factor = [aligned[dim] for dim in dims], factor.squeeze()
    fitting = [i for i, of in enumerate(rows.inputs) if set(labels) <= set(of)]
    if not fitting:
        return _joined(rows, "".join(labels), factor, rows.parameter)
    chosen = min(fitting, key=lambda i: rows.operands[i].numel())
    of = rows.inputs[chosen]
    order = sorted(range(len(labels)), key=lambda i: of.index(labels[i]))
    sizes = [n if x in labels else 1 for x, n in zip(of, rows.operands[chosen].shape, strict=True)]
    operands = list(rows.operands)
    operands[chosen] = _wide(operands[chosen]) * factor.permute(order).reshape(sizes)
    return Block(rows.equation, tuple(operands))


def _check(factor: Tensor) -> None:
    """Lets pass what an einsum of real numbers may have."""
    if factor.is_complex() or factor.layout != torch.strided:
        raise _UnknownError


def _scaled(rows: Block, factor: Tensor | float) -> Block:
    """Rows times a number: their cotangent is."""
    adjoint, first = rows.adjoint, _wide(rows.operands[0]) * factor
    adjoint = adjoint and replace(adjoint, cotangent=adjoint.cotangent * factor)
    return Block(rows.equation, (first, *rows.operands[1:]), adjoint)


def _wide(factor: Tensor) -> Tensor:
    """A factor that can be multiplied: in float16, products may be zero or infinite."""
    return factor.float() if factor.dtype == torch.float16 else factor


def _joined(rows: Block, term: str, factor: Tensor, labels: str) -> Block:
    """Rows with one more factor, for a tensor with other indices."""
    _check(factor)
    return Block(f"{','.join(rows.inputs)},{term}->kb{labels}", (*rows.operands, factor))


class _Step(NamedTuple):
    """A way through a node, to one of its inputs."""

    node: Any
    position: int
    """The number of the input."""
    given: tuple[int, ...]
    """The shape of the input."""
    rows: Block
    """Those for the result."""
    kernels: Kernels
    channel: Channel


# Gives the rows for an input of a node from those for its result.
_Formula = Callable[[_Step], Iterator[Block]]


def _mul(at: _Step) -> Iterator[Block]:
    yield _times(at.rows, at.node._saved_self if at.position else at.node._saved_other)


def _div(at: _Step) -> Iterator[Block]:
    if getattr(at.node, "_saved_rounding_mode", None) is not None:
        raise _UnknownError
    other = at.node._saved_other
    factor = -at.node._saved_self / other.square() if at.position else other.reciprocal()
    yield _times(at.rows, factor)


def _plus(at: _Step) -> Iterator[Block]:
    """A sum or a difference, of which one part has a coefficient."""
    alpha = float(getattr(at.node, "_saved_alpha", 1))
    each = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0), "Neg": (-1.0,)}
    factor = each[kind_of_node(at.node.__class__).operation][at.position]
    yield at.rows if factor == 1 else _scaled(at.rows, factor)


def _elementwise(at: _Step) -> Iterator[Block]:
    """A function of one element: its derivative is what comes back for a one."""
    yield _times(at.rows, _of_ones(at))


def _reduction(at: _Step) -> Iterator[Block]:
    """A sum, mean, norm or variance: each element of a result leads to elements of its own."""
    labels, rank = list(at.rows.parameter), len(at.given)
    if len(labels) < rank:
        saved = getattr(at.node, "_saved_dim", None) if labels else None
        dims = [saved] if isinstance(saved, int) else saved
        for dim in sorted([signed(dim) % max(rank, 1) for dim in dims or range(rank)]):
            labels.insert(dim, "1")
    if len(labels) != rank:
        raise _UnknownError
    unused, pairs = unused_labels(at.rows.equation), zip(labels, at.given, strict=True)
    own = "".join([next(unused) if x == "1" and n > 1 else x for x, n in pairs])
    # A sum gives equal numbers to all elements. Only what is summed over needs a factor then.
    is_equal = kind_of_node(at.node.__class__).operation in ("Sum", "Mean")
    kept = [d for d, x in enumerate(own) if x != "1" and not (is_equal and x == labels[d])]
    index = tuple([slice(None) if d in kept else 0 for d in range(rank)])
    factor = _of_ones(at)[index]
    if kept:
        yield _joined(at.rows, "".join([own[d] for d in kept]), factor, own)
    else:
        yield _scaled(_relabelled(at.rows, own), factor)


def _of_ones(at: _Step) -> Tensor:
    """What the only input of a node gets for a cotangent of ones."""
    result = at.node._input_metadata[0]
    ones = torch.ones((1, *result.shape), dtype=result.dtype, device=result.device)
    if len(at.node.next_functions) != 1:
        raise _UnknownError
    given = GradientEdge(*at.node.next_functions[0])
    (found,) = many_vjps(at.channel, GradientEdge(at.node, 0), (given,), ones)
    if found is None:
        raise _UnknownError
    return found[0]


def _transpose(at: _Step) -> Iterator[Block]:
    """Two dimensions change places: by ``t``, those that there are."""
    labels, saved = list(at.rows.parameter), (("_saved_dim0", 0), ("_saved_dim1", -1))
    i, j = [signed(getattr(at.node, name, dim)) % max(len(at.given), 1) for name, dim in saved]
    if labels:  # else the tensor is a number
        labels[i], labels[j] = labels[j], labels[i]
    yield _relabelled(at.rows, labels)


def _view(at: _Step) -> Iterator[Block]:
    """A view that gains or loses dimensions of size one alone."""
    result = tuple(at.node._input_metadata[0].shape)
    if [n for n in result if n > 1] != [n for n in at.given if n > 1]:
        raise _UnknownError
    others = iter(at.rows.parameter.replace("1", ""))
    yield _relabelled(at.rows, ["1" if n == 1 else next(others) for n in at.given])


def _product(at: _Step) -> Iterator[Block]:
    """A product of matrices or vectors, each of which may have parameters behind it.

    The gradient of one is that of the product times the other, along what is not summed.
    """
    equation, name = _PRODUCTS[kind_of_node(at.node.__class__).operation]
    given, result = equation.split("->")
    own, other = given.split(",")[:: -1 if at.position else 1]
    labels = dict(zip(result, at.rows.parameter, strict=True))
    labels |= dict.fromkeys(set(own) - set(result), next(unused_labels(at.rows.equation)))
    term, target = ("".join([labels[x] for x in of]) for of in (other, own))
    if "1" in term or 1 in at.given:
        raise _UnknownError
    factor = at.node._saved_self if at.position else getattr(at.node, name)
    yield _joined(at.rows, term, factor, target)


def _weight_norm(at: _Step) -> Iterator[Block]:
    """W = g v / n, with n the norms of v: dg = (dW . v) / n, dv = (g dW - (dg g / n) v) / n."""
    g, v, norms = at.node._saved_g, at.node._saved_v, at.node._saved_result1
    dim = signed(at.node._saved_dim) % max(v.dim(), 1)
    labels = ["1" if i != dim else x for i, x in enumerate(at.rows.parameter)]
    of_g = _times(_summed(_relabelled(_times(at.rows, v), labels), at.kernels), 1 / norms)
    if at.position:
        yield of_g
    else:
        yield _times(at.rows, g / norms)
        yield _times(_relabelled(of_g, at.rows.parameter), -v * g / norms.square())


# Equations, and what a node saves of the second factor.
_PRODUCTS = {
    "Mm": ("ti,io->to", "_saved_mat2"),
    "Mv": ("ti,i->t", "_saved_vec"),
    "Dot": ("i,i->", "_saved_tensor"),
    "Vdot": ("i,i->", "_saved_other"),
}
_ELEMENTWISE = (
    "Abs Clamp ClampMin ClampMax Cos Exp Exp2 Expm1 Log Log1p Pow Reciprocal Relu Rsqrt Sigmoid "
    "Sin Softplus Sqrt Tanh Tril Triu"
)
_VIEWS, _SAME = (*VIEWS, "Squeeze", "Unsqueeze"), ("ToCopy", "Clone", "Alias", "ViewAsComplex")
_CHEAP = {*_VIEWS, *_SAME, "T", "Transpose", "Neg", "Add", "Sub", "Rsub", "Mm"}
_FORMULAS: dict[str, _Formula] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(("Sum", "Mean", "Var", "Std", "Norm", "LinalgVectorNorm"), _reduction),
    **dict.fromkeys((*_SAME, "Expand"), lambda at: iter([at.rows])),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(("Add", "Sub", "Rsub", "Neg"), _plus),
    **dict.fromkeys(("T", "Transpose"), _transpose),
    **{"Mul": _mul, "Div": _div, "WeightNormInterface": _weight_norm},
}
