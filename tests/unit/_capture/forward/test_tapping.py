"""What taps save: the tensors that the calls save themselves."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram._capture.forward.calls import _IN_HALF
from tests.speed.gpu.autocast import autocast_as_on_a_gpu

HALF = [torch.bfloat16, torch.float16]

_IMAGES = {1: (2, 3, 5), 2: (2, 3, 5, 5), 3: (2, 3, 5, 5, 5)}


def _name(function: Callable[..., Any]) -> str:
    """Another for the function than for the method."""
    return f"{function.__name__}-{type(function).__name__}"


def _arguments(function: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Arguments in float32 for a function that autocast carries out in half precision."""
    name = function.__name__
    shapes: tuple[tuple[int, ...], ...] = (3, 3), (3, 3)
    if name.startswith("conv"):
        image = _IMAGES[int(name[-2])]
        shapes = image, (3, 3, *(2 for _ in image[2:]))
    elif "bmm" in name:
        shapes = (2, 3, 3), (2, 3, 3)
    if name in ("addmm", "baddbmm", "scaled_dot_product_attention"):
        shapes = shapes[:1] + shapes
    return tuple(torch.randn(shape).float() for shape in shapes)


@pytest.mark.parametrize("half", HALF, ids=str)
@pytest.mark.parametrize("function", sorted(_IN_HALF, key=_name), ids=_name)
def test_autocast_rounds_what_these_functions_are_given(
    function: Callable[..., Any], half: torch.dtype
) -> None:
    """Each function gives the same result for arguments that were rounded before."""
    arguments = _arguments(function)
    with torch.autocast(arguments[0].device.type, half):
        expected = function(*arguments)
        found = function(*(x.to(half) for x in arguments))
    assert found.dtype == expected.dtype == half
    assert torch.equal(found, expected)


class Named(nn.Module):
    """A linear layer that is called by names."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*sizes).float())

    def forward(self, x: Tensor) -> Tensor:
        """The product, of arguments that are given by name."""
        return F.linear(weight=self.weight, input=x)


class Wide(nn.Module):
    """Gives its input in float32, as normalisations under a GPU's autocast do."""

    def forward(self, x: Tensor) -> Tensor:
        """Another tensor, which no node of its own saves."""
        return x.float() + 1


def _network() -> nn.Sequential:
    return nn.Sequential(
        *(Wide(), nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 2, 3)),
        *(nn.Flatten(), Wide(), nn.Linear(72, 8), Wide(), Named(8, 8), Wide()),
    ).float()


def _saved_bytes(output: Tensor) -> int:
    """How many bytes the graph of a tensor keeps, each once."""
    nodes: list[Any] = [output.grad_fn]
    found: dict[int, int] = {}
    for node in nodes:  # which grows
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [getattr(node, name) for name in names]
        values += getattr(node, "saved_tensors", ())
        storages = [x.untyped_storage() for x in values if isinstance(x, Tensor)]
        found.update({x.data_ptr(): x.nbytes() for x in storages})
        nodes += [x for x, _ in node.next_functions if x is not None and x not in nodes]
    return sum(found.values())


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_taps_keep_nothing_more_under_autocast(as_on_a_gpu: bool) -> None:
    """With a dtype that changes from step to step."""
    with autocast_as_on_a_gpu() if as_on_a_gpu else nullcontext():
        _check_saved()


def _check_saved() -> None:
    plain, hooked = _network(), _network()
    hooked.load_state_dict(plain.state_dict())
    engine = Engine(hooked, batch_dim=0)
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        x = torch.randn(5, 3, 4, 4).float().requires_grad_()

        def step(model: nn.Module, x: Tensor = x, dtype: torch.dtype | None = dtype) -> Tensor:
            with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
                output: Tensor = model(x)
            return output

        found, expected = step(hooked), step(plain)
        assert _saved_bytes(found) == _saved_bytes(expected) > 0
        assert torch.equal(found, expected)
        (of_input,) = torch.autograd.grad(found.square().sum(), x, retain_graph=True)
        assert torch.equal(of_input, *torch.autograd.grad(expected.square().sum(), x))
        engine.compute_gramian(found.square().sum(1))


class Several(nn.Module):
    """Two layers read the input, and a product reads a tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).float(), nn.Linear(8, 8).float()
        self.weight = nn.Parameter(torch.randn(8, 8).float())

    def forward(self, x: Tensor) -> Tensor:
        """Autocast rounds a leaf once for both layers, and what is read twice for each reading."""
        hidden = (self.first(x) * self.second(x)).float().tanh()
        return torch.addmm(hidden, hidden, self.weight).float()


@pytest.mark.parametrize("cache_enabled", [False, True])
@pytest.mark.parametrize("half", HALF, ids=str)
def test_gradients_under_autocast_are_rounded_as_without_an_engine(
    half: torch.dtype, cache_enabled: bool
) -> None:
    """Autocast's gradients of a tensor are added up in the dtype in which it keeps the tensor."""
    plain, hooked = Several(), Several()
    hooked.load_state_dict(plain.state_dict())
    engine = Engine(hooked, batch_dim=0)
    for dtype in (half, None, half):
        x = torch.randn(5, 8).float().requires_grad_()
        found = []
        for model in (hooked, plain):
            options = {"enabled": dtype is not None, "cache_enabled": cache_enabled}
            with torch.autocast(x.device.type, dtype, **options):
                output = model(x)
            if model is hooked:
                engine.compute_gramian(output.square().sum(1))
            inputs = [x, *model.parameters()]
            found.append(torch.autograd.grad(output.square().sum(), inputs))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
