"""Graphs of backward passes: what is written once for several readers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import metrics
from torch.fx.experimental.proxy_tensor import make_fx

from autogram import Engine
from autogram._compiled import variants
from autogram._compiled.graphs import written_once
from tests.unit._compiled.compiling import compiled

X = torch.arange(24.0).view(4, 6)


def last_before(graph: fx.Graph) -> fx.Node:
    """What the first product of a graph reads: what several nodes read, here."""
    (first, *_) = (node for node in graph.nodes if node.target is torch.ops.aten.mm.default)
    found: fx.Node = first.args[0]
    return found


def read_twice(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    """A function in which two others read what `make` makes."""

    def run(x: Tensor) -> list[Tensor]:
        found = make(x)
        return [found @ found.new_ones(found.shape[1], 2), found.sum(0)]

    return run


@pytest.mark.parametrize(
    ("make", "is_written"),
    [
        pytest.param(lambda x: (x + 1).view(8, 3), True, id="view"),
        pytest.param(lambda x: (x + 1).view(2, 2, 6).permute(2, 0, 1).view(6, 4), True, id="views"),
        pytest.param(lambda x: x + 1, False, id="no view"),
        pytest.param(lambda x: x.view(8, 3), False, id="view of an input"),
        pytest.param(lambda x: (x @ x.mT).view(8, 2), False, id="view of a product"),
        pytest.param(lambda x: (x[:, :1] + 1).expand(4, 6), False, id="expanded"),
        pytest.param(lambda x: [y := x + 1, (y * y.view(4, 6)).view(8, 3)][1], True, id="deeper"),
    ],
)
def test_views_of_elementwise_results(make: Callable[[Tensor], Tensor], is_written: bool) -> None:
    """All readers read the view as it is written, and values stay the same."""
    function = read_twice(make)
    module = make_fx(function)(X)
    node = last_before(module.graph)
    users = set(node.users)

    written = written_once(module.graph, node)

    assert (written is not node) == is_written
    assert set(written.users) == users
    assert written.meta["val"].shape == node.meta["val"].shape
    module.recompile()
    for found, expected in zip(module(X), function(X), strict=True):
        assert torch.equal(found, expected)


def test_results_that_others_read() -> None:
    """An elementwise result that others read, too, would be written a second time."""

    def function(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [y.view(8, 3) @ x.new_ones(3, 2), y @ x.new_ones(6, 2)]

    module = make_fx(function)(X)
    node = last_before(module.graph)
    assert written_once(module.graph, node) is node


@pytest.mark.slow
def test_fewer_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a group normalisation, inductor would write the cotangent of a convolution twice."""

    def results_of_a_pass() -> int:
        torch._dynamo.reset()
        layers: list[nn.Module] = []
        for channels in (3, 16):
            layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU()]
        model = nn.Sequential(*layers)
        engine = Engine(model, verify="never")
        run = compiled(model, "inductor", options={"fx_graph_cache": False})
        losses = run(torch.randn(4, 3, 12, 12)).square().mean((1, 2, 3))
        metrics.reset()
        engine.compute_gramian(losses)  # the first pass shows cotangents
        return metrics.ir_nodes_pre_fusion

    few = results_of_a_pass()
    monkeypatch.setattr(variants, "written_once", lambda _graph, node: node)
    assert 0 < few < results_of_a_pass()
