"""Which elements of a parameter a view covers."""

import pytest
import torch

from autogram._blocks import Region
from autogram._blocks.region import overlap

BASE = torch.arange(24.0).view(4, 6)

VIEWS = [
    pytest.param(lambda w: w, id="whole"),
    pytest.param(lambda w: w.T, id="transpose"),
    pytest.param(lambda w: w[1:3], id="rows"),
    pytest.param(lambda w: w[:, ::2], id="columns with a step"),
    pytest.param(lambda w: w[2], id="one row"),
    pytest.param(lambda w: w[:, 3], id="one column"),
    pytest.param(lambda w: w[1, 2], id="one element"),
    pytest.param(lambda w: w.view(2, 2, 6).permute(2, 0, 1), id="permuted"),
    pytest.param(lambda w: w[1:2, None, 2:4], id="ones"),
    pytest.param(lambda w: w[:1].expand(5, 6), id="expanded"),
    pytest.param(lambda w: w.diagonal(), id="diagonal"),
]


@pytest.mark.parametrize("view", VIEWS)
def test_indices_are_places_in_the_storage(view) -> None:
    seen = view(BASE)
    indices = Region.of(seen).indices()
    assert sorted(indices.tolist()) == sorted(set(seen.flatten().int().tolist()))


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_one_kind_have_disjoint_places(view) -> None:
    region = Region.of(view(BASE))
    assert region.is_injective
    first, last = region.bounds
    assert (first, last) == (int(view(BASE).min()), int(view(BASE).max()))


def test_transpose_has_the_same_canonical_form() -> None:
    assert Region.of(BASE.T).canonical == Region.of(BASE).canonical
    assert Region.of(BASE.T).order == (1, 0)


def test_dimensions_that_address_nothing_new_are_left_out() -> None:
    assert Region.of(BASE[None, :1].expand(3, 5, 6)).canonical == Region.of(BASE[0]).canonical


def test_shift_moves_the_places() -> None:
    assert Region.of(BASE[1], -6).canonical == Region.of(BASE[0]).canonical


def test_split_first() -> None:
    region = Region.of(BASE).split_first(2)
    assert region == Region.of(BASE.view(2, 2, 6))


def test_windows_that_share_elements_are_not_injective() -> None:
    assert not Region.of(BASE.view(-1).unfold(0, 4, 2)).is_injective


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param(lambda w: w[:2], lambda w: w[2:], False, id="rows apart"),
        pytest.param(lambda w: w[:3], lambda w: w[2:], True, id="rows that overlap"),
        pytest.param(lambda w: w[::2], lambda w: w[1::2], False, id="interleaved rows"),
        pytest.param(lambda w: w[:, :3], lambda w: w[:, 3:], False, id="columns apart"),
        pytest.param(lambda w: w[1], lambda w: w[:, 2], True, id="a row and a column"),
        pytest.param(lambda w: w[1, :2], lambda w: w[:, 2], False, id="a row beside a column"),
        pytest.param(lambda w: w, lambda w: w[3, 5], True, id="whole and last"),
    ],
)
def test_overlap(first, second, expected: bool) -> None:
    regions = Region.of(first(BASE)).canonical, Region.of(second(BASE)).canonical
    assert overlap(*regions) is expected
    assert overlap(*reversed(regions)) is expected


def test_view_with_an_offset_in_its_storage() -> None:
    part = torch.arange(10.0)[4:]
    assert Region.of(part[1:3]).indices().tolist() == [5, 6]
