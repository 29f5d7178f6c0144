"""Variants of the compiled backward pass of a part, over one set of saved tensors.

- ``full``: what PyTorch compiles, with the gradients of all inputs;
- ``taps``: the cotangents of the part's uses with what their rules save, and no parameters';
- ``gramian``: the same, with the part of the Gramian of uses that are contracted inside, and in a
  fused step what their gradients are computed from;
- ``rows``: the gradients of some inputs alone.

Which of them runs is decided by whose backward pass it is.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from autogram._capture.autograd.entry import calls_of
from autogram._capture.autograd.passes import Pass, running_pass
from autogram._capture.uses import RuleUse
from autogram._compiled.call import Call
from autogram._compiled.contraction import (
    Asked,
    Contracted,
    Inside,
    UntraceableError,
    append_contractions,
    key_of,
)
from autogram._compiled.tracing.operator import SHOW
from autogram._compiled.tracing.part import Part

Compiled = Callable[[list[Any]], Sequence[Any]]
Compile = Callable[[fx.GraphModule], Compiled]


class _Place(NamedTuple):
    """Where a tensor is found behind a pass."""

    is_input: bool
    number: int


class _Shown(NamedTuple):
    """A use, with the places of its cotangent and of what its rule saves."""

    use: int
    places: tuple[_Place, ...]


class Backward:
    """The backward pass of a part, as autograd calls it.

    Args:
        part: The part.
        graph: The graph of its backward pass, in which the operator marks where to show.
        compile: Compiles a variant of the graph.
        decompositions: Gives those of operators that the compiler does not take.
    """

    def __init__(
        self,
        part: Part,
        graph: fx.GraphModule,
        compile: Compile,
        decompositions: Callable[[], Mapping[Any, Any]] = dict,
    ) -> None:
        self._boxed_call = True  # AOTAutograd reads this: it gives a list, which may be emptied
        self._part, self._graph, self._compile = part, graph, compile
        part.backward = graph
        part.dtypes |= _dtypes(graph)
        self._decompositions = decompositions
        self._results = len(_results(graph))
        self._variants: dict[Any, Compiled] = {}
        self._shown: dict[Any, list[_Shown]] = {}
        self._contracted: dict[Any, Contracted] = {}
        self._untraceable: set[int] = set()
        self._tracing = torch._guards.TracingContext.try_get()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the variant that the running pass is to have."""
        node, current = torch._C._current_autograd_node(), running_pass()
        call = None
        if current is not None:
            own = [c for c in calls_of(node) if c.recording.channel is current.channel]
            call = own[0] if own else None
        if current is None or call is None:
            return self._full(args)
        is_wanted = current.reach(call.recording)
        if current.is_blocked:
            return self._rows(args, call.rows_of)
        return self._taps(args, call, node, current) if is_wanted else self._full(args)

    def _full(self, args: list[Any]) -> Sequence[Any]:
        """All gradients."""
        return self._variant("full", self._without_taps)(args)

    def _rows(self, args: list[Any], kept: frozenset[int]) -> Sequence[Any]:
        """Those of some inputs."""
        if not kept:
            args.clear()
            return (None,) * self._results
        return self._variant(kept, lambda: self._without_taps(kept))(args)

    def _taps(self, args: list[Any], call: Call, node: Any, current: Pass) -> Sequence[Any]:
        """Shows the cotangents of the uses, and gives what goes on to other nodes."""
        call.recording.dtypes |= self._part.dtypes
        uses = call.all_uses(node)
        inside, key = self._choose(uses, current)
        given = list(args)
        found = self._variants[key](args)
        if inside:
            contracted = self._contracted[key]
            gramian, *results = found[self._results :]
            taken = [of.use for of in inside], contracted.factors(uses, results), contracted.taken
            current.tell(partial(current.receiver.take_part, gramian, *taken))
        for number, places in self._shown[key]:
            use = uses[number]
            if use is not None:
                cotangent, *saved = [
                    given[place.number] if place.is_input else found[place.number]
                    for place in places
                ]
                current.show(use, tuple(saved), cotangent.unsqueeze(0))
        return found[: self._results]

    def _choose(
        self, uses: Sequence[RuleUse | None], current: Pass
    ) -> tuple[Sequence[Inside], Any]:
        """What is contracted inside, and the key of the variant that does it."""
        receiver = current.receiver
        ask = getattr(receiver, "layouts_inside", None)
        while ask is not None and not self._part.sizes.are_open and current.hidden is None:
            candidates = [x for i, x in enumerate(uses) if x and i not in self._untraceable]
            layouts = ask(candidates)
            inside = [Inside(i, x, layouts[x]) for i, x in enumerate(uses) if x and x in layouts]
            if not inside:
                break
            try:
                key = self._contracting(inside, Asked(receiver.limit.elements, receiver.form))
                if self._contracted[key].taken > receiver.room(inside[0].use.reads[0].sources[0]):
                    key = self._contracting(inside, Asked(receiver.limit.elements, "auto"))
            except UntraceableError as error:
                self._untraceable.add(error.number)
            except Exception:  # the compiler's: what it cannot compile, the engine contracts itself
                self._untraceable.update(of.number for of in inside)
            else:
                return inside, key
        self._variant("taps", partial(self._with_taps, "taps"))
        return (), "taps"

    def _contracting(self, inside: Sequence[Inside], asked: Asked) -> Any:
        """The key of the variant that contracts some uses."""
        key = key_of(inside, asked)
        self._variant(key, partial(self._with_taps, key, inside, asked))
        return key

    def _variant(self, key: Any, make: Callable[[], fx.GraphModule]) -> Compiled:
        """A compiled variant, made when it is first needed."""
        found = self._variants.get(key)
        if found is None:
            from torch._inductor.virtualized import V

            mode = self._tracing.fake_mode if self._tracing else None
            with torch._guards.tracing(self._tracing), V.set_fake_mode(mode):
                found = self._variants[key] = self._compile(make())
        return found

    def _without_taps(self, kept: Collection[int] | None = None) -> fx.GraphModule:
        """The graph as if it was not recorded, with the gradients of some inputs, or of all."""
        module = _copied(self._graph)
        for node in _shows(module):
            node.replace_all_uses_with(_arguments(node)[0])
        results = _results(module)
        if kept is not None:
            results = [x if i in kept else None for i, x in enumerate(results)]
        return _finished(module, results)

    def _with_taps(
        self, key: Any, inside: Sequence[Inside] = (), asked: Asked | None = None
    ) -> fx.GraphModule:
        """The graph without gradients of parameters, and with what is shown behind its results.

        Directly behind its results, it has those of what is contracted ``inside``.
        """
        module = _copied(self._graph)
        inputs = {x: i for i, x in enumerate(_inputs(module))}
        parameters = set(self._part.parameters)
        results = [None if i in parameters else x for i, x in enumerate(_results(module))]
        shown = self._shown[key] = []
        factors = {}
        numbers = {of.number for of in inside}
        for node in _shows(module):
            cotangent, saved, use = _arguments(node)
            factors[use] = [_origin(x) for x in (cotangent, *saved)]
        if asked is not None:
            with module.graph.inserting_before(module.graph.output_node()):
                tensors = [factors[of.number] for of in inside]
                self._contracted[key] = contracted = append_contractions(
                    module.graph, inside, tensors, asked, self._decompositions()
                )
                results += contracted.results
        for node in _shows(module):
            cotangent, saved, use = _arguments(node)
            if use in numbers:
                continue
            places = []
            for x in (cotangent, *saved):  # what autograd saved anyway needs no result
                x = _origin(x)
                if x in inputs:
                    places.append(_Place(True, inputs[x]))
                else:
                    places.append(_Place(False, len(results)))
                    results.append(x)
            shown.append(_Shown(use, tuple(places)))
        for node in _shows(module):
            node.replace_all_uses_with(_arguments(node)[0])
        return _finished(module, results)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _shows(module: fx.GraphModule) -> list[fx.Node]:
    """Where cotangents are shown, in the order of the pass."""
    return [node for node in module.graph.nodes if node.target is SHOW]


