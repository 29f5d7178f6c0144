"""Places of tensors, held against the sample of each element."""

import random
from collections.abc import Iterator
from math import prod

import pytest
import torch
from torch import Tensor

from autogram._capture.places.places import EMPTY, SEVERAL, Places, unanimous

SHAPES = [(6, 4), (2, 3, 4), (4, 1, 6), (24,), (1, 24), (3, 8), (2, 2, 2, 3), (12, 2), (8, 3)]


def full(places: Places) -> Tensor:
    """The sample of each element."""
    return places.grid().expand(places.shape)


def some() -> Iterator[Places]:
    """Samples along each dimension, along two, in single elements, and in none."""
    for shape in SHAPES:
        for dim in range(len(shape)):
            yield Places.along(shape, dim)
        yield Places.of(shape, torch.randint(-1, 3, shape))
        yield Places.nowhere(shape)


def test_views_keep_each_element() -> None:
    chance = random.Random(0)
    for places in some():
        for _ in range(4):
            shape = chance.choice(SHAPES)
            viewed = places.viewed(shape)
            assert viewed.shape == shape
            assert torch.equal(full(viewed), full(places).reshape(shape))
            places = viewed


def test_views_of_one_dimension_move_no_integers() -> None:
    """However large the tensor is."""
    places = Places.along((4, 1000, 1000), 0)
    for shape in [(4000, 1000), (4, 1000, 10, 100), (4000000,), (40, 100, 1000)]:
        assert places.viewed(shape).samples.numel() == 4


def test_dimensions_in_another_order() -> None:
    for places in some():
        order = torch.randperm(len(places.shape)).tolist()
        assert torch.equal(full(places.permuted(order)), full(places).permute(order))


def test_sums_are_unanimous() -> None:
    for places in some():
        for dim in range(len(places.shape)):
            without = places.without(dim)
            assert without.shape == (*places.shape[:dim], *places.shape[dim + 1 :])
            columns = full(places).movedim(dim, -1).reshape(prod(without.shape), -1)
            for samples, owner in zip(
                columns.tolist(), full(without).flatten().tolist(), strict=True
            ):
                there = {*samples} - {EMPTY}
                assert owner == (SEVERAL if len(there) > 1 else max(there, default=EMPTY))


def test_tensors_that_are_added_up() -> None:
    one = Places.of((4,), torch.tensor([0, 1, EMPTY, 2]))
    two = Places.of((4,), torch.tensor([0, 2, 1, EMPTY]))
    assert full(one.joined(two)).tolist() == [0, SEVERAL, 1, 2]
    assert one.joined(one) is one


@pytest.mark.parametrize("is_exact", [False, True])
def test_positions_without_a_cotangent_count_for_any_sample(*, is_exact: bool) -> None:
    """Unless they are told apart, as tokens beside a class token, which alone has one."""
    samples = torch.full((3, 5), EMPTY)
    samples[:, 0] = torch.arange(3)
    compact = Places.of((3, 5), samples).compact(is_exact=is_exact)
    assert compact.samples.shape == ((3, 5) if is_exact else (3, 1))


def test_samples_along_which_nothing_is_left() -> None:
    assert unanimous(torch.zeros(2, 0, 3, dtype=torch.long), [1]).tolist() == [[[EMPTY] * 3]] * 2


def test_positions_before_and_after() -> None:
    places = Places.along((3, 4), 0)
    assert full(places.padded(0, 1, -1))[:, 0].tolist() == [EMPTY, 0, 1]
    assert full(places.padded(1, 0, 1))[0].tolist() == [0, 0, 0, 0, EMPTY]
