"""Kernels of a GPU: exact whatever device they run on, and half precision as rounded as autograd's.

On a CPU, products in half precision are those of factors in float32, which have the same result.
"""

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from autogram import Engine
from autogram._blocks import Block, Columns, Devices, Limit, plan, weighted_sums
from autogram._blocks.kernels import CudaKernels, cuda
from autogram._blocks.products import directional, explicit, products, weighted_sum
from autogram._blocks.region import Region
from autogram.testing import reference_jacobian
from tests.speed.gpu.autocast import autocast_as_on_a_gpu
from tests.unit._blocks.blocks import EQUATIONS, SIZES, Operators, dense, gramian_of, make_block

HALF = [torch.bfloat16, torch.float16]


def kernels(limit: int = 2**40) -> CudaKernels:
    return CudaKernels(Limit(limit))


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each device three processors."""
    monkeypatch.setattr(cuda, "_processors", lambda _device: 3)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets engines contract tensors of each device as those of a GPU, and autocast compute so."""
    monkeypatch.setattr(Devices, "on", lambda devices, _device: devices.cuda)
    with autocast_as_on_a_gpu():
        yield


@pytest.mark.parametrize("kind", ["gram", "norms", "cross"])
def test_one_piece_of_rows_is_alive_at_a_time(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[weakref.ref[Tensor]] = []
    form = plan.rows

    def rows(*args: object) -> Tensor:
        assert sum(of() is not None for of in formed) <= (kind == "cross")  # those of one side
        found = form(*args)
        formed.append(weakref.ref(found))
        return found

    monkeypatch.setattr(plan, "rows", rows)
    block = Block("kbto,bti->kboi", (torch.randn(1, 3, 50, 8), torch.randn(3, 50, 6)))
    given = [block], ([block] if kind == "cross" else []), kernels(60)
    (by_rows,) = [x for x in plan.plans(kind, *given) if x.method == "rows"]
    by_rows(*given)
    assert len(formed) > 2


@pytest.mark.parametrize("limit", [2**40, 100])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_are_exact_in_float64(equation: str, limit: int) -> None:
    """Of each form of block, in one piece and in several."""
    block = make_block(equation)
    rows, k, b = dense(block), SIZES["k"], SIZES["b"]
    gramian = gramian_of(rows)
    assert_close(products("gram", [block], (), kernels(limit)), gramian)
    square_norms = gramian.view(k * b, k * b).diagonal().view(k, b)
    assert_close(products("norms", [block], (), kernels(limit)), square_norms)
    assert_close(products("cross", [block], [block], kernels(limit)), gramian)
    assert_close(dense(explicit([block], kernels(limit))), rows)
    weights, direction = torch.randn(2, k, b), torch.randn(rows.shape[2:])
    expected = torch.einsum("skb,kb...->s...", weights, rows)
    assert_close(weighted_sum([block], weights, kernels(limit)), expected)
    found = directional([block], direction, kernels(limit))
    assert_close(found, torch.einsum("kb...,...->kb", rows, direction.to(rows.dtype)))


@pytest.mark.parametrize("half", HALF, ids=str)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_half_precision_is_summed_in_float32(equation: str, half: torch.dtype) -> None:
    """Products have float32 and the error of rows in half precision."""
    block = make_block(equation)
    block = Block(equation, tuple(x.to(half) for x in block.operands))
    rows = dense(Block(equation, tuple(x.double() for x in block.operands)))
    k, b = SIZES["k"], SIZES["b"]
    roundoff = torch.finfo(half).eps / 2
    gramian = gramian_of(rows)

    def is_near(found: Tensor, expected: Tensor) -> None:
        assert found.dtype == torch.float32
        assert float((found - expected).abs().max()) <= 3 * roundoff * float(expected.abs().max())

    is_near(products("gram", [block], (), kernels()), gramian)
    norms = gramian.view(k * b, k * b).diagonal().view(k, b)
    is_near(products("norms", [block], (), kernels()), norms)
    is_near(products("cross", [block], [block], kernels()), gramian)
    weights = torch.randn(1, k, b).float()
    expected = torch.einsum("skb,kb...->s...", weights.double(), rows)
    is_near(weighted_sum([block], weights, kernels()), expected)
    is_near(
        weighted_sum([block], weights.repeat(2, 1, 1), kernels()),
        expected.repeat(2, *[1] * (rows.dim() - 2)),
    )
    direction = torch.randn(rows.shape[2:]).float()
    is_near(
        directional([block], direction, kernels()),
        torch.einsum("kb...,...->kb", rows, direction.to(rows.dtype)),
    )


@pytest.mark.parametrize("half", HALF, ids=str)
def test_weights_of_rows_lose_no_digits(half: torch.dtype) -> None:
    """Rows in half precision are summed with weights in float32, of any size."""
    rows = torch.randn(1, 8, 300).to(half)
    for scale in (1e-20, 1.0, 1e20):
        weights = scale * torch.rand(1, 1, 8).float()
        found = weighted_sum([Block("kbn->kbn", (rows,))], weights, kernels())
        expected = torch.einsum("skb,kbn->sn", weights.double(), rows.double())
        assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * scale)
    zeros = weighted_sum([Block("kbn->kbn", (rows,))], torch.zeros(1, 1, 8).float(), kernels())
    assert not zeros.any()