def _results(module: fx.GraphModule) -> list[Any]:
    """The results of a graph."""
    results: Any = module.graph.output_node().args[0]
    return list(results)


def _dtypes(module: fx.GraphModule) -> set[torch.dtype]:
    """Those of all floating-point numbers in a graph: what its results are as precise as."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return {dtype for dtype in dtypes if dtype.is_floating_point}


def _origin(node: fx.Node) -> fx.Node:
    """The node that another is an alias of."""
    while node.target in (SHOW, torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = _arguments(node)[0]
    return node


def _unmarked(result: Any) -> Any:
    """A result, or the cotangent if it is what an operator gives that shows it."""
    while isinstance(result, fx.Node) and result.target is SHOW:
        result = _arguments(result)[0]
    return result


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node."""
    return node.args


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that may be changed."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    output = graph.output(graph.graph_copy(module.graph, values))
    output.meta = copy.copy(module.graph.output_node().meta)
    graph._codegen = copy.copy(module.graph._codegen)
    copied = fx.GraphModule(module, graph)
    copied.meta = dict(module.meta)
    return copied


def _finished(module: fx.GraphModule, results: Sequence[Any]) -> fx.GraphModule:
    """A graph with other results, and without what they do not need."""
    output = module.graph.output_node()
    output.args = (tuple(map(_unmarked, results)),)
    output.meta.pop("desc", None)
    for node in reversed(_shows(module)):
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    _compute_less(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _compute_less(graph: fx.Graph) -> None:
    """Lets operators with several gradients (convolutions) compute those that are used."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        names = [argument.name for argument in schema.arguments]
        if "output_mask" in names and len(node.args) > names.index("output_mask"):
            place = names.index("output_mask")
            used = {user.args[1] for user in node.users if user.target is operator.getitem}
            mask = [bool(x) and i in used for i, x in enumerate(node.args[place])]
            node.update_arg(place, mask)
