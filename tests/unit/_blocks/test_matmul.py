"""Products by oneDNN are those of PyTorch, on any processor that has its operators."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autogram._blocks import matmul, scratch
from autogram._blocks.path import einsum

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """oneDNN for products of any size, and which of its functions were called."""
    calls: list[str] = []
    monkeypatch.setattr(matmul, "_has_kernels", lambda: True)
    monkeypatch.setattr(matmul, "_WORTH_A_CALL", 1)
    monkeypatch.setattr(matmul, "_THIN", 1)
    monkeypatch.setattr(matmul, "_THIN_IN_BATCH", 1)
    # Without oneDNN, the operator is missing, and what leads to it is tested with a stand-in.
    linear = matmul._linear if HAS_ONEDNN else lambda x, weight: x @ weight.mT
    convolve = torch.conv1d
    monkeypatch.setattr(matmul, "_linear", lambda *xs: calls.append("linear") or linear(*xs))
    monkeypatch.setattr(
        torch, "conv1d", lambda *xs, **ks: calls.append("batch") or convolve(*xs, **ks)
    )
    return calls


@pytest.fixture(autouse=True)
def single_precision() -> Iterator[None]:
    """Other products are left to PyTorch."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(default)


def assert_product(equation: str, actual: Tensor, *factors: Tensor) -> None:
    """Assert that errors are those of rounding sums in float32."""
    exact, size = (
        torch.einsum(equation, *(f(x.double()) for x in factors))
        for f in (torch.Tensor.clone, torch.abs)
    )
    assert actual.dtype == torch.float32
    assert ((actual - exact).abs() <= 4 * torch.finfo(torch.float32).eps * size).all()


def matrix(rows: int, columns: int, memory: str) -> Tensor:
    """A matrix that lies in memory in some way."""
    if memory == "transposed":
        return torch.randn(columns, rows).T
    if memory == "strided":
        return torch.randn(rows, 2 * columns)[:, ::2]
    return torch.randn(rows, columns)


@pytest.mark.parametrize("first", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("second", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("sizes", [(3, 5, 4), (3, 600, 5), (600, 3, 5), (5, 3, 600)])
def test_multiply(forced: list[str], sizes: tuple[int, int, int], first: str, second: str) -> None:
    rows, summed, columns = sizes
    left, right = matrix(rows, summed, first), matrix(columns, summed, second)
    actual = matmul.multiply(left, right)
    assert_product("rs,cs->rc", actual, left, right)
    if "contiguous" in (first, second):
        assert forced == ["linear"]


@pytest.mark.parametrize("sizes", [(4, 3, 5, 2), (3, 16, 16, 5), (2, 32, 48, 16), (5, 16, 7, 3)])
@pytest.mark.parametrize("part", [1, 2**20])
def test_batches(
    forced: list[str],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int, int],
    part: int,
) -> None:
    monkeypatch.setattr("autogram._blocks.contractions._PART_OF_BATCH", part)
    n, rows, summed, columns = sizes
    left, right = torch.randn(n, rows, summed), torch.randn(n, summed, columns)
    # What is left in the memory of copies must not come through, not even by zero times infinity.
    for purpose in ("first", "second"):
        memory = scratch.allocate(scratch.scratch(purpose), (2**10,) * 2, left)
        memory.fill_(torch.nan)
    actual = einsum("bos,bsi->boi", (left, right))
    assert_product("nrs,nsc->nrc", actual, left, right)
    assert set(forced) == {"batch"}


def test_batches_of_patches(forced: list[str]) -> None:
    """Views that read elements more than once, and a batch of two indices."""
    image = torch.randn(3, 8, 8, 2, 4)
    patches = image.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 5, 6, 3, 4)  # btuxyqi
    cotangents = torch.randn(3, 2, 5, 6, 6)
    equation = "bqotu,btuxyqi->bqoixy"
    actual = einsum(equation, (cotangents, patches))
    assert_product(equation, actual, cotangents, patches)
    assert set(forced) == {"batch"}


def test_transposed_factors_are_not_copied(forced: list[str]) -> None:
    left, right = torch.randn(3, 4, 5).mT, torch.randn(3, 4, 6)
    actual = einsum("bos,bsi->boi", (left, right))
    assert_product("nrs,nsc->nrc", actual, left, right)
    assert forced == []


@pytest.mark.parametrize(
    ("like", "sizes"),
    [
        pytest.param(torch.zeros(1), (1, 64, 64, 64), id="too little to do"),
        pytest.param(torch.zeros(1), (1, 4, 2**18, 64), id="too thin"),
        pytest.param(torch.zeros(1), (1, 16, 2**15, 16), id="too thin for its work"),
        pytest.param(torch.zeros(1), (1, 64, 2**20, 64), id="sums that are too long"),
        pytest.param(torch.zeros(1), (9, 8, 2**20, 64), id="a batch that is too thin"),
        pytest.param(torch.zeros(1).double(), (1, 512, 512, 512), id="double precision"),
        pytest.param(torch.zeros(1, device="meta"), (1, 512, 512, 512), id="another device"),
    ],
)
def test_is_not_faster(
    monkeypatch: pytest.MonkeyPatch, like: Tensor, sizes: tuple[int, int, int, int]
) -> None:
    monkeypatch.setattr(matmul, "_has_kernels", lambda: True)
    assert not matmul.is_faster(like, *sizes)


@pytest.mark.parametrize("sizes", [(1, 512, 512, 512), (1, 16, 2**17, 16)], ids=["large", "long"])
def test_is_faster(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int]) -> None:
    monkeypatch.setattr(matmul, "_has_kernels", lambda: True)
    assert matmul.is_faster(torch.zeros(1), *sizes) == torch.backends.mkldnn.enabled


def test_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the switch that PyTorch has for oneDNN."""
    monkeypatch.setattr(matmul, "_has_kernels", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not matmul.is_faster(torch.zeros(1), 1, 512, 512, 512)


def test_processors_of_intel_need_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_processor", lambda: "vendor_id : GenuineIntel")
    assert not matmul._has_kernels.__wrapped__()


def test_processor_is_known() -> None:
    assert matmul._processor()
