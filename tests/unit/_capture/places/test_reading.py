"""What nodes saved, copied to the CPU."""

import torch

from autogram._capture.places.reading import copied_to_cpu, copied_together

TENSORS = [
    torch.arange(5),
    torch.tensor([True, False, True]),
    torch.randn(3, 2).half(),
    torch.tensor(3.0),
    torch.empty(0),
    torch.arange(6).view(2, 3).T,
    torch.arange(3, dtype=torch.int32),
]


def test_copies_in_one_piece() -> None:
    """Whatever their dtypes are."""
    for x, copy in zip(TENSORS, copied_together(TENSORS), strict=True):
        assert copy.dtype == x.dtype
        assert torch.equal(copy, x)
        assert not copy.numel() or copy.data_ptr() != x.data_ptr()


def test_tensors_of_the_cpu_are_not_copied() -> None:
    copies = copied_to_cpu(TENSORS)
    assert [copies[x].data_ptr() for x in TENSORS] == [x.data_ptr() for x in TENSORS]
