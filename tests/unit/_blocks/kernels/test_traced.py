"""Kernels in a graph of a compiler: what the compiler makes of their calls."""

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autogram._blocks.kernels import Limit, TracedCudaKernels, cuda


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(3, 5, 4), (3, 1, 4), (1, 5, 4), (3, 5, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("stack", [(), (2,)], ids=["product", "products"])
def test_thin_products_keep_their_digits(
    stack: tuple[int, ...],
    sizes: tuple[int, int, int],
    half: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor of torch 2.13 makes products of a single term element by element, and in half."""
    monkeypatch.setattr(cuda, "_can_accumulate", lambda *_: True)
    rows, terms, columns = sizes
    kernels = TracedCudaKernels(Limit(2**40))

    def product(x: Tensor, y: Tensor) -> Tensor:
        return kernels.matrix_product(x, y, None)

    with FakeTensorMode():
        x = torch.empty(*stack, rows, terms, dtype=half, device="cuda")
        y = torch.empty(*stack, terms, columns, dtype=half, device="cuda")
        graph = make_fx(product, decomposition_table=select_decomp_table())(x, y)
    (result,) = graph.graph.find_nodes(op="output")[0].args
    assert result.meta["val"].dtype == torch.float32
    is_wide = [n.args[0].meta["val"].dtype == torch.float32 for n in multiplied(graph)]
    assert all(is_wide)


def multiplied(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The products element by element."""
    return list(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor))
