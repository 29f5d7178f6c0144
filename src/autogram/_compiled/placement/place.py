"""Places of samples in the values of a graph, and one call of an operator that moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autogram._blocks import Folded


class Unknown:
    """Samples may be anywhere."""


class Zero:
    """There is no cotangent, and thus no place."""


UNKNOWN, ZERO = Unknown(), Zero()
# The samples' place in the result of a node. `None`: the result depends on no cotangent.
Place = Folded | Unknown | Zero | None
PlaceOrSeveral = Place | tuple[Place, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator that reads a cotangent."""

    node: fx.Node
    places: Mapping[fx.Node, PlaceOrSeveral]
    shape_of: Callable[[fx.Node], Shape]

    def of(self, argument: Any) -> Place:
        """The samples' place in an argument."""
        found = self.places[argument] if isinstance(argument, fx.Node) else None
        return UNKNOWN if isinstance(found, tuple) else found

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by position or by name."""
        args = self.node.args
        return args[position] if position < len(args) else self.node.kwargs.get(name, default)

    @property
    def first(self) -> Any:
        """The first argument."""
        return self.node.args[0]

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return self.shape_of(self.node)

    def only_first(self) -> Folded | None:
        """The place in the first argument, if it has one and no other argument is a cotangent."""
        place = self.of(self.first)
        others = [x for x in self.node.all_input_nodes if x is not self.first]
        if not isinstance(place, Folded) or any(self.places[x] is not None for x in others):
            return None
        return place


PlacementRule = Callable[[OperatorCall], PlaceOrSeveral]


def moved(place: Folded, dim: int) -> Folded:
    """The same place, along another dimension."""
    return Folded(dim, place.before, place.batch, place.after)


def common(places: Sequence[Place]) -> Place:
    """The place of a sum, if the samples have the same place in all parts."""
    found = {place for place in places if place is not None and place is not ZERO}
    if not found:
        return ZERO
    return found.pop() if len(found) == 1 else UNKNOWN
