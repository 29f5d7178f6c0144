"""Rows of convolutions: from patches, or from the gradient of the kernel with samples as groups."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from autogram import Engine
from autogram._blocks import Limit
from autogram._blocks.kernels.base import Kernels
from autogram._blocks.kernels.cpu import CpuKernels
from autogram.testing import reference_jacobian
from tests.unit._blocks.blocks import Operators

BY_GRADIENT = "aten::convolution_backward"

KERNELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": 4},
    "depthwise": {"groups": 8},
    "two-of-each": {"groups": 8, "out": 16},
    "strides": {"groups": 8, "stride": 2, "padding": 1},
    "holes": {"groups": 2, "dilation": 2, "padding": 2},
    "wide": {"groups": 8, "size": 5, "padding": "same"},
    "uneven": {"groups": 8, "size": 4, "padding": "same"},
}


def _layer(dims: int, out: int = 8, size: int = 3, **others: Any) -> nn.Module:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer: nn.Module = kind(8, out, size, **others)
    return layer


def _losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each device prefer the gradient, whatever the shapes."""
    for kernels in (Kernels, CpuKernels):
        monkeypatch.setattr(kernels, "prefers_adjoint", lambda *_: True)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("limit", [2**20, 4000])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_by_gradients_are_exact(kernel: str, dims: int, limit: int) -> None:
    """In series of other batches: the Gramian, norms, products, and the gradients of two steps."""
    model = nn.Sequential(_layer(dims, **KERNELS[kernel]), nn.Tanh())
    parameters = list(model.parameters())
    engine = Engine(model, batch_dim=0, memory_limit_bytes=limit)
    for samples, size in ((3, 7), (2, 7), (5, 6), (1, 7), (3, 7)):
        x = torch.randn(samples, 8, *(size for _ in range(dims)))
        losses = _losses(model, x)
        rows = reference_jacobian(losses, parameters)
        jacobian = engine.jacobian(losses)
        assert_close(jacobian.gramian(), rows @ rows.T)
        assert_close(jacobian.row_norms(), rows.norm(dim=1))
        assert_close(jacobian.cross_gramian(jacobian), rows @ rows.T)
        assert_close(jacobian.dense(), rows)
        weights = torch.rand(samples)
        model.zero_grad()
        engine.backward(_losses(model, x), lambda _, w=weights: w)
        assert_close(torch.cat([p.grad.flatten() for p in parameters]), weights @ rows)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "is_large"), [(2, False), (12, True)])
def test_large_images_have_no_patches_on_a_cpu(
    size: int, is_large: bool, dtype: torch.dtype
) -> None:
    """Their rows come from the gradient, in float32, where PyTorch has a library for it."""
    model = nn.Conv2d(8, 8, 3, padding=1, groups=8).float()
    engine = Engine(model, batch_dim=0, verify="never")
    for samples in (4, 3, 4, 4):
        x = torch.randn(samples, 8, size, size).float()
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            losses = _losses(model, x).float()
        with Operators() as operators:
            gramian = engine.compute_gramian(losses)
        wide = copy.deepcopy(model).double()
        rows = reference_jacobian(_losses(wide, x.double()), list(wide.parameters()))
        expected = rows @ rows.T
        assert gramian.dtype == torch.float32
        error = float((gramian.double() - expected).norm() / expected.norm())
        assert error < 16 * torch.finfo(dtype).eps
    assert (BY_GRADIENT in operators.names) == (is_large and torch.backends.mkldnn.is_available())


@pytest.mark.cpu
def test_large_images_are_not_cut_for_patches() -> None:
    """The limit of memory concerns what is made: rows, which are small."""
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False).float()
    x = torch.randn(4, 8, 40, 40).float()
    engine = Engine(model, batch_dim=0, memory_limit_bytes=4 * 9 * x.numel() // 8)
    for _ in range(3):
        losses = _losses(model, x)
        with Operators() as operators:
            gramian = engine.compute_gramian(losses)
    rows = reference_jacobian(losses, list(model.parameters()))
    assert_close(gramian, rows @ rows.T, rtol=1e-4, atol=1e-3)
    assert operators.names.count(BY_GRADIENT) == torch.backends.mkldnn.is_available()


class Twice(nn.Module):
    """One layer for two images, whose results meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product of both."""
        result: Tensor = self.layer(x) * self.layer(x.flip(-1).sin())
        return result


@pytest.mark.cpu
def test_a_layer_that_is_shared_has_no_patches_either() -> None:
    """The rows of its uses are added up, with the terms between them."""
    model = Twice().float()
    engine = Engine(model, batch_dim=0, verify="never")
    for samples in (4, 2, 4):
        x = torch.randn(samples, 8, 12, 12).float()
        losses = _losses(model, x)
        rows = reference_jacobian(losses, list(model.parameters()))
        with Operators() as operators:
            gramian = engine.compute_gramian(losses)
        assert_close(gramian, rows @ rows.T, rtol=1e-4, atol=1e-3)
    # The images require no gradient, so that all are for rows.
    if torch.backends.mkldnn.is_available():
        assert operators.names.count(BY_GRADIENT) == 2
        assert operators.names.count("aten::mm") == 1  # of the rows of both
    else:
        assert BY_GRADIENT not in operators.names


# Measured on one thread of a processor with AVX512 in float32: the elements of patches for each one
# of the rows, and milliseconds by patches and by groups.
CHOICES = [
    (1024, 38.9, 2.9),
    (450, 22.7, 15.0),
    (64, 28.4, 13.4),
    (24.5, 0.6, 0.3),
    (16, 17.4, 13.7),
    (1, 0.2, 1.8),
    (0.25, 49.9, 193.9),
]


@pytest.mark.parametrize(("ratio", "by_patches", "by_groups"), CHOICES)
def test_rows_come_the_faster_way_on_a_cpu(
    ratio: float, by_patches: float, by_groups: float
) -> None:
    """The choice is that of the measurements, and patches in double precision."""
    kernels, rows = CpuKernels(Limit(2**40)), 1000
    choice = kernels.prefers_adjoint(int(ratio * rows), rows, 1, torch.float32, torch.float32)
    assert choice == (by_groups < by_patches and torch.backends.mkldnn.is_available())
    assert not kernels.prefers_adjoint(int(ratio * rows), rows, 1, torch.float64, torch.float32)
