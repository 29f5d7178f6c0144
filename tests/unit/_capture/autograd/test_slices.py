"""Which dimensions of a tensor a slice of it keeps, compared with the elements' own indices."""

from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from autogram._blocks import Region
from autogram._capture.autograd.slices import ChangedSlice, kept_by_slice

SHAPE = (3, 4, 4)
SLICES = (..., 0, 2, slice(1, None), slice(None, None, 2), slice(0, 1))
ORDERS = list(permutations(range(3)))


def kept_by_elements(whole: Tensor, part: Tensor) -> list[int]:
    """As `kept_by_slice`, by each element."""
    kept = []
    for dim, size in enumerate(whole.shape):
        places = torch.full((whole.untyped_storage().nbytes(),), -1)
        along = torch.arange(size).view(-1, *(1,) * (whole.dim() - dim - 1))
        places.as_strided(whole.shape, whole.stride(), whole.storage_offset())[...] = along
        index = places.as_strided(part.shape, part.stride(), part.storage_offset())
        own = [
            other
            for other in range(part.dim())
            if part.shape[other] == size
            and bool((index.movedim(other, -1) == torch.arange(size)).all())
        ]
        kept.append(own[0] if own else -1)
    return kept


@pytest.mark.parametrize("gaps", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_every_basic_slice(order: tuple[int, ...], gaps: int) -> None:
    """Of a tensor in any order of memory, dense or not, in any order of the slice's dimensions."""
    back = [order.index(d) for d in range(3)]
    stored = torch.zeros([n * gaps for n in SHAPE]).permute(order).contiguous()
    whole = stored.permute(back)[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    seen = set()
    for index in product(SLICES, repeat=3):
        if index.count(...) > 1:
            index = tuple(slice(None) if x is ... else x for x in index)
        part = whole[index]
        for dims in permutations(range(part.dim())):
            moved = part.permute(dims)
            found = kept_by_slice(ChangedSlice(Region.of(whole), Region.of(moved)))
            assert list(found) == kept_by_elements(whole, moved), index
            seen.add(found)
    assert len(seen) > 20


def test_strides_that_are_none_of_the_whole_tensor() -> None:
    """What is claimed holds, for all strides that stay inside of a tensor."""
    numbers = torch.arange(24.0)
    whole, claims = numbers.view(2, 3, 4), 0
    for sizes in product((2, 3, 4), repeat=2):
        for *strides, start in product(range(13), range(13), range(4)):
            if start + sum((n - 1) * by for n, by in zip(sizes, strides, strict=True)) < 24:
                part = numbers.as_strided(sizes, strides, start)
                found = kept_by_slice(ChangedSlice(Region.of(whole), Region.of(part)))
                expected = kept_by_elements(whole, part)
                assert all(of in (-1, by) for of, by in zip(found, expected, strict=True))
                claims += sum(of >= 0 for of in found)
    assert claims > 100
