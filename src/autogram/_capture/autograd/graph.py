"""Walks through the autograd graph, and access to calls of compiled graphs, each a single node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autogram._capture.autograd.slices import CHANGE, changed_slice, kept_by_slice, kept_dims
from autogram.errors import FreedGraphError, UnsupportedError


@contextmanager
def explaining_freed_graphs(start: Tensor | GradientEdge) -> Iterator[None]:
    """Says what to do if autograd reports that (a part of) a tensor's graph is freed."""
    try:
        yield
    except RuntimeError as error:
        if "only allowed to backward once" in str(error):
            raise UnsupportedError(
                "A part of the model is checkpointed selectively (`context_fn` of `checkpoint`): "
                "PyTorch allows only one backward pass through it, and the engine needs several. "
                "Leave out `context_fn`."
            ) from error
        if "donated buffers" in str(error):
            raise UnsupportedError(
                "A part of the model is compiled so that its backward pass overwrites its saved "
                "tensors, and the engine needs several passes. Compile it with "
                '`torch.compile(model, backend="autogram")`, or set '
                "`torch._functorch.config.donated_buffer = False` before it is compiled."
            ) from error
        if "after they have already been freed" not in str(error):
            raise
        nodes = [*nodes_behind(start)]
        calls = {of.recording.freed_by for node in nodes for of in shown_by(node)}
        notes = [note for node in nodes for note in node.metadata.values()]
        calls.update([getattr(note, "freed_by", "") for note in notes])
        if call := "".join(sorted(calls)[-1:]):
            told = f"Pass `retain_graph=True` to the first call, {call}, which has freed it."
        else:
            told = (
                "Pass `retain_graph=True` to the backward pass that has freed it, as in "
                "`losses.backward(retain_graph=True)`, or call the engine before it."
            )
        raise FreedGraphError(
            f"The graph of the losses, or a part of it, is gone. {told} If the losses depend on an "
            "earlier step, as through a recurrent layer's state, take `.detach()` of that state."
        ) from error


def nodes_behind(
    tensor: Tensor | GradientEdge, is_end: Callable[[Any], object] | None = None
) -> Iterator[Any]:
    """Each node behind a tensor, once. It does not go beyond nodes that are an end."""
    return nodes_from([tensor.grad_fn if isinstance(tensor, Tensor) else tensor.node], is_end)


def nodes_from(
    starts: Iterable[Any], is_end: Callable[[Any], object] | None = None
) -> Iterator[Any]:
    """Some nodes, and each node behind them, once. It does not go beyond nodes that are an end."""
    seen: set[Any] = {None}
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if is_end is None or not is_end(node):
            for following, _ in node.next_functions:
                pending.append(following)


def edge_of(leaf: Tensor, output: GradientEdge) -> GradientEdge:
    """The edge by which a leaf enters an output's graph, even if the leaf was frozen since."""
    if leaf.requires_grad:
        # PyTorch looks at a view of the leaf; a subclass would make another view of it.
        with torch._C.DisableTorchFunctionSubclass():
            return get_gradient_edge(leaf)
    nodes = (node for node in nodes_behind(output) if getattr(node, "variable", None) is leaf)
    return GradientEdge(next(nodes), 0)


def nodes_leading_to(ends: Iterable[Any], nodes: Iterable[Any]) -> set[Any]:
    """Those among some nodes that lead to one of the ends, and the ends."""
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            users.setdefault(following, []).append(node)
    pending = list(ends)
    leading = set(pending)
    while pending:
        for user in users.get(pending.pop(), ()):
            if user not in leading:
                leading.add(user)
                pending.append(user)
    return leading


def use_of(node: Any) -> Any | None:
    """The use of a node that is a tap of some engine, or ``None``."""
    if not isinstance(node, BackwardCFunction):  # asking all others for an attribute takes longer
        return None
    use = getattr(node, "use", None)
    return use if hasattr(use, "recording") else None


def shown_by(node: Any) -> Sequence[Any]:
    """The objects shown to engines at a node: the use of a tap, or the calls of a compiled graph.

    Each has a ``recording``; calls return their uses with ``uses_at(node)``.
    """
    if not isinstance(node, BackwardCFunction):
        return ()
    use = use_of(node)
    return calls_of(node) if use is None else (use,)


