"""Parts of a Jacobian, with tensors of a GPU that have no data."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autogram._blocks import Block, Columns, Devices, Limit, Lookup, Region
from autogram._capture.samples.objectives import Objectives
from autogram._jacobian.parts import JacobianPart


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="a PyTorch without CUDA indexes no tensor of a GPU, also without data",
)
def test_rows_of_some_objectives_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which objectives are asked for is known on the CPU."""

    def unique(x: Tensor, *, return_inverse: bool) -> tuple[Tensor, Tensor]:
        """As for distinct values: without data, these are not known."""
        assert return_inverse
        return x, torch.arange(len(x), device="cpu")

    monkeypatch.setattr(torch, "unique", unique)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with FakeTensorMode():
        losses, table = torch.empty(3, device="cuda"), torch.empty(5, 4, device="cuda")
        factors = torch.empty(1, 3, 5, device="cuda"), torch.empty(3, 4, device="cuda")
        indices = torch.zeros(3, 2, dtype=torch.long, device="cuda")
        cotangents = torch.empty(1, 3, 2, 4, device="cuda")
        for block in (Block("kbo,bi->kboi", factors), Lookup(indices, cotangents)):
            columns = Columns(Region.contiguous((5, 4)), Devices(Limit(2**40)).on("cuda"))
            columns.add(Region.contiguous((5, 4)), block)
            part = JacobianPart(Objectives(losses, 0), {table: columns})
            rows = part.rows(table, torch.tensor([2, 0], device="cpu"))
            assert rows is not None
            assert rows.shape == (2, 5, 4)
            assert rows.device.type == "cuda"
