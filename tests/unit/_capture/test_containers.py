"""Tensors inside arguments and outputs."""

from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from autogram._containers import replaced, tensors_in

OLD, NEW, OTHER = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)


@dataclass
class Plain:
    """Has a field that is set late."""

    held: Any
    late: Any = field(init=False, repr=False)


@dataclass(frozen=True)
class Frozen:
    """Cannot be assigned to."""

    held: Any


@dataclass(slots=True)
class Narrow:
    """Has no dict of its own."""

    held: Any


class Named(NamedTuple):
    """Is made from separate arguments."""

    held: Any
    number: int


class Slotted:
    """An object with an attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held


CONTAINERS: dict[str, Any] = {
    "tuple": lambda x: (x, 1),
    "list": lambda x: [x, "text"],
    "dict": lambda x: {"held": x, "number": 1.0},
    "ordered dict": lambda x: OrderedDict(held=x),
    "named tuple": lambda x: Named(x, 1),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "dataclass with slots": Narrow,
    "set": lambda x: {x, 1},
    "namespace": lambda x: SimpleNamespace(held=x),
    "object": Slotted,
    "nested": lambda x: {"held": [(x, None), Plain([x])]},
}


def held(value: Any) -> list[Tensor]:
    """The tensors, in any order."""
    return list(tensors_in(value))


@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_are_found(name: str) -> None:
    found = held(CONTAINERS[name](OLD))
    assert found
    assert all(tensor is OLD for tensor in found)


@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_are_exchanged_in_a_copy(name: str) -> None:
    """The value has its type, and the user's container is as before."""
    value = CONTAINERS[name](OLD)
    found = replaced(value, {id(OLD): NEW})
    assert type(found) is type(value)
    assert all(tensor is NEW for tensor in held(found))
    assert len(held(found)) == len(held(value))
    assert all(tensor is OLD for tensor in held(value))


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_value_with_nothing_to_exchange_is_itself(name: str) -> None:
    value = CONTAINERS[name](OLD)
    assert replaced(value, {id(OTHER): NEW}) is value


def test_a_tensor_alone() -> None:
    assert held(OLD) == [OLD]
    assert replaced(OLD, {id(OLD): NEW}) is NEW
    assert replaced(OTHER, {id(OLD): NEW}) is OTHER


def test_other_values_have_none() -> None:
    """Numbers, text, functions, and modules with their parameters."""
    assert held([None, 1, 2.0, "text", b"bytes", True, test_a_tensor_alone, int]) == []
    assert held(nn.Linear(2, 2)) == []


def test_attributes_of_a_data_class_that_are_no_fields() -> None:
    """They are replaced with the fields, as the same tensor may be in both."""

    @dataclass
    class Aliased:
        held: Tensor

        def __post_init__(self) -> None:
            self.alias = self.held

    found = replaced(Aliased(OLD), {id(OLD): NEW})
    assert found.held is NEW
    assert found.alias is NEW


def test_containers_that_hold_themselves() -> None:
    """They end."""
    value: list[Any] = [OLD]
    value.append(value)
    assert held(value) == [OLD]