@pytest.mark.parametrize("half", HALF, ids=str)
def test_factors_in_half_precision_are_not_copied_to_float32(
    half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device multiplies them as they are: only products have more bits."""
    wide: list[tuple[torch.dtype, ...]] = []

    def product(
        x: Tensor, y: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if not x.is_meta:  # as contractions are found
            wide.append((x.dtype, y.dtype))
        found = x.double() @ y.double()
        return found.to(out_dtype or x.dtype) if out is None else out.copy_(found)

    monkeypatch.setattr(cuda, "_can_accumulate", lambda *_: True)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "bmm", product)
    g, x = torch.randn(1, 4, 40, 64).to(half), torch.randn(4, 40, 48).to(half)
    block = Block("kbto,bti->kboi", (g, x))
    weights = torch.rand(1, 1, 4).float()
    with Operators() as operators:
        products("gram", [block], (), kernels())
        weighted_sum([block], weights, kernels())
        explicit([block], kernels())
    assert wide
    assert {dtype for pair in wide for dtype in pair} == {half}
    assert explicit([block], kernels()).operands[0].dtype == half
    assert "aten::mul.out" in operators.names  # cotangents and weights


@pytest.mark.parametrize("half", HALF, ids=str)
def test_factors_are_rounded_as_the_call_has_rounded_them(half: torch.dtype) -> None:
    """Autocast rounds the result of a normalisation, which is in float32, for the next layer."""
    region = Region.contiguous((64, 48))
    cotangent, factor = torch.randn(1, 4, 40, 64), torch.randn(4, 40, 48).float()
    for dtype, expected in ((half, half), (torch.float32, torch.float32)):
        columns = Columns(region, kernels())
        columns.add(region, Block("kbto,bti->kboi", (cotangent.to(dtype), factor)))
        ((_, found),) = columns.found()
        assert [x.dtype for x in found.operands] == [expected, expected]
        assert_close(found.operands[1], factor.to(expected), rtol=0, atol=0)


@pytest.mark.parametrize("half", HALF, ids=str)
def test_a_number_in_float32_keeps_its_digits(half: torch.dtype) -> None:
    """It does not widen the product with a tensor in half precision, and is not rounded for it."""
    number, x = torch.tensor(1.0001).float(), torch.ones(2).to(half)
    assert (x * number).dtype == half
    found = kernels().rounded((x.view(1, 2), torch.ones(2).float(), number))
    assert [x.dtype for x in found] == [half, half, torch.float32]
    assert found[2] == number


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("half", HALF, ids=str)
def test_steps_behind_a_normalisation_in_float32(half: torch.dtype) -> None:
    """Gramians and gradients are as near to autograd's under autocast as its own rounding is."""
    first, last = nn.LayerNorm(48).float(), nn.Linear(48, 56).float()
    engine = Engine(last, batch_dim=0)
    for _ in range(3):
        x, weights = torch.randn(4, 70, 48).float(), torch.rand(4).float()
        with torch.autocast(x.device.type, half):
            inputs = first(x).float()  # as on a GPU, where autocast normalises in float32
            losses = last(inputs).float().square().mean((1, 2))
        rows = reference_jacobian(losses, last.parameters()).double()
        roundoff = torch.finfo(half).eps
        gramian = engine.compute_gramian(losses).double()
        assert float((gramian - rows @ rows.T).norm()) < roundoff * float((rows @ rows.T).norm())
        last.zero_grad()
        engine.backward(losses, lambda _, w=weights: w)
        expected = weights.double() @ rows
        found = flat([p.grad for p in last.parameters()])
        assert float((found - expected).norm()) < roundoff * float(expected.norm())


@pytest.mark.parametrize("half", HALF, ids=str)
def test_weights_are_halved_once_for_all_parameters(half: torch.dtype) -> None:
    """And again in the next call, where the same tensor may have other values."""
    regions = [Region.contiguous((n,)) for n in (300, 301, 302)]
    rows = [torch.randn(1, 8, *region.shape).to(half) for region in regions]
    shared = kernels()
    found = {torch.empty(n): Columns(region, shared) for n, region in enumerate(regions)}
    for columns, region, x in zip(found.values(), regions, rows, strict=True):
        columns.add(region, Block("kbn->kbn", (x,)))
    weights = torch.empty(1, 8).float()
    for _ in range(3):
        weights.uniform_()
        with Operators() as operators:
            sums = weighted_sums(found, weights)
        assert operators.names.count("aten::amax") == 1
        for parameter, x in zip(found, rows, strict=True):
            expected = torch.einsum("kb,kbn->n", weights.double(), x.double())
            total = sums[parameter]
            assert total is not None
            assert_close(total.double(), expected, rtol=1e-4, atol=1e-5)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 128),
        nn.GELU(),
        nn.Linear(128, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    ),
    "transformer": lambda: nn.Sequential(
        nn.Flatten(2),
        nn.Linear(64, 32),
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(96, 10),
    ),
}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("half", HALF, ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_error_is_not_larger_than_that_of_autocast(network: str, half: torch.dtype) -> None:
    """Against float64: the Gramian beside that of autograd's own rows, gradients beside SGD's."""
    ours, own, ours_of_gradient, own_of_gradient = [], [], [], []
    for seed in range(4):
        torch.manual_seed(seed)
        model = NETWORKS[network]().float()
        parameters = list(model.parameters())
        engine = Engine(model, batch_dim=0)
        x, y = torch.randn(8, 3, 8, 8).float(), torch.randint(10, (8,))
        weights = torch.rand(8).float()
        with torch.autocast(x.device.type, half):
            losses = F.cross_entropy(model(x), y, reduction="none")
        gramian = engine.compute_gramian(losses).double()
        engine.jacobian(losses).accumulate_grad(weights)
        gradient = flat([p.grad for p in parameters])
        rows = reference_jacobian(losses, parameters).double()
        of_autocast = flat(torch.autograd.grad(losses, parameters, weights))
        wide = model.double()
        exact = reference_jacobian(
            F.cross_entropy(wide(x.double()), y, reduction="none"), list(wide.parameters())
        )
        ours.append(float((gramian - exact @ exact.T).norm()))
        own.append(float((rows @ rows.T - exact @ exact.T).norm()))
        expected = weights.double() @ exact
        ours_of_gradient.append(float((gradient - expected).norm()))
        own_of_gradient.append(float((of_autocast - expected).norm()))
    assert 0 < sum(ours) <= 1.02 * sum(own), (ours, own)
    assert 0 < sum(ours_of_gradient) <= 1.02 * sum(own_of_gradient), (
        ours_of_gradient,
        own_of_gradient,
    )


def test_long_rows_are_multiplied_in_parts() -> None:
    """In float32, by as many parts as keep processors busy, if these divide the rows."""
    with Operators() as operators:
        for n in (4 * 512, 2 * 513, 4 * 512 + 1, 512, 2**15):
            rows = torch.randn(5, n).float()
            assert_close(kernels().gram(rows), rows @ rows.T, rtol=1e-4, atol=1e-4)
    assert operators.names.count("aten::bmm") == 3  # 4, 2, 1, 1 and 4 parts


# Measured on an H100 in bfloat16, with 64 samples: taps of the kernel, channels that it reads and
# writes, positions, and microseconds by patches and by groups.
CONVOLUTIONS = [
    (9, 64, 64, 56 * 56, 474, 140),
    (9, 128, 128, 28 * 28, 254, 152),
    (9, 256, 256, 14 * 14, 230, 417),
    (9, 512, 512, 7 * 7, 202, 1766),
    (49, 3, 64, 112 * 112, 853, 1801),
]


@pytest.mark.parametrize(
    ("taps", "channels", "written", "positions", "by_patches", "by_groups"), CONVOLUTIONS
)
def test_rows_of_convolutions_come_the_faster_way(
    taps: int, channels: int, written: int, positions: int, by_patches: int, by_groups: int
) -> None:
    """The choice is that of the measurements."""
    patches, rows = 64 * taps * channels * positions, 64 * taps * channels * written
    choice = kernels().prefers_adjoint(patches, rows, channels)
    assert choice == (by_groups < by_patches)


def test_a_single_channel_has_a_kernel_of_its_own() -> None:
    """One that does as much for the rows of all samples as for their sum."""
    rows = 1000
    for positions, expected in ((2, False), (4, True), (1024, True)):
        assert kernels().prefers_adjoint(positions * rows, rows, 1) == expected
        assert not kernels().prefers_adjoint(positions * rows, rows, 2)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("groups", [1, 2, 32])
@pytest.mark.parametrize("half", HALF, ids=str)
def test_convolutions_behind_a_normalisation_in_float32(half: torch.dtype, groups: int) -> None:
    """Their kernel and the cotangent are in half precision, where the image of the call is not."""
    model = nn.Conv2d(32, 32, 3, padding=1, groups=groups).float()
    engine = Engine(model, batch_dim=0)
    for samples in (3, 2, 3, 3):
        x = torch.randn(samples, 32, 14, 14).float()
        with torch.autocast(x.device.type, half):
            losses = model(x).float().square().mean((1, 2, 3))
        rows = reference_jacobian(losses, model.parameters()).double()
        gramian = engine.compute_gramian(losses).double()
        error = float((gramian - rows @ rows.T).norm() / (rows @ rows.T).norm())
        assert error < torch.finfo(half).eps


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(("size", "has_groups"), [(2, False), (30, True)])
def test_samples_are_groups_where_images_are_large(size: int, has_groups: bool) -> None:
    """Rows of a convolution come from its gradient, if patches have far more elements."""
    model = nn.Conv2d(32, 8, 3, padding=1, groups=2)
    engine = Engine(model, batch_dim=0)
    x = torch.randn(3, 32, size, size)
    for _ in range(3):  # the third call is not verified
        losses = model(x).square().sum((1, 2, 3))
        jacobian = reference_jacobian(losses, model.parameters())
        with Operators() as operators:
            gramian = engine.compute_gramian(losses)
        assert_close(gramian, jacobian @ jacobian.T)
    assert has_groups == ("aten::convolution_backward" in operators.names)


COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy")


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_patches_are_copied_once(groups: int) -> None:
    """Also where samples and groups of channels are the batch of a product."""
    model = nn.Conv2d(8, 8, 3, bias=False, groups=groups)
    engine = Engine(model, batch_dim=0, verify="never")
    x = torch.randn(3, 8, 6, 6)
    for _ in range(2):
        losses = model(x).square().sum((1, 2, 3))
        jacobian = reference_jacobian(losses, model.parameters())
        with Operators() as operators:
            gramian = engine.compute_gramian(losses)
        assert_close(gramian, jacobian @ jacobian.T)
    copies = [name for name in operators.names if name.startswith(COPIES)]
    # Channels last, and patches, which the kernel of a single channel does not need.
    assert len(copies) == 1 + (groups < 8), copies


@pytest.mark.parametrize("counts", [True, False])
def test_memory_in_use(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other allocators than PyTorch's may not count it."""

    def statistics(_device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        if not counts:
            raise RuntimeError("The allocator does not support statistics")
        return {"allocated_bytes": {"all": {"current": 30}}}

    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    assert cuda._bytes(torch.device("cuda")) == ((70, 30) if counts else (100, 0))


@pytest.mark.parametrize(
    ("elements", "used", "expected"),
    [
        (2**22, 0, 2**22),  # takes no longer than a launch
        (2**25, 0, 2**22),
        (2**25, 8 * 4 * 2**23, 2**23),
        (2**25, 2**40, 2**25),
    ],
)
def test_copies_take_little_beside_the_step(
    elements: int, used: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of what is taken, or what is written in the time of a launch."""
    monkeypatch.setattr(cuda, "_bytes", lambda _device: (2**40, used))
    large = torch.empty(2**24, dtype=torch.float32, device="meta")
    assert kernels().at_once(elements, large) == elements  # no more than twice a factor
    like = torch.empty(1, dtype=torch.float32)
    assert kernels().at_once(elements, like) == expected
    assert kernels(100).at_once(elements, like) == 100


@pytest.mark.parametrize("half", HALF, ids=str)
@pytest.mark.parametrize(
    ("positions", "free", "used", "is_kept"),
    [
        (200, 2**40, 2**40, False),
        (300, 2**40, 2**40, True),
        (300, 2 * 4 * 3 * 700 * 700 - 1, 2**40, False),
        (300, 2**40, 3 * 4 * 3 * 700 * 700 - 1, False),
        (20, 0, 0, False),
    ],
)
def test_larger_rows_are_kept_where_that_is_faster(
    positions: int,
    free: int,
    used: int,
    is_kept: bool,
    half: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If half of the free memory and a third of the used memory do, and positions are many."""
    monkeypatch.setattr(cuda, "_bytes", lambda _device: (free, used))
    columns = Columns(Region.contiguous((700, 700)), kernels())
    factors = torch.randn(1, 3, positions, 700).to(half), torch.randn(3, positions, 700).to(half)
    columns.add(Region.contiguous((700, 700)), Block("kbto,bti->kboi", factors))
    taken = columns.keep("rows", lambda *given: given[1] <= columns.kernels.room(given[0]))
    assert columns.single is not None
    assert columns.single.is_rows == is_kept
    assert taken == (3 * 700 * 700 if is_kept else 0)
    weights = torch.rand(1, 1, 3).float()
    expected = torch.einsum("skb,kbto,bti->soi", weights.double(), *(x.double() for x in factors))
    found = columns.weighted_sum(weights)
    assert found is not None
    assert float((found - expected).norm()) < torch.finfo(half).eps * float(expected.norm())


def flat(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """All elements of some tensors, in float64."""
    return torch.cat([x.double().flatten() for x in tensors])
