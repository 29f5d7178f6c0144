"""Copies of factors on another device: how much memory they take."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._jacobian.moving import _Copies

META = torch.device("meta")


def patches(images: Tensor) -> Tensor:
    """All windows of three by three pixels, as a view."""
    return images.unfold(2, 3, 1).unfold(3, 3, 1)


@pytest.mark.parametrize(
    ("tensor", "elements"),
    [
        (patches(torch.ones(2, 3, 8, 8)), 2 * 3 * 8 * 8),
        (torch.ones(4, 1).expand(4, 5), 4),
        (torch.ones(6, 5).T, 30),
        (torch.ones(6, 5)[::2, 1:3], 6),
        (torch.ones(0, 5), 0),
        (torch.tensor(1.0), 1),
    ],
    ids=["patches", "expanded", "transposed", "part", "empty", "number"],
)
def test_copies_take_no_more_memory(tensor: Tensor, elements: int) -> None:
    copy = _Copies(META)(tensor)
    assert (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, META)
    assert copy.untyped_storage().nbytes() == elements * copy.itemsize


def test_patches_keep_their_values() -> None:
    """On a device on which they are there already, which copies nothing."""
    found = patches(torch.arange(2 * 3 * 8 * 8).view(2, 3, 8, 8).float())[:, 1:, 1:]
    copy = _Copies(found.device)(found)
    assert torch.equal(copy, found)


def test_tensors_are_copied_once() -> None:
    """Blocks that have a factor in common still have it."""
    copies, x = _Copies(META), torch.ones(2, 3, 8, 8)
    assert copies(x) is copies(x)
    padded = F.pad(x, (1, 1, 1, 1))
    first, second = copies(patches(padded)), copies(patches(padded))
    assert first._base is second._base
    assert copies(x[1:]) is not copies(x[:1])
