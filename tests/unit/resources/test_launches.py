"""How many operations a step launches on a GPU, counted on a CPU: a figure that may not grow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autogram import Engine
from tests.unit._blocks.kernels.as_on_a_gpu import contract_as_on_a_gpu
from tests.unit._weights.as_on_a_gpu import look_as_on_a_gpu

# They launch nothing: they make views or memory, or answer questions.
SILENT = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias", "aten::set_", "prof")
SILENT += ("aten::promote_types", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh")


class Launches(TorchDispatchMode):
    """Counts the operators of a block that do work."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self.count += not (function.is_view or function.name().startswith(SILENT))
        return function(*args, **(kwargs or {}))


def perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 512))


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, behind in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, behind, 3, padding=1), nn.GroupNorm(8, behind), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def depthwise() -> nn.Module:
    convolutions = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3, groups=32), nn.ReLU()
    mean = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Conv2d(64, 64, 3, groups=64), *mean)


class Transformer(nn.Module):
    """Two layers behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.table(x))).mean(1)


# Launches of a step of gradient descent, with two passes, and fused.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[int, int, int]]] = {
    "perceptron": (perceptron, lambda: torch.randn(64, 512).float(), (58, 85, 60)),
    "convolutions": (convolutional, lambda: torch.randn(16, 3, 16, 16).float(), (31, 72, 78)),
    "depthwise convolutions": (depthwise, lambda: torch.randn(16, 3, 32, 32).float(), (17, 40, 44)),
    "transformer": (Transformer, lambda: torch.randint(100, (8, 16)), (103, 228, 203)),
}


@pytest.mark.cpu
@pytest.mark.parametrize("model", MODELS)
def test_launches_do_not_grow(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call that is not verified, and with a fused optimizer, which launches once."""
    contract_as_on_a_gpu(monkeypatch, processors=128)
    look_as_on_a_gpu(monkeypatch)
    make_model, make_batch, expected = MODELS[model]
    found = []
    for kind in ("SGD", "two passes", "fused"):
        network = make_model().float()
        engine = None if kind == "SGD" else Engine(network, batch_dim=0)
        x = make_batch()
        y = torch.randint(10, (len(x),))
        for _ in range(6):
            network.zero_grad()
            with Launches() as launches:
                losses = F.cross_entropy(network(x), y, reduction="none")
                if engine is None:
                    losses.mean().backward()
                elif kind == "fused":
                    engine.backward(losses, lambda gramian: gramian.mean(1))
                else:
                    losses.backward(engine.compute_gramian(losses).mean(1))
        found.append(launches.count)
    assert all(n <= most for n, most in zip(found, expected, strict=True)), found