def is_tap_of(channel: object, node: Any) -> bool:
    """Whether a node is a tap of the channel's engine, or a compiled graph with taps of it.

    Taps of other engines pass on what they receive.
    """
    return any(shown.recording.channel is channel for shown in shown_by(node))


def refuse_reentrant(node: Any) -> None:
    """Refuses the node of a checkpoint that hides its calls."""
    if node.__class__.__name__ == "CheckpointFunctionBackward":
        raise UnsupportedError(
            "A part of the model is checkpointed with `use_reentrant=True`, which hides its calls "
            "from the engine. Pass `use_reentrant=False` to `checkpoint` (to models of "
            "transformers, in `gradient_checkpointing_kwargs`)."
        )


def in_dense(gradient: Tensor) -> Tensor:
    """A dense copy of a sparse gradient, such as an embedding's; any other unchanged."""
    is_dense = gradient.layout in (torch.strided, torch.jagged)
    return gradient if is_dense else gradient.to_dense()


def arriving(gradient: Tensor, node: Any, result: int) -> Tensor:
    """The gradient that arrives at a result of a node, if another node has computed this gradient.

    Between nodes, autograd sums a gradient along the dimensions in which the result was broadcast.
    """
    metadata = node._input_metadata[result]
    return in_dense(gradient).sum_to_size(metadata.shape).to(metadata.dtype)


def leaves_behind(tensor: Tensor | GradientEdge) -> list[Tensor]:
    """Each leaf that a backward pass would reach, in any order, without the anchors of engines."""
    if isinstance(tensor, Tensor) and tensor.grad_fn is None:
        return [tensor]
    anchors: set[int] = set()
    leaves: list[Tensor] = []
    for node in nodes_behind(tensor):
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        else:
            anchors.update(id(shown.recording.channel.anchor) for shown in shown_by(node))
    return [leaf for leaf in leaves if id(leaf) not in anchors]


def dtypes_of(tensor: Tensor, nodes: Iterable[Any]) -> set[torch.dtype]:
    """The dtypes in which a tensor was computed: the dtypes of results of the nodes behind it.

    These include casts within a call: a softmax with a dtype, or a norm in float32. Leaves are
    left out, because they are not computed. Casts inside a custom autograd Function or a compiled
    part remain unseen.
    """
    dtypes = {tensor.dtype}
    for node in nodes:
        if not hasattr(node, "variable"):
            dtypes.update([result.dtype for result in getattr(node, "_input_metadata", ())])
    return {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}


def entry(
    calls: Sequence[Any], like: Tensor, anchors: Sequence[Tensor], saved: Sequence[Tensor]
) -> Tensor:
    """An input for a call of a compiled graph that leads from its node to engines' anchors.

    Engines are shown ``calls``; ``saved`` tensors are kept for them. The input resembles ``like``,
    which the call gets if no engine sees it.
    """
    like = like.detach()  # otherwise the losses would depend on one more leaf
    given: Tensor = _CompiledEntry.apply(calls, like, saved, *anchors)  # type: ignore[no-untyped-call]  # as typed in torch
    return given


def is_compiled(node: Any) -> bool:
    """Whether a node is a call of a compiled graph."""
    return isinstance(node, BackwardCFunction) and type(node).__name__ == _NAME


def entry_of(node: Any) -> Any | None:
    """The node that leads from a call of a compiled graph to engines, or ``None``."""
    if not is_compiled(node):
        return None
    for following, _ in reversed(node.next_functions):
        if isinstance(following, _CompiledEntry._backward_cls):
            return following
    return None


def calls_of(node: Any) -> Sequence[Any]:
    """The objects shown to engines at a node, if it is a call of a compiled graph."""
    entered = entry_of(node)
    return () if entered is None else entered.calls


_NAME = "CompiledFunctionBackward"  # name of the nodes that AOTAutograd makes


