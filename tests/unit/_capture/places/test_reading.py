"""What nodes saved, copied to the CPU."""

import pytest
import torch
from torch import Tensor

from autogram._capture.places.reading import copied_to_cpu

TENSORS = [
    torch.arange(5),
    torch.tensor([True, False, True]),
    torch.randn(3, 2).half(),
    torch.tensor(3.0),
    torch.empty(0),
    torch.arange(6).view(2, 3).T,
    torch.arange(3, dtype=torch.int32),
]


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_copies_are_the_tensors(is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their dtypes are, also where they come in one piece."""
    joined: list[int] = []
    join = torch.cat

    def noted(parts: list[Tensor]) -> Tensor:
        joined.append(len(parts))
        return join(parts)

    monkeypatch.setattr(torch, "cat", noted)
    found = copied_to_cpu(TENSORS, host="none" if is_elsewhere else "cpu")
    for x in TENSORS:
        assert found[x].dtype == x.dtype
        assert torch.equal(found[x], x)
    assert joined == ([len(TENSORS)] if is_elsewhere else [])
