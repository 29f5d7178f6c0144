"""The survey: everything in the autograd graph behind some losses that decides about samples.

Autograd's graph says completely how a backward pass goes: its nodes, their order, and what each of
them saved. So two vectors of losses with equal surveys have their samples in the same places, but
for what the values of saved tensors decide; :mod:`autogram._capture.samples.proof` finds out which.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from autogram._capture.autograd.graph import use_of
from autogram._capture.recording import Channel
from autogram._capture.uses import Use

_NUMBERS = count()
_BASIC = (int, str, bool, type(None))


class NodeKind(NamedTuple):
    """What all nodes of one class have in common."""

    name: str
    """Of the class, as in ``MulBackward0``."""
    operation: str
    """What it differentiates, as in ``Mul``. Empty for a Function in Python, whatever its name."""
    number: int
    """Of the class, among all that were seen."""
    is_leaf: bool
    """Whether it stands for a leaf, in ``variable``."""
    is_function: bool
    """Whether it is an autograd Function in Python."""
    arguments: tuple[Callable[[Any], Any], ...]
    """Read what a node saved that is no tensor: dimensions, shifts, orders."""
    sizes: tuple[Callable[[Any], Any], ...]
    """Read the sizes and strides that a node saved."""
    indices: Callable[[Any], Any] | None
    """Reads the indices that a node saved. Those of ``x[:, index]`` are none and one."""
    tensors: tuple[str, ...]
    """The fields of the tensors that a node saved."""


@lru_cache(maxsize=4096)
def kind_of_node(node: Any) -> NodeKind:
    """What all nodes of a class have in common."""
    fields = dir(node)
    raw = {field for field in fields if field.startswith("_raw_saved_")}
    tensors = tuple(field[len("_raw") :] for field in raw)
    others = [x for x in fields if x.startswith("_saved_") and x not in tensors]
    is_function = issubclass(node, BackwardCFunction)
    name = node.__name__
    return NodeKind(
        name,
        "" if is_function else name.rstrip("0123456789").removesuffix("Backward"),
        next(_NUMBERS),
        name == "AccumulateGrad",
        is_function,
        () if is_function else tuple(getattr(node, x).__get__ for x in others if not _is_size(x)),
        () if is_function else tuple(getattr(node, x).__get__ for x in others if _is_size(x)),
        node._raw_saved_indices.__get__ if "_raw_saved_indices" in raw else None,
        () if is_function else tuple(sorted(tensors)),
    )


def _is_size(field: str) -> bool:
    """Whether a field of nodes holds sizes or strides."""
    return "size" in field or "stride" in field


@dataclass(eq=False)
class Survey:
    """The autograd graph behind some losses. It lives as long as one call.

    Attributes:
        losses: The objectives.
        nodes: All nodes, in the order of the walk.
        uses: Those that the losses depend on, with the number of their tap among the nodes.
        hides_taps: Whether there may be others: a tap on a slice that was changed in place is no
            node of its own.
        leaves: All leaves but the anchors of engines.
        leaves_of_tail: Those that the losses reach past every tap, as parameters in a penalty.
        key: A digest of all that decides where the samples lie, but for values of tensors.
        structure: The same without sizes.
    """

    losses: Tensor
    nodes: list[Any]
    uses: dict[Use, int]
    hides_taps: bool
    leaves: list[Tensor]
    leaves_of_tail: list[Tensor]
    key: bytes
    structure: bytes

    @classmethod
    def of(cls, channel: Channel, losses: Tensor) -> Survey:
        """The survey of some losses, for the taps of one engine.

        Cost: less than a microsecond for each node.
        """
        root = losses.grad_fn
        nodes: list[Any] = [] if root is None else [root]
        numbers = {root: 0}
        anchor = get_gradient_edge(channel.anchor).node
        anchors = {anchor}
        leaves: list[Tensor] = []
        uses: dict[Use, int] = {}
        taps: list[Any] = []
        structure: list[Any] = [losses.output_nr]
        sizes: list[Any] = [tuple(losses.shape)]
        hides_taps = False
        position, in_tail, leaves_of_tail = 0, True, 0

        def follow(node: Any) -> None:
            """Appends what a node leads to, with how it leads there."""
            for following, place in node.next_functions:
                if following is None:
                    structure.append(None)
                    continue
                number = numbers.setdefault(following, len(nodes))
                if number == len(nodes):
                    nodes.append(following)
                structure.append(number)
                structure.append(place)

        while True:
            if position == len(nodes):
                if not in_tail:
                    break
                in_tail, leaves_of_tail = False, len(leaves)
                for tap in taps:
                    follow(tap)
                continue
            node = nodes[position]
            kind = kind_of_node(node.__class__)
            structure.append(kind.number)
            if kind.is_leaf:
                if node not in anchors:
                    leaves.append(node.variable)
            else:
                use = use_of(node) if kind.is_function else None
                if use is not None and use.recording.channel is not channel:
                    anchors.add(get_gradient_edge(use.recording.channel.anchor).node)
                    use = None
                if use is None:
                    if kind.arguments:
                        structure.extend([_plain(read(node)) for read in kind.arguments])
                    if kind.indices is not None:
                        structure.append(_indexed(kind.indices(node)))
                    if kind.sizes:
                        sizes.extend([_plain(read(node)) for read in kind.sizes])
                    if kind.name == "CopySlices":
                        hides_taps |= any(x == anchor for x, _ in node.next_functions)
                else:
                    uses[use] = position
                    structure.append(use.function)
                    sizes.append(use.shape)
                if use is not None and in_tail:
                    taps.append(node)
                else:
                    follow(node)
            position += 1
        return cls(
            losses,
            nodes,
            uses,
            hides_taps,
            leaves,
            leaves[:leaves_of_tail],
            _digest([structure, sizes]),
            _digest(structure),
        )

    def pattern(self, samples: int) -> bytes:
        """Along which dimensions of the nodes' results so many samples could lie, as a digest."""
        inside = (node for node in self.nodes if not kind_of_node(node.__class__).is_leaf)
        shapes = (metadata.shape for node in inside for metadata in node._input_metadata)
        return _digest([[_room(size, samples) for size in shape] for shape in shapes])


def _room(size: int, samples: int) -> int:
    """A size, as far as it tells whether samples can lie along a dimension of it."""
    return size // samples if size in (0, samples) else 2 + (size % samples == 0) + 2 * (size == 1)


def _indexed(saved: Any) -> tuple[bool, ...]:
    """Which dimensions are indexed, where what a node saved is a list of indices."""
    return tuple([x.data is not None for x in saved]) if isinstance(saved, tuple) else ()


def _plain(value: Any) -> Any:
    """A value that a node saved, as far as it can decide where samples lie.

    Of a number with a fraction (a slope, a temperature), only whether it is zero: it may change at
    each step of a training.
    """
    if isinstance(value, _BASIC):
        return value
    if isinstance(value, float):
        return value == 0
    if isinstance(value, (tuple, list)):
        return tuple([_plain(x) for x in value])
    return str(value)


def _digest(values: list[Any]) -> bytes:
    """A short name for some values.

    Not ``hash``, for which -1 and -2 are equal, as dimensions are not. Version 2 writes equal
    values in equal bytes, where later ones abbreviate what the same object was written as before.
    """
    return blake2b(marshal.dumps(values, 2), digest_size=16).digest()
