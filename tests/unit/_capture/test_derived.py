"""Weights that are computed from parameters: which have factors, and that all are exact."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from autogram._capture import derived
from autogram._capture.backward import assembly
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import assert_exact, batch

SIZE = 6
MASK = torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) < 0.6


class Weights(nn.Module):
    """A linear layer whose weight is computed from parameters of several shapes."""

    def __init__(self, weight: Callable[["Weights"], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Parameter(torch.randn(SIZE, SIZE))
        self.column = nn.Parameter(torch.randn(SIZE, 1))
        self.row = nn.Parameter(torch.randn(SIZE))
        self.number = nn.Parameter(torch.randn(()))
        self.left, self.right = (nn.Parameter(torch.randn(x)) for x in ((SIZE, 2), (2, SIZE)))
        self.mask = MASK.to(self.a.dtype)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Maps the last dimension."""
        return F.linear(x, self.weight(self))


class Loop(Weights):
    """A recurrence with one weight, along the second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """The last state."""
        weight, state = self.weight(self), x[:, 0]
        for i in range(x.shape[1]):
            state = torch.tanh(F.linear(state, weight) + x[:, i])
        return state


def standardised(w: Weights) -> Tensor:
    """Rows without a mean, of equal variance."""
    deviation = w.a.std(1, keepdim=True)
    return (w.a - w.a.mean(dim=1, keepdim=True)) / (deviation + 1e-3) * w.column


FACTORED: dict[str, Callable[[Weights], Tensor]] = {
    "number": lambda w: w.a * 0.3,
    "constant": lambda w: torch.tensor(0.3) * w.a / torch.tensor(7.0),
    "mask": lambda w: w.a * w.mask,
    "columns": lambda w: w.a * w.mask[0],
    "rows": lambda w: w.a / (1 + w.mask[:, :1]),
    "learned column": lambda w: w.a * w.column,
    "learned row": lambda w: w.row * w.a,
    "learned number": lambda w: w.a / w.number,
    "transposed number": lambda w: w.a / w.number.t() + w.a * w.number.transpose(0, 0),
    "product": lambda w: w.left @ w.right,
    "adapter": lambda w: w.mask + 0.3 * (w.left @ w.right),
    "twice": lambda w: w.a * w.a.t(),
    "signs": lambda w: torch.rsub(-w.a, 1 - w.column, alpha=2),
    "differences": lambda w: torch.add(w.a, w.row, alpha=0.3) - torch.sub(w.mask, w.column),
    "all": lambda w: (w.a * w.column / w.row - w.number * (w.left @ w.right)) * w.mask,
    "moved": lambda w: (w.a * w.row).transpose(0, -1).t()[:, None].squeeze(1) * 2,
    "broadcast": lambda w: (w.column * 2).expand(SIZE, SIZE),
    "outer sum": lambda w: (w.column + w.row) * w.mask,
    "functions": lambda w: torch.tanh(w.a) * w.number.exp() + F.softplus(w.column).sqrt(),
    "clamped": lambda w: w.a.clamp(-0.5, 0.5) ** 2,
    "unit rows": lambda w: F.normalize(w.a, dim=1),
    "unit columns": lambda w: w.a / w.a.norm(dim=0) * w.row,
    "norm": lambda w: w.a / w.a.norm(),
    "sums": lambda w: w.a - w.a.sum(0) / SIZE - w.a.mean() * w.number,
    "demodulated": lambda w: w.a * torch.rsqrt((w.a * w.a).sum(1, keepdim=True) + 1e-3),
    "standardised": standardised,
    "inner products": lambda w: w.a * torch.dot(w.row, w.mask[0]) + w.a / torch.dot(w.row, w.row),
    "inner products of vdot": lambda w: w.a * torch.vdot(w.row, w.mask[0] + w.row),
    "matrix and vector": lambda w: w.a * torch.mv(w.a, w.row) * torch.mv(w.mask, w.row),
    "triangles": lambda w: w.a.tril() * w.row - (w.a * w.column).triu(1),
}
WITH_ROWS: dict[str, Callable[[Weights], Tensor]] = {
    "rounded": lambda w: w.a * w.row + torch.div(w.a, 0.3, rounding_mode="floor"),
    "softmax": lambda w: w.a.softmax(1) * 2,
    "powers": lambda w: (w.a.abs() + 1) ** w.column,
    "complex": lambda w: (w.a.to(torch.complex128) * (1 + 2j)).real * w.column,
    "modulus": lambda w: (w.a.to(torch.complex128) * 2).abs(),
    "sparse": lambda w: w.mask.to_sparse() @ w.a,
    "complex norm": lambda w: w.a / torch.linalg.vector_norm(w.a.to(torch.complex128)),
    "parts": lambda w: torch.cat([x * 2 for x in w.a.split(3)]),
}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that gets an entry for each derived tensor whose rows autograd pulls back."""
    found: list[object] = []
    plain = assembly.pull_back

    def pull_back(*args: object) -> object:
        found.append(args[1])
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(assembly, "pull_back", pull_back)
    return found


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives tensors factors also where rows of them are small."""
    monkeypatch.setattr(derived, "_keeps_few", lambda node, **_: derived._is_known(node))


def assert_steps(model: nn.Module, *shape: int) -> None:
    """Assert that Gramians, and gradients of a fused step, are exact in a series of steps."""
    engine = Engine(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in range(3):
        x = batch(*shape)
        assert_exact(engine, losses(model, x), model)
        weights = torch.rand(len(x))
        expected = torch.autograd.grad(losses(model, x) @ weights, parameters, allow_unused=True)
        model.zero_grad()
        engine.backward(losses(model, x), lambda _, weights=weights: weights)
        for parameter, gradient in zip(parameters, expected, strict=True):
            if gradient is not None:
                assert parameter.grad is not None, step
                assert_close_to_reference(parameter.grad, gradient)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    """One for each sample."""
    found: Tensor = model(x).flatten(1).square().mean(1)
    return found


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("shape", [(5, SIZE), (5, 3, SIZE)], ids=str)
@pytest.mark.parametrize("weight", FACTORED.values(), ids=FACTORED)
def test_nodes_that_multiply_give_factors(
    weight: Callable[[Weights], Tensor], shape: tuple[int, ...], rows: list[object]
) -> None:
    assert_steps(Weights(weight), *shape)
    assert not rows


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("weight", WITH_ROWS.values(), ids=WITH_ROWS)
def test_other_nodes_have_rows(weight: Callable[[Weights], Tensor], rows: list[object]) -> None:
    assert_steps(Weights(weight), 5, 3, SIZE)
    assert rows


@pytest.mark.parametrize("weight", FACTORED.values(), ids=FACTORED)
def test_all_are_exact_where_rows_are_small(weight: Callable[[Weights], Tensor]) -> None:
    assert_steps(Weights(weight), 2, 8, SIZE)


def test_small_rows_are_pulled_back(rows: list[object]) -> None:
    """But for a weight times a constant, and for a product, of which no rows are formed."""
    for name in ("number", "mask", "adapter", "product"):
        assert_steps(Weights(FACTORED[name]), 2, 20, SIZE)
        assert not rows, name
    for name in ("learned column", "standardised"):
        assert_steps(Weights(FACTORED[name]), 2, 20, SIZE)
        assert rows, name
        rows.clear()


def test_small_rows_are_formed_once(rows: list[object]) -> None:
    """Not for each of several parameters, and not for each step of a loop."""
    assert_steps(Weights(lambda w: w.a * w.mask + w.left @ w.right * w.mask[0]), 2, 20, SIZE)
    assert rows
    rows.clear()
    assert_steps(Loop(FACTORED["mask"]), 3, 20, SIZE)
    assert rows


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dim", [0, 1, None])
def test_normed_weights_have_factors(dim: int | None, rows: list[object]) -> None:
    assert_steps(parametrizations.weight_norm(nn.Linear(SIZE, 4), dim=dim), 5, SIZE)
    assert not rows


@pytest.mark.usefixtures("always")
def test_spectral_norms_have_factors(rows: list[object]) -> None:
    """In evaluation mode, in which the two vectors do not change from call to call."""
    assert_steps(parametrizations.spectral_norm(nn.Linear(SIZE, 4)).eval(), 5, 3, SIZE)
    assert not rows


@pytest.mark.usefixtures("always")
def test_pruned_weights_have_factors(rows: list[object]) -> None:
    """A mask that is pruned further between two steps is the one of each step."""
    layer = nn.Linear(SIZE, 4)
    prune.random_unstructured(layer, "weight", 0.3)
    engine = Engine(layer)
    for _ in range(3):
        assert_exact(engine, losses(layer, batch(5, SIZE)), layer)
        prune.random_unstructured(layer, "weight", 1)
    assert not rows


class Convolution(nn.Conv2d):
    """A convolution with a scaled weight."""

    scale: Tensor | float = 0.3

    def forward(self, x: Tensor) -> Tensor:
        """Maps images."""
        return F.conv2d(x, self.weight * self.scale, self.bias, groups=self.groups)


@pytest.mark.parametrize("images", [(5, 4, 5, 5), (2, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_masked", [False, True])
def test_convolutions_are_exact(is_masked: bool, groups: int, images: tuple[int, ...]) -> None:
    model = Convolution(4, 4, 3, groups=groups)
    if is_masked:
        model.scale = (torch.rand_like(model.weight) < 0.5).to(model.weight.dtype)
    assert_steps(model, *images)


def test_the_cotangent_of_a_convolution_is_scaled(rows: list[object]) -> None:
    """And no other way to its rows is lost."""
    assert_steps(Convolution(4, 4, 3), 5, 4, 5, 5)
    assert not rows


def test_a_weight_of_a_loop_has_a_block_of_each_step() -> None:
    assert_steps(Loop(FACTORED["mask"]), 5, 4, SIZE)
    assert_steps(Loop(FACTORED["learned column"]), 5, 4, SIZE)


def test_a_scaled_table_that_is_tied_has_rows(rows: list[object]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, SIZE))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x, self.table * 2) @ (self.table * 0.5).t()

    model = Tied()
    engine = Engine(model)
    for _ in range(3):
        assert_exact(engine, losses(model, torch.randint(7, (5, 3))), model)
    assert rows


@pytest.mark.usefixtures("always")
def test_a_checkpointed_weight_is_exact() -> None:
    class Checkpointed(Weights):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return found

    assert_steps(Checkpointed(FACTORED["all"]), 5, 3, SIZE)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_hooks_on_the_way_are_called(is_first: bool, is_late: bool) -> None:
    """Also those on a tensor from which another was computed before."""

    def weight(w: Weights) -> Tensor:
        first = w.a * w.column
        if is_first and not is_late:
            first.register_hook(lambda gradient: gradient * 3)
        second = first * w.mask
        (first if is_first else second).register_hook(lambda gradient: gradient * 5)
        return second

    assert_steps(Weights(weight), 5, 3, SIZE)


@pytest.mark.usefixtures("always")
def test_weights_that_no_call_has_shown_have_rows(rows: list[object]) -> None:
    """As those computed before the forward pass, where nobody has looked for hooks."""
    model = Weights(lambda w: w.mask)
    weight = (model.a * model.column) * 2
    weight.register_hook(lambda gradient: gradient * 3)
    model.weight = lambda _: weight
    engine = Engine(model)
    for _ in range(3):
        assert_exact(engine, losses(model, batch(5, 3, SIZE)), model)
    assert rows


@pytest.mark.usefixtures("always")
def test_many_paths_have_rows(monkeypatch: pytest.MonkeyPatch, rows: list[object]) -> None:
    """Each sum of two equal tensors doubles the paths."""

    def weight(w: Weights) -> Tensor:
        found = w.a * w.mask
        for _ in range(8):
            found = found + found
        return found

    assert_steps(Weights(weight), 5, SIZE)
    assert rows
    rows.clear()
    monkeypatch.setattr(derived, "_MOST", 2**9)
    assert_steps(Weights(weight), 5, SIZE)
    assert not rows


@pytest.mark.parametrize("tokens", [2, 64])
@pytest.mark.parametrize(("size", "inputs", "scale"), [(1e-4, 1e-4, 1e4), (1e3, 100, 1e-3)])
def test_masks_in_half_precision(size: float, inputs: float, scale: float, tokens: int) -> None:
    """Their products with inputs may be out of range where those with gradients are not."""
    model = Weights(lambda w: w.a * (w.mask[0] * size).half()).half()
    model.a.data *= 1e-5
    engine = Engine(model)
    output = model((batch(3, tokens, SIZE) * inputs).half()).tanh().float()
    found = (output + 1).square().flatten(1).sum(1) * scale
    jacobian = reference_jacobian(found, [model.a]).double()
    gramian = engine.compute_gramian(found)
    assert jacobian.any(1).all()
    torch.testing.assert_close(gramian.double(), jacobian @ jacobian.T, rtol=0.05, atol=0)
