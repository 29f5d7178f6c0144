"""The survey: everything in the autograd graph behind some losses that decides about samples.

Autograd's graph determines a backward pass: its nodes, how they lead to one another, and what each
of them saved. So two vectors of losses with equal surveys have their samples in the same places,
unless the values of saved tensors move samples: a
:class:`.Finding` says which of these values decide.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autogram._capture.autograd.graph import (
    calls_of,
    is_tap_of,
    kind_of_node,
    nodes_from,
    refuse_reentrant,
    use_of,
)
from autogram._capture.autograd.slices import CHANGE
from autogram._capture.from_graph.ends import End, Graph
from autogram._capture.from_graph.node_uses import NodeUse
from autogram._capture.from_graph.use_plan import UsePlan
from autogram._capture.recording import Channel, Recording, noted_among
from autogram._capture.samples.tail import TailUse, uses_in_tail
from autogram._capture.uses import Use
from autogram.errors import UnsupportedError, listed

_LEAF = "AccumulateGrad"
# The nodes that one node leads to, each with the number of one of its results.
_Edges = tuple[tuple[Any, int], ...]


class Survey:
    """The autograd graph behind some losses, for the taps of a channel. It lives for one call.

    One that ``is_bare`` has no keys and no uses in the tail, and does not read what nodes saved.
    """

    def __init__(self, channel: Channel, losses: Tensor, *, is_bare: bool = False) -> None:
        self.losses, self.channel, self.is_bare = losses, channel, is_bare
        self.nodes: list[Any] = []  # all, in the order of the walk
        self.numbers: dict[Any, int] = {None: -1}  # an input that needs no gradient has no node
        self.uses: dict[Use, int] = {}  # with the number of their tap among the nodes
        self.node_uses: list[NodeUse] = []  # those that are read from the graph
        self.last_nodes: frozenset[int] = frozenset()  # of these, behind which there is no other
        # Whether there may be others: a tap on a slice that was changed in place is no node.
        self.may_hide_taps = False
        self.enclosing: list[int] = []  # the numbers of nodes that have uses inside of them
        self._anchor = get_gradient_edge(channel.anchor).node
        self._anchors = {self._anchor}  # of all engines
        self._structure: list[Any] = []
        self._sizes: list[Any] = [tuple(losses.shape)]
        self._inside: list[Any] = []  # the sizes inside of compiled parts
        behind_taps: deque[_Edges] = deque()
        edges = ((losses.grad_fn, losses.output_nr),)
        # On a path from the losses without a tap, such as parameters in a penalty.
        self.leaves_of_tail = self._follow(deque([edges]), behind_taps)
        self._end_of_tail = len(self.nodes)
        # All leaves but the anchors of engines.
        self.leaves = [*self.leaves_of_tail, *self._follow(behind_taps, behind_taps)]
        self.recordings = [*{use.recording: None for use in self.uses}]
        tail = self.nodes[: self._end_of_tail] if self.leaves_of_tail and channel.has_noted else ()
        self._noted = noted_among(tail, channel)
        passes = [*self.recordings, *[recording for _, recording in self._noted]]
        # Forward passes of the taps, and those whose results the losses read past every tap.
        self.passes = [*{of: None for each in passes for of in (each, *each.earlier)}]
        # The parameters that inactive hooks kept out of J when the losses were computed.
        self.left_out = self._find_left_out()
        for recording in self.recordings:
            if others := {leaf for leaf in self.leaves if leaf not in recording.names}:
                self._refuse_missed(recording, others)
        if channel.before_pass is not None or not all(x.requires_grad for x in self.leaves):
            channel.refuse_frozen({x: self.names[x] for x in self.inside})
        self.tail: list[TailUse] = []
        self.structure = self.key = b""
        self.key_of_report: tuple[Hashable, ...]
        if is_bare:
            inside = [(self.names[x], x.shape, x.dtype) for x in self.inside]
            self.key_of_report = (losses.shape, *inside, *self.left_out.values())
            return
        if self.leaves_of_tail and not channel.reads_graph:
            self.tail = self._find_tail()
        if channel.reads_graph:  # they decide where places end
            columns = set(self.inside)
            self._structure += [leaf in columns for leaf in self.leaves]
            self._sizes += [leaf.shape for leaf in self.leaves]
        # Digests of all that decides where the samples are, except values of tensors.
        self.structure = _digest(self._structure)  # also except sizes
        self.key = _digest([self.structure, self._sizes, self._inside])
        of_uses = [(use.recording.names, of) for use in self.uses for of in use.reads]
        inside_names = [self.names[x] for x in self.inside] if channel.reads_graph else ()
        # The key, and the names of all parameters that are left out or read by the uses.
        self.key_of_report = (
            self.key,
            tuple([names.get(p) for names, of in of_uses for p in of.sources]),
            tuple(inside_names),
            tuple(self.left_out.values()),
        )

    @cached_property
    def names(self) -> dict[Tensor, str]:
        """The parameters of the engine's modules, of now or when the losses were computed.

        Parameters of other forward passes that are alive are no part of J.
        """
        known = () if self.may_hide_taps else self.passes
        return self.channel.parameters(self.leaves, known)

    @cached_property
    def outside(self) -> list[Tensor]:
        """The leaves that are no part of J."""
        inside, left_out = self.names, self.left_out
        return [x for x in self.leaves if x not in inside or (left_out and x in left_out)]

    @cached_property
    def inside(self) -> list[Tensor]:
        """The leaves that are part of J."""
        outside = set(self.outside)
        return [x for x in self.leaves if x not in outside]

    @cached_property
    def graph(self) -> Graph:
        """The graph, as far as it leads to parameters of J."""
        return Graph.of(self.losses, self.nodes, self.inside)

    def read_at(self, ends: Sequence[End]) -> UsePlan:
        """Reads the uses at some ends of places from the graph, and returns how to do so again."""
        plan = UsePlan.of(self.graph, ends)
        self.read_by(plan)
        return plan

    def read_by(self, plan: UsePlan) -> None:
        """Reads the uses as from another graph of the same key, whose nodes have equal shapes."""
        names = {p: self.names[p] for p in self.inside}
        numbered = plan.uses(self.nodes, self.channel, names)
        self.node_uses, self.last_nodes = [use for use, _ in numbered], plan.last
        self.enclosing = []  # it is not asked what happens inside of a node
        self.uses = dict[Use, int](numbered)

    def _find_left_out(self) -> dict[Tensor, str]:
        """The parameters that are no part of J."""
        if not self.passes:
            return self.channel.left_out_now()
        found = {p: name for of in self.passes for p, name in of.left_out.items()}
        read = {p for use in self.uses if found for tracked in use.reads for p in tracked.sources}
        for node, of in self._noted if found else ():
            behind = nodes_from([node], partial(is_tap_of, self.channel))
            leaves = [getattr(x, "variable", None) for x in behind]
            read.update([x for x in leaves if x in of.names])
        if names := [f"`{name}`" for p, name in found.items() if p in read]:
            raise UnsupportedError(
                "The losses depend on several forward passes, and the engine's hooks on a module "
                f"were switched in between: J has no single meaning for {listed(names)}. Compute "
                "the losses anew, with the present hooks."
            )
        return found

    def _refuse_missed(self, recording: Recording, others: set[Tensor]) -> None:
        """Refuses parameters that a forward pass has read and that its recording did not know.

        The pass has read these leaves directly: no other tap is between its taps and them.
        """
        if not (new := others & self.names.keys() - self.left_out.keys()):
            return
        taps = [number for use, number in self.uses.items() if use.recording is recording]
        starts = [node for number in taps for node, _ in self.nodes[number].next_functions]
        is_end = partial(is_tap_of, self.channel)
        read = {getattr(node, "variable", None) for node in nodes_from(starts, is_end)}
        if names := [f"`{name}`" for p, name in self.names.items() if p in new & read]:
            raise UnsupportedError(
                f"Compute the losses once more. A forward pass has read {listed(names)}, which the "
                "engine did not know as a parameter: it became part of the modules after the "
                "engine last saw them, in the forward pass or before one in which "
                "`functional_call` replaced it by another tensor. The engine knows it now."
            )

    def _find_tail(self) -> list[TailUse]:
        """The uses in the tail, which become uses of the survey."""
        if self.may_hide_taps or self.channel.before_pass is not None:
            return []
        leaves = [x for x in self.leaves_of_tail if x in self.names and x not in self.left_out]
        nodes = self.nodes[: self._end_of_tail]
        found = uses_in_tail(self.channel, self.losses, nodes, {x: self.names[x] for x in leaves})
        for use in found:
            self.uses[use] = self.numbers[use.edge.node]
            self._structure += self.uses[use], use.edge.output_nr
        return found

    def _follow(self, pending: deque[_Edges], behind_taps: deque[_Edges]) -> list[Tensor]:
        """Follows edges up to taps, whose own edges it adds to ``behind_taps``.

        Returns the leaves that were not reached before.
        """
        leaves: list[Tensor] = []
        nodes, numbers, structure, sizes = self.nodes, self.numbers, self._structure, self._sizes
        while pending:
            edges = pending.popleft()
            structure.append(len(edges))
            for node, result in edges:
                new = len(nodes)
                number = numbers.setdefault(node, new)
                if number != new:
                    structure += number, result
                    continue
                nodes.append(node)
                kind, operation, _, arguments, of_sizes = kind_of_node(node.__class__)
                structure += number, result, kind
                if operation == _LEAF:
                    if node not in self._anchors:
                        leaves.append(node.variable)
                    continue
                following = node.next_functions
                if not operation and self._is_tap(node):
                    behind_taps.append(following)
                    continue
                pending.append(following)
                if operation == CHANGE and any(x == self._anchor for x, _ in following):
                    self.may_hide_taps = True
                    self.enclosing.append(number)
                if self.is_bare:
                    continue
                for argument in arguments:
                    read = argument(node)
                    # A float (a slope, a temperature) may change at each step of a training: only
                    # whether it is zero is part of the key.
                    structure.append(read == 0 if read.__class__ is float else read)
                for size in of_sizes:
                    found = size(node)
                    if found.__class__ is tuple:
                        # One list: tuples let the garbage collector run more often.
                        structure.append(len(found))
                        sizes += found
                    else:
                        sizes.append(found)
        return leaves

    def _is_tap(self, node: Any) -> bool:
        """Whether an autograd Function is a tap of the engine. If so, notes its use."""
        is_tap, use = False, use_of(node)
        if self.channel.reads_graph:
            refuse_reentrant(node)
        for shown in calls_of(node) if use is None else (use,):
            if shown.recording.channel is not self.channel:
                self._anchors.add(get_gradient_edge(shown.recording.channel.anchor).node)
                continue
            is_tap = True
            if use is None:
                self._inside.append(shown.sizes)
                self.enclosing.append(len(self.nodes) - 1)
            for each in shown.uses_at(node) if use is None else (use,):
                self.uses[each] = len(self.nodes) - 1
                self._structure.append(each.function)
                self._sizes.append(each.shape)
        return is_tap


def _digest(values: list[Any]) -> bytes:
    """A digest of some values.

    ``hash`` is equal for -1 and -2, which are different dimensions. Version 2 of the format writes
    equal values in equal bytes; later versions abbreviate an object that was written before.
    """
    try:
        written = marshal.dumps(values, 2)
    except ValueError:  # there are objects among them, such as dtypes and symbolic sizes
        written = repr(values).encode()
    return blake2b(written, digest_size=16).digest()
