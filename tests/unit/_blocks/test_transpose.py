"""Transposing copies."""

import pytest
import torch
from torch import Tensor

from autogram._blocks import transpose
from autogram._blocks.transpose import copy_channels_last

# The last one has channels that alias, in parts and with a rest.
SHAPES = [(0, 2, 3), (2, 3, 4), (3, 2, 4, 5), (2, 3, 2, 4, 3), (5, 40, 32, 32)]


def assert_is_copied(source: Tensor) -> None:
    """The copy has the values, and what is beside them stays."""
    n, channels, *space = source.shape
    around = torch.full((n, *(size + 2 for size in space), channels), 7.0, dtype=source.dtype)
    inside = around
    for dim, size in enumerate(space, start=1):
        inside = inside.narrow(dim, 1, size)
    expected = around.clone()
    copy_channels_last(source, inside)
    assert torch.equal(inside, source.movedim(1, -1))
    inside.fill_(7)
    assert torch.equal(around, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_copies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_is_copied(torch.randn(shape).to(dtype))


def test_copies_views() -> None:
    """The channels of an image whose channels come last do not alias, and those of a slice may."""
    assert_is_copied(torch.randn(5, 32, 32, 40).movedim(-1, 1))
    assert_is_copied(torch.randn(5, 40, 33, 64)[:, :, 1:, ::2])


def test_goes_through_memory_only_where_channels_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transpose._aliases(torch.empty(5, 40, 32, 32, dtype=torch.float32))
    assert not transpose._aliases(torch.empty(5, 40, 32, 33, dtype=torch.float32))
    assert not transpose._aliases(torch.empty(5, 3, 32, 32, dtype=torch.float32))
    monkeypatch.setattr(transpose, "_PART", 1)
    assert_is_copied(torch.randn(3, 40, 32, 32))
