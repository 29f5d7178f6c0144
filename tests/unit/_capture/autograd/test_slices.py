"""Which dimensions of a tensor a slice of it keeps, compared with the elements' own indices."""

from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from autogram._capture.autograd.slices import ChangedSlice, Geometry, kept_by_slice

SHAPE = (3, 4, 4)
SLICES = (..., 0, 2, slice(1, None), slice(None, None, 2), slice(0, 1))
ORDERS = list(permutations(range(3)))


def kept_by_elements(whole: Tensor, part: Tensor, numbers: Tensor) -> list[int]:
    """As `kept_by_slice`, by each element. The numbers are those of the whole's elements."""
    kept = []
    elements = numbers.as_strided(part.shape, part.stride(), part.storage_offset()).long()
    indices = torch.unravel_index(elements, whole.shape)
    for size, index in zip(whole.shape, indices, strict=True):
        own = [
            dim
            for dim in range(part.dim())
            if part.shape[dim] == size
            and bool((index.movedim(dim, -1) == torch.arange(size)).all())
        ]
        kept.append(own[0] if own else -1)
    return kept


@pytest.mark.parametrize("order", ORDERS)
def test_every_basic_slice(order: tuple[int, ...]) -> None:
    """Of a dense tensor in any order of memory, in any order of the slice's dimensions."""
    back = [order.index(d) for d in range(3)]
    numbers = torch.arange(48.0).view(SHAPE).permute(order).contiguous()
    whole = numbers.permute(back)
    seen = set()
    for index in product(SLICES, repeat=3):
        if index.count(...) > 1:
            index = tuple(slice(None) if x is ... else x for x in index)
        part = whole[index]
        for dims in permutations(range(part.dim())):
            moved = part.permute(dims)
            found = kept_by_slice(ChangedSlice(Geometry.of(whole), Geometry.of(moved)))
            assert list(found) == kept_by_elements(whole, moved, numbers.flatten()), index
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
                found = kept_by_slice(ChangedSlice(Geometry.of(whole), Geometry.of(part)))
                expected = kept_by_elements(whole, part, numbers)
                assert all(of in (-1, by) for of, by in zip(found, expected, strict=True))
                claims += sum(of >= 0 for of in found)
    assert claims > 100


def test_nothing_is_known_of_slices_of_tensors_with_gaps() -> None:
    whole = torch.zeros(3, 8)[:, :4]
    assert kept_by_slice(ChangedSlice(Geometry.of(whole), Geometry.of(whole[:, 1]))) == ()
    assert kept_by_slice(None) == ()
