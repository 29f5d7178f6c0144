"""Which dimensions a view by ``as_strided`` is said to keep, compared with where elements are."""

import random

import torch
from torch import Tensor

from autogram._capture.autograd.slices import kept_dims

# How many views of random strides to look at.
VIEWS = 600


def view_of(x: Tensor, draw: random.Random) -> Tensor:
    """A view, most often one with a part of a dimension as another tensor has it."""
    own = list(zip(x.shape, x.stride(), strict=True))
    own += [(n // 2, 2 * step) for n, step in own if n % 2 == 0]
    others = [(draw.choice([1, 2, 3, 4]), draw.choice([0, 1, 2, 3, 6, 12, 24])) for _ in own]
    ways = [draw.choice([*own, *others]) for _ in range(draw.randint(1, 4))]
    sizes, strides = [n for n, _ in ways], [step for _, step in ways]
    offset = draw.choice([None, 0, x.storage_offset(), x.storage_offset() + draw.randint(0, 9)])
    return x.as_strided(sizes, strides, offset)


def places_along(node: object, shape: torch.Size, dim: int, other: int) -> list[list[int]]:
    """For each index of the view, the indices of the viewed tensor that have elements of it."""
    places = []
    for index in range(shape[dim]):
        cotangent = torch.zeros(shape)
        cotangent.select(dim, index).fill_(1.0)
        gradient = node(cotangent)  # type: ignore[operator]
        places.append(gradient.movedim(other, 0).flatten(1).any(1).nonzero().flatten().tolist())
    return places


def test_kept_dimensions_are_where_they_are_said_to_be() -> None:
    """Views of tensors that are contiguous, transposed, sliced, or expanded."""
    draw, count = random.Random(0), 0
    for number in range(VIEWS):
        x = torch.randn(6, 4, 6, 2, requires_grad=True) * 1.0
        x = [x, x.transpose(0, 2), x[1:], x[:, :, 1:5], x[:1].expand(6, 4, 6, 2), x[2:, 1]][
            number % 6
        ]
        try:
            view = view_of(x, draw)
        except RuntimeError:  # out of the storage
            continue
        for dim, other in kept_dims(view.grad_fn):
            size, viewed = view.shape[dim], x.shape[other]
            fold = viewed // size
            assert fold * size == viewed
            places = places_along(view.grad_fn, view.shape, dim, other)
            for index, some in enumerate(places):
                assert all(place // fold == index for place in some)
            count += 1
    assert count > VIEWS / 10


def test_overlapping_windows_keep_what_is_around_them() -> None:
    """As in models whose tokens see a window: heads of samples, in chunks that overlap."""
    x = torch.randn(6, 16, 5, requires_grad=True) * 1.0
    chunks = x.as_strided((6, 3, 8, 5), (80, 20, 5, 1))
    assert kept_dims(chunks.grad_fn) == ((0, 0), (3, 2))
    samples = x.as_strided((3, 2, 3, 8, 5), (160, 80, 20, 5, 1))
    assert kept_dims(samples.grad_fn) == ((0, 0), (4, 2))


def test_a_view_that_reaches_into_the_next_row_keeps_nothing_in_front() -> None:
    """Rows of six at a distance of five."""
    x = torch.randn(4, 5, requires_grad=True) * 1.0
    assert kept_dims(x.as_strided((3, 6), (5, 1)).grad_fn) == ()
