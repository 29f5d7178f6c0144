"""Views of a parameter, as nodes tell them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram._capture.from_graph import views
from tests.unit.engines import batch

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda w: w[0].t(),
    "transpose": lambda w: w.transpose(-1, 0),
    "mT": lambda w: w.mT,
    "permute": lambda w: w.permute(2, -3, 1),
    "view": lambda w: w.view(8, 3),
    "reshape": lambda w: w.transpose(0, 1).reshape(4, 6),
    "flatten": lambda w: w.flatten(1),
    "squeeze": lambda w: w[:, :1].squeeze(),
    "squeeze of a dimension": lambda w: w[:, :1].squeeze(-2),
    "squeeze of dimensions": lambda w: w[:1, :1].squeeze((0, 1)),
    "unsqueeze": lambda w: w.unsqueeze(-1),
    "split": lambda w: w.split(3, -2),
    "split by sizes": lambda w: w.split([1, 2, 1], 1),
    "chunk": lambda w: w.chunk(2, 2),
    "unsafe split": lambda w: w.unsafe_split(3, 1),
    "slice": lambda w: w[:, -3:, ::2],
    "select": lambda w: w.select(-1, -2),
    "narrow": lambda w: w.narrow(1, 1, 2),
    "unbind": lambda w: w.unbind(1),
    "view as": lambda w: w.view_as(w),
    "clone": lambda w: w.clone(),
    "cast": lambda w: w.to(torch.float32),
    "several": lambda w: w[1].t()[::2].unsqueeze(0).flatten(1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_elements_are_those_of_the_view(view: Callable[[Tensor], Any]) -> None:
    parameter = nn.Parameter(batch(2, 4, 3))
    results = view(parameter)
    for tensor in results if isinstance(results, tuple) else (results,):
        chain: list[tuple[Any, int]] = []
        node, number = tensor.grad_fn, tensor.output_nr
        while not hasattr(node, "variable"):
            assert views.is_of_view(node)
            chain.append((node, number))
            ((node, number),) = node.next_functions
        found = views.viewed(parameter, chain[::-1])
        if "UnsafeView" in str(chain) or tensor._base is None:  # a copy in another order
            assert found is None or torch.equal(found.to(tensor.dtype), tensor)
        else:
            assert found is not None
            assert torch.equal(found, tensor)
            assert found.data_ptr() == tensor.data_ptr()
            assert found.stride() == tensor.stride()


def test_what_is_no_view() -> None:
    parameter = nn.Parameter(batch(2, 4, 3))
    for tensor in (parameter * 2, parameter.sum(0), parameter.expand(2, 2, 4, 3), parameter[[0]]):
        assert not views.is_of_view(tensor.grad_fn)