class _CompiledEntry(torch.autograd.Function):
    """Has no gradient. It makes passes to the anchors go through the compiled call."""

    @staticmethod
    def forward(
        ctx: Any, calls: Sequence[Any], like: Tensor, saved: Sequence[Tensor], *anchors: Tensor
    ) -> Tensor:
        ctx.calls, ctx.count = calls, len(anchors)
        ctx.save_for_backward(*saved)
        return like.view_as(like)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return (None,) * (3 + int(ctx.count))


VIEWS = ("View", "UnsafeView", "ReshapeAlias")
"""Operations that read the elements of a tensor, in order, as a tensor of another shape."""

_NUMBERS = count()
# Beside sizes and strides, by name: numbers that often follow from the length of a sequence. They
# do not decide which dimensions of a node carry samples; only their count does.
_SIZES = (
    "HxW N end index length max_k max_q max_seqlen_batch_k max_seqlen_batch_q normalized_shape pad "
    "repeats self_sym_numel start storage_offset"
)
# Data of the samples: how many positions of each sample count.
_DATA = ("input_lengths", "target_lengths")
# Functions of PyTorch's wrappers that return their inputs.
_HANDING_ON = {"RegisterPostBackwardFunction", "_DDPSink"}
Reader = Callable[[Any], Any]


class NodeKind(NamedTuple):
    """The common properties of all nodes of one class."""

    number: int  # of the class
    # The differentiated operation: `Mul` for `MulBackward0`. Empty for a Function in Python,
    # whatever its name, except for wrappers' Functions that return their inputs.
    operation: str
    tensors: tuple[str, ...] = ()  # attributes that hold a node's saved tensors
    arguments: tuple[Reader, ...] = ()  # saved values that are not tensors: dimensions, shifts
    sizes: tuple[Reader, ...] = ()  # saved sizes, strides and positions


class _Kinds(dict[Any, NodeKind]):
    """Kinds by class. It does not keep a class made inside a function, perhaps in each step.

    Such a Function holds the variables of enclosing functions, such as activations.
    """

    def __init__(self) -> None:
        super().__init__()
        self._local: WeakKeyDictionary[Any, NodeKind] = WeakKeyDictionary()

    def __missing__(self, node: Any) -> NodeKind:
        function = getattr(node, "_forward_cls", None)
        if function is None or "<locals>" not in function.__qualname__:
            kind = self[node] = _kind(node)
            return kind
        if node not in self._local:
            self._local[node] = _kind(node)
        return self._local[node]


def _kind(node: Any) -> NodeKind:
    """The common properties of all nodes of a class."""
    if issubclass(node, BackwardCFunction):
        function = getattr(node, "_forward_cls", None)
        name, module = (getattr(function, of, "") for of in ("__name__", "__module__"))
        is_known = name in _HANDING_ON and module.startswith("torch.")
        return NodeKind(next(_NUMBERS), "HandOn" if is_known else "")
    fields = [field for field in dir(node) if field.startswith("_saved_")]
    tensors = tuple(field for field in fields if hasattr(node, f"_raw{field}"))
    arguments: list[Reader] = []
    sizes: list[Reader] = []
    for field in fields:
        name = field.removeprefix("_saved_")
        if field not in tensors and name not in _DATA:
            is_size = "size" in name or "stride" in name or name in _SIZES.split()
            (sizes if is_size else arguments).append(getattr(node, field).__get__)
    if "_saved_indices" in tensors:
        arguments.append(_indexed)
    name = node.__name__.removesuffix("_copy")  # of operators that copy instead of viewing
    operation = name.rstrip("0123456789").removesuffix("Backward")
    if operation == CHANGE:
        arguments.append(lambda node: (found := changed_slice(node)) and kept_by_slice(found))
        sizes.append(lambda node: [of.numbers for of in changed_slice(node) or ()])
    elif operation == "AsStrided":
        arguments.append(kept_dims)
    return NodeKind(next(_NUMBERS), operation, tensors, tuple(arguments), tuple(sizes))


kind_of_node: Callable[[Any], NodeKind] = _Kinds().__getitem__
"""The common properties of all nodes of a class."""


def _indexed(node: Any) -> tuple[bool, ...]:
    """Which dimensions are indexed, if a node saved a list of indices, as in ``x[:, index]``."""
    saved = node._raw_saved_indices
    return tuple([x.data is not None for x in saved]) if isinstance(saved, tuple) else ()
