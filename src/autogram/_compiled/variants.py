"""Variants of the compiled backward pass of a part, over one set of saved tensors.

- ``full``: PyTorch's own, with the gradients of all inputs;
- ``taps``: the cotangents of the part's uses with the tensors that their rules save, without
  gradients of parameters;
- ``gramian``: the same, with the part of the Gramian from uses that are contracted inside, and, in
  a fused step, the tensors from which their gradients are computed;
- ``rows``: the gradients of some inputs only.

The pass that is running decides which of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor

from autogram._blocks import Keep
from autogram._capture.autograd.graph import calls_of
from autogram._capture.autograd.nested import running_pass
from autogram._capture.autograd.passes import Pass
from autogram._capture.uses import RuleUse
from autogram._compiled.call import PartCall
from autogram._compiled.compilers import compiling
from autogram._compiled.contraction import (
    Asked,
    Contracted,
    Inside,
    OutsideError,
    append_contractions,
    key_of,
)
from autogram._compiled.graphs import (
    Form,
    arguments,
    arguments_of_gradients,
    copied,
    dtypes,
    finished,
    fixed,
    form_of,
    origin,
    results,
    shows_in,
    written_once,
)
from autogram._compiled.tracing.part import Part

# With open sizes, at most so many sets of sizes get their own graphs: compiling one takes seconds.
_MOST_FORMS = 8

Compiled = Callable[[list[Any]], Sequence[Any]]
Compile = Callable[[fx.GraphModule, Sequence[Any] | None], Compiled]


class _Variant(NamedTuple):
    """A compiled graph, which takes its inputs in a list, and may empty it."""

    run: Compiled
    # By use: the places of its cotangent and of its rule's saved tensors, among inputs and results.
    shown: Mapping[int, Sequence[int]] = MappingProxyType({})
    contracted: Contracted | None = None  # results right after those for autograd


class Backward:
    """The backward pass of a part, as autograd calls it.

    Operators in the graph mark where to show cotangents. ``compile`` compiles a variant for inputs
    like some examples; ``decompositions`` gives those of operators that it does not accept.
    """

    def __init__(
        self,
        part: Part,
        graph: fx.GraphModule,
        compile: Compile,
        decompositions: Callable[[], Mapping[Any, Any]],
    ) -> None:
        self._boxed_call = True  # AOTAutograd reads this: it passes a list, which may be emptied
        self._part, self._graph, self._compile = part, graph, compile
        part.backward = graph
        self._dtypes = dtypes(graph)
        self._decompositions = decompositions
        self._results = len(results(graph))
        self._gradients_of = arguments_of_gradients(graph)
        self._forms: set[Form] = {()}  # forms with their own graphs; () stands for all
        self._variants: dict[Any, _Variant] = {}
        self._outside: dict[Keep | None, set[int]] = {}  # numbers of uses, by what is kept
        self._tracing = torch._guards.TracingContext.try_get()
        self._is_guarded = True
        if part.sizes.are_open:
            # Compiled now, a compiler's conditions on sizes become guards of the part. Later, they
            # would hold for the sizes of one call, but be used for all.
            self._variant("full", self._without_taps)
            with suppress(Exception):  # the compiler's: engines' variant then runs uncompiled
                self._variant("taps", self._with_taps)
            self._is_guarded = False

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the variant that the running pass needs."""
        node, current = torch._C._current_autograd_node(), running_pass()
        if current is not None:
            own = (x for x in calls_of(node) if x.recording.channel is current.channel)
            if (call := next(own, None)) is not None:
                is_wanted = current.reach(call.recording)
                if current.is_blocked:
                    return self._rows(args, call.rows_of)
                if is_wanted:
                    return self._taps(args, call, node, current)
        return self._variant("full", self._without_taps).run(args)

    def _rows(self, args: list[Any], kept: tuple[int, ...]) -> Sequence[Any]:
        """The gradients of some inputs only."""
        if not kept:
            args.clear()
            return (None,) * self._results
        return self._variant(kept, partial(self._without_taps, kept)).run(args)

    def _taps(self, args: list[Any], call: PartCall, node: Any, current: Pass) -> Sequence[Any]:
        """Shows the cotangents of the uses, and returns the results for other nodes."""
        call.recording.dtypes |= self._dtypes
        uses = call.all_uses(node)
        given = list(args)
        inside, variant = self._choose(call, uses, given, current)
        found = variant.run(args)
        if variant.contracted is not None:
            gramian, *factors = found[self._results :]
            take = partial(
                current.receiver.take_part,
                uses=[of.use for of in inside],
                kept=variant.contracted.factors(uses, factors),
                taken=variant.contracted.taken,
            )
            current.tell(take, gramian, factors)
        there = (*given, *found)
        for number, places in variant.shown.items():
            use = uses[number]
            if use is not None:
                cotangent, *saved = [there[place] for place in places]
                current.show(partial(current.receiver, use, tuple(saved)), cotangent, saved)
        return found[: self._results]

    def _choose(
        self, call: PartCall, uses: Sequence[RuleUse | None], args: Sequence[Any], current: Pass
    ) -> tuple[Sequence[Inside], _Variant]:
        """The uses to contract inside, and the variant that does it."""
        receiver = current.receiver
        ask = getattr(receiver, "layouts_inside", None)
        while ask is not None:
            outside = self._outside.setdefault(receiver.form, set())
            candidates = [x for i, x in enumerate(uses) if x and i not in outside]
            layouts = ask(candidates)
            inside = [Inside(i, x, layouts[x]) for i, x in enumerate(uses) if x and x in layouts]
            form = form_of(args) if inside and self._part.sizes.are_open else ()
            if not inside or (form not in self._forms and len(self._forms) > _MOST_FORMS):
                break
            self._forms.add(form)
            try:
                for keep in (receiver.form, "auto"):  # if there is no room for larger rows
                    asked = Asked(receiver.limit.elements, keep)
                    make = partial(self._with_taps, inside, asked, args if form else None)
                    variant = self._variant((key_of(inside, asked, call.roots), form), make)
                    taken = variant.contracted.taken if variant.contracted else 0
                    if receiver.has_room(inside[0].use.reads[0].sources[0].device, taken):
                        break
            except OutsideError as error:
                outside.add(error.number)
            except Exception:  # the compiler failed: the engine contracts these uses
                outside.update(of.number for of in inside)
            else:
                return inside, variant
        return (), self._variant("taps", self._with_taps)

    def _variant(self, key: Any, make: Callable[[], _Variant]) -> _Variant:
        """A compiled variant, made when it is first needed."""
        found = self._variants.get(key)
        if found is None:
            with compiling():
                found = self._variants[key] = self._variants.get(key) or make()
        return found

    def _without_taps(self, kept: Collection[int] | None = None) -> _Variant:
        """The graph as if unrecorded, with the gradients of some inputs, or of all."""
        module = copied(self._graph)
        for node in shows_in(module):
            node.replace_all_uses_with(arguments(node)[0])
        wanted = results(module)
        if kept is not None:
            gradients = zip(self._gradients_of, wanted, strict=True)
            wanted = [x if i in kept else None for i, x in gradients]
        return _Variant(self._compiled(finished(module, wanted)))

    def _with_taps(
        self,
        inside: Sequence[Inside] = (),
        asked: Asked | None = None,
        args: Sequence[Any] | None = None,
    ) -> _Variant:
        """The graph without gradients of parameters, with the shown tensors after its results.

        Some uses are contracted inside; their results come right after those for autograd. The
        graph is for inputs of the form of ``args``, if these are given.
        """
        module = copied(self._graph)
        factors: dict[int, list[Any]] = {}
        for node in shows_in(module):
            cotangent, saved, use = arguments(node)
            written = written_once(module.graph, origin(cotangent))
            factors[use] = [written, *map(origin, saved)]
        for node in shows_in(module):
            node.replace_all_uses_with(arguments(node)[0])
            module.graph.erase_node(node)
        parameters = set(self._part.parameters)
        gradients = zip(self._gradients_of, results(module), strict=True)
        wanted = [None if i in parameters else x for i, x in gradients]
        decompositions, examples = self._decompositions(), None
        if args is not None:
            nodes = [x for x in wanted if x is not None] + list(chain(*factors.values()))
            module, own, examples = fixed(module, nodes, args, decompositions)
            wanted = [None if x is None else own[x] for x in wanted]
            factors = {use: [own[x] for x in of] for use, of in factors.items()}
        contracted = None
        if asked is not None:
            with module.graph.inserting_before(module.graph.output_node()):
                tensors = [factors.pop(of.number) for of in inside]
                contracted = append_contractions(
                    module.graph, inside, tensors, asked, decompositions
                )
            wanted += contracted.results
        given = module.graph.find_nodes(op="placeholder")
        places = {x: i for i, x in enumerate(given)}
        for x in chain(*factors.values()):  # tensors that autograd saved anyway need no result
            if x not in places:
                places[x] = len(given) + len(wanted)
                wanted.append(x)
        shown = {use: [places[x] for x in of] for use, of in factors.items()}
        return _Variant(self._compiled(finished(module, wanted), examples), shown, contracted)

    def _compiled(self, module: fx.GraphModule, examples: Sequence[Any] | None = None) -> Compiled:
        """Compiles a graph for inputs like those of the tracing, or like the examples."""
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._inductor.virtualized import V

        if examples is None and not self._is_guarded:
            run: Compiled = make_boxed_func(module.forward)  # uncompiled, it is right for all sizes
            return run
        tracing = self._tracing
        mode = tracing.fake_mode if tracing else None
        if examples is not None:
            mode = next(x.fake_mode for x in examples if isinstance(x, FakeTensor))
            tracing = torch._guards.TracingContext(mode)
        with torch._guards.tracing(tracing), V.set_fake_mode(mode):
            return self._compile(module, examples)
