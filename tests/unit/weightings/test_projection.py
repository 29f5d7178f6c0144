"""Weights by projection: the optimality conditions, and torchjd's weights."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torchjd.aggregation import DualProjWeighting, UPGradWeighting
from torchjd.aggregation import UPGrad as UPGradOfTorchjd

from autogram import (
    Engine,
    InexactWeightsWarning,
    InvalidOperandError,
    InvalidOptionError,
    NonFiniteError,
)
from autogram.integrations.torchjd import BatchedProjector
from autogram.weightings import DualProj, Projector, UPGrad, projection
from autogram.weightings.certificate import error_of
from autogram.weightings.pivoting import pivot
from tests.unit.environment import DEVICE


def gradients(kind: str, m: int) -> Tensor:
    """Rows of J, of some kind."""
    n = max(2, m // 2)
    rows = torch.randn(m, n)
    if kind == "wide":
        rows = torch.randn(m, 3 * m + 1)
    elif kind == "duplicated":
        rows[m // 2 :] = rows[: m - m // 2].clone()
    elif kind == "opposite":
        rows[m // 2 :] = -rows[: m - m // 2]
    elif kind == "some zero":
        rows[::2] = 0
    elif kind == "all equal":
        rows[:] = rows[0]
    elif kind == "of all sizes":
        rows *= torch.logspace(-6, 6, m).unsqueeze(1)
    elif kind == "one against all":
        rows = rows.abs()
        rows[0] = -rows[1:].sum(0) if m > 1 else rows[0]
    return rows


KINDS = [
    *("narrow", "wide", "duplicated", "opposite"),
    *("some zero", "all equal", "of all sizes", "one against all"),
]


def regularised(gramian: Tensor) -> Tensor:
    """The Gramian as the projector sees it."""
    trace = gramian.diagonal().sum()
    unit = gramian / trace if trace >= 1e-4 else torch.zeros_like(gramian)
    return unit + 1e-4 * torch.eye(len(gramian))


def conditions_hold(weights: Tensor, gramian: Tensor, vector: Tensor, tolerance: float) -> None:
    """The weights of one projection are feasible, and optimal for the regularised Gramian."""
    matrix = regularised(gramian)
    assert bool((weights >= vector - 1e-12).all())
    pull = matrix @ weights
    slack = tolerance * float((matrix.abs() @ weights.abs()).max())
    assert bool((pull >= -slack).all()), float(pull.min())
    is_free = weights > vector
    assert bool((pull[is_free].abs() <= slack).all())


EXACT = 1e-12  # relative error of weights that others are compared with


def exact_weights(gramian: Tensor) -> Tensor:
    """The weights of UPGrad to 1e-12: a certified solution, polished by its active sets."""
    m = len(gramian)
    matrix, bounds = regularised(gramian), torch.eye(m) / m
    near = Projector(tolerance=1e-8)(bounds, gramian)
    for _ in range(2):  # the first set may be wrong in entries that are nearly bound
        is_bound = near - bounds < (near @ matrix) / 1e-4
        both = ~is_bound.unsqueeze(2) & ~is_bound.unsqueeze(1)
        systems = torch.where(both, matrix, 0) + torch.diag_embed(is_bound.to(matrix.dtype))
        right = torch.where(is_bound, bounds, -torch.where(is_bound, bounds, 0) @ matrix)
        near = torch.linalg.solve(systems, right).maximum(bounds)
    assert float(error_of(bounds, matrix, 1e-4, near)) <= EXACT * 10
    return near.sum(0)


@pytest.mark.parametrize("m", [1, 2, 7, 45, 46, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_exact_to_the_tolerance(kind: str, m: int) -> None:
    """Whatever the Gramian: the certificate bounds the error, and is within the tolerance."""
    rows = gradients(kind, m)
    gramian = rows @ rows.T
    for tolerance in (1e-3, 1e-8):
        weighting = UPGrad(projector=Projector(tolerance=tolerance))
        weights = weighting(gramian)
        certificate = weighting.certificate
        assert certificate is not None
        assert certificate.is_optimal
        assert certificate.error <= certificate.tolerance == tolerance
        assert certificate.method == ("pivoting" if m <= 45 else "newton")
        error = (weights - exact_weights(gramian)).norm() / weights.norm()
        assert float(error) <= certificate.error + 10 * EXACT


@pytest.mark.parametrize("m", [3, 46, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_optimality_conditions(kind: str, m: int) -> None:
    """For each projected vector."""
    rows = gradients(kind, m)
    gramian, vectors = rows @ rows.T, torch.eye(m) / m
    found = Projector(tolerance=1e-8)(vectors, gramian)
    for weights, vector in zip(found[:20], vectors[:20], strict=True):
        conditions_hold(weights, gramian, vector, 1e-7)


def test_a_small_regularisation_is_left_to_splitting() -> None:
    """Newton's method makes no progress there."""
    rows = gradients("narrow", 60)
    weighting = UPGrad(projector=Projector(reg_eps=1e-6))
    weighting(rows @ rows.T)
    assert weighting.certificate is not None
    assert weighting.certificate.is_optimal
    assert weighting.certificate.method == "splitting"


@pytest.mark.parametrize("name", ["UPGrad", "DualProj"])
def test_splitting_takes_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Newton's method makes too few steps."""
    monkeypatch.setattr(projection, "_MOST_NEWTON_STEPS", 1)
    rows = gradients("narrow", 200)
    weighting = {"UPGrad": UPGrad, "DualProj": DualProj}[name]()
    weights = weighting(rows @ rows.T)
    assert weighting.certificate is not None
    assert weighting.certificate.is_optimal
    assert weighting.certificate.method == "splitting"
    monkeypatch.undo()
    assert_close(
        weights, type(weighting)()(rows @ rows.T), rtol=0, atol=4e-3 * float(weights.norm())
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_optimality_conditions_of_512(kind: str) -> None:
    rows = gradients(kind, 512)
    weighting = UPGrad()
    weighting(rows @ rows.T)
    assert weighting.certificate is not None
    assert weighting.certificate.is_optimal


@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-3, 1.0, 1e8]),
)
@settings(max_examples=60, deadline=None)
def test_random_gramians(m: int, n: int, seed: int, scale: float) -> None:
    """Of any rank and any size, with small integers among them, which tie."""
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = partial(torch.randint, generator=generator, device="cpu")
    rows = scale * draw(-2, 3, (m, n)).double().to(DEVICE)
    gramian = rows @ rows.T
    vector = draw(-3, 4, (m,)).double().to(DEVICE)
    projector = Projector(tolerance=1e-8)
    conditions_hold(projector(vector, gramian), gramian, vector, 1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 5, 40, 96])
def test_weights_are_those_of_torchjd(kind: str, m: int) -> None:
    """The update is equal to 1e-6, by pivoting and by Newton's method, for both weightings."""
    rows = gradients(kind, m)
    gramian = rows @ rows.T
    preferences = torch.rand(m)
    for given_preferences in (None, preferences):
        for ours, theirs in ((UPGrad, UPGradWeighting), (DualProj, DualProjWeighting)):
            weighting = ours(given_preferences, Projector(tolerance=1e-8))
            found, expected = weighting(gramian), theirs(given_preferences)(gramian)
            update, wanted = rows.T @ found, rows.T @ expected
            assert_close(update, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()) + 1e-9)


def test_other_parameters_are_those_of_torchjd() -> None:
    """Normalisation and regularisation."""
    from torchjd.linalg import QuadprogProjector

    rows = gradients("narrow", 20)
    options = {"norm_eps": 1e-2, "reg_eps": 1e-2}
    expected = UPGradWeighting(projector=QuadprogProjector(**options))(rows @ rows.T)
    assert_close(UPGrad(projector=Projector(**options))(rows @ rows.T), expected)


def test_a_projector_for_torchjd() -> None:
    """It plugs into torchjd's own classes, aggregators as well as weightings."""
    rows, projector = gradients("opposite", 30), BatchedProjector()
    aggregator = UPGradOfTorchjd(projector=projector)
    assert_close(aggregator(rows), UPGradOfTorchjd()(rows), rtol=1e-6, atol=1e-9)
    found = DualProjWeighting(projector=projector)(rows @ rows.T)
    assert_close(found, DualProjWeighting()(rows @ rows.T))
    assert projector.certificate is not None
    assert repr(projector) == "BatchedProjector(tolerance=0.001)"


def test_updates_conflict_with_no_gradient() -> None:
    """As the theory says, but for the regularisation."""
    for kind in KINDS:
        rows = gradients(kind, 30)
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
        gramian = rows @ rows.T
        weights = UPGrad(projector=Projector(reg_eps=1e-7))(gramian)
        # The regularisation is relative to the trace.
        allowed = 1e-7 * gramian.diagonal().sum() * weights + 1e-7 * weights.sum()
        assert bool((gramian @ weights >= -allowed).all()), kind


@pytest.mark.parametrize("m", [20, 80])
def test_series_of_steps_of_a_model(m: int) -> None:
    """Warm starts change nothing but the number of iterations, also when sizes change."""
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    engine, weighting = Engine(model), UPGrad(projector=Projector(tolerance=1e-7))
    counts = []
    for step in range(6):
        size = m - 3 * (step == 4)
        x, y = torch.randn(size, 5), torch.randint(3, (size,))
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        gramian = engine.compute_gramian(losses)
        weights = weighting(gramian)
        fresh = UPGrad(projector=Projector(tolerance=1e-7))(gramian)
        update = [
            torch.autograd.grad(losses @ w, [*model.parameters()], retain_graph=True)
            for w in (weights, fresh)
        ]
        assert_close(update[0], update[1], rtol=1e-5, atol=1e-7)
        assert weighting.certificate is not None
        counts.append(weighting.certificate.iterations)
        weighting(gramian)
        assert weighting.certificate.iterations <= counts[-1]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), update[0], strict=True):
                parameter -= 0.1 * gradient
    assert counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_step(dtype: torch.dtype) -> None:
    """Weights have the dtype of the Gramian, and go into a step of the engine."""
    rows = gradients("narrow", 12)
    gramian = (rows @ rows.T).to(dtype)
    weights = UPGrad()(gramian)
    assert weights.dtype == dtype
    assert_close(weights.double(), UPGrad()(gramian.double()), rtol=1e-2, atol=1e-3)
    model = nn.Linear(3, 2)
    losses = model(torch.randn(6, 3)).square().sum(1)
    found = Engine(model).backward(losses, UPGrad())
    assert found.shape == (6,)


@pytest.mark.parametrize("m", [12, 100])
@pytest.mark.parametrize("seed", range(5))
def test_gramians_that_rounding_has_made_indefinite(seed: int, m: int) -> None:
    """Of low rank, in half precision: eigenvalues of zero become negative ones."""
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randn(m, 4, generator=generator, device="cpu")
    exact = rows @ rows.T
    rounded = exact.to(torch.bfloat16)
    assert torch.linalg.eigvalsh(rounded.double()).min() < -1e-4 * rounded.double().trace()
    weights = UPGrad()(rounded)
    assert weights.isfinite().all()
    assert (exact @ weights.to(exact)).min() > -1e-2 * exact.max()  # no loss rises


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-8, 1e30, 1e150])
def test_gramians_of_extreme_size(scale: float) -> None:
    """As torchjd does: what is below `norm_eps` counts as zero."""
    rows = gradients("opposite", 10)
    found = UPGrad()(scale * (rows @ rows.T))
    if scale < 1e-4:
        assert_close(found, torch.full((10,), 0.1))
    else:
        assert_close(found, UPGrad()(rows @ rows.T))


def test_nothing_to_weight() -> None:
    assert UPGrad()(torch.zeros(0, 0)).shape == (0,)


def test_rounding_of_the_gramian_is_no_asymmetry() -> None:
    """As of sums in float32."""
    rows = gradients("narrow", 10)
    gramian = rows @ rows.T
    found = UPGrad()(gramian + 1e-6 * torch.randn(10, 10))
    assert_close(found, UPGrad()(gramian), rtol=1e-2, atol=1e-3)


ROWS = torch.ones(3, 4)
MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: UPGrad()(torch.ones(3, 2)), InvalidOperandError, "Pass a square matrix"),
    (lambda: UPGrad()(torch.tensor(1.0)), InvalidOperandError, "Pass a square matrix"),
    (lambda: Projector()(ROWS[0], torch.eye(3)), InvalidOperandError, "Pass vectors `"),
    (lambda: UPGrad()(torch.ones(3, 3).triu()), InvalidOperandError, "The matrix is not a Gramian"),
    (lambda: UPGrad()(-torch.eye(3)), InvalidOperandError, "The matrix is not a Gramian"),
    (lambda: UPGrad(torch.ones(2))(ROWS @ ROWS.T), InvalidOperandError, "There are 2 preferences"),
    (
        lambda: DualProj(torch.ones(4))(ROWS @ ROWS.T),
        InvalidOperandError,
        "has 3 objectives. Pass one for",
    ),
    (lambda: UPGrad(torch.ones(2, 2)), InvalidOperandError, r"(?s)is tensor.*Pass a tensor `"),
    (lambda: UPGrad([1.0, 2.0]), InvalidOperandError, r"is \[1.0, 2.0\]. Pass a tensor"),  # type: ignore[arg-type]
    (lambda: UPGrad()(torch.full((3, 3), torch.nan)), NonFiniteError, "or a vector to project"),
    (lambda: UPGrad()(torch.full((3, 3), torch.inf)), NonFiniteError, "or a vector to project"),
    (lambda: Projector(norm_eps=-1.0), InvalidOptionError, "Pass zero or a positive number"),
    (lambda: Projector(reg_eps=0.0), InvalidOptionError, "Pass a positive number"),
    (
        lambda: Projector(iterations=0),
        InvalidOptionError,
        "Pass a positive integer, or `None`",
    ),
]


@pytest.mark.parametrize(("act", "error", "message"), MISTAKES)
def test_mistakes(act: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


def test_weights_that_are_not_exact_are_reported() -> None:
    """Where the iterations do not suffice for the tolerance."""
    rows = gradients("narrow", 100)
    weighting = UPGrad(projector=Projector(most=25, tolerance=1e-17))
    with pytest.warns(InexactWeightsWarning, match=r"Pass a larger .*, not to 1.0e-17"):
        weights = weighting(rows @ rows.T)
    assert weighting.certificate is not None
    assert not weighting.certificate.is_optimal
    gramian = rows @ rows.T
    assert_close(rows.T @ weights, rows.T @ UPGrad()(gramian), rtol=0.2, atol=0.05)


def test_few_values_are_read() -> None:
    """Each waits for the device: some in each step of Newton's method, and few besides."""
    reads: list[None] = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            reads.extend([None] * ("_local_scalar_dense" in str(func)))
            return func(*args, **(kwargs or {}))

    rows, weighting = gradients("narrow", 100), UPGrad()
    with Counting():
        weighting(rows @ rows.T)
    assert weighting.certificate is not None
    assert 5 < len(reads) <= 26 * (weighting.certificate.iterations + 1)


def test_a_fixed_number_of_iterations_asks_the_device_nothing() -> None:
    """For CUDA graphs: no value is read, and the result is near that of a checked call."""
    rows = gradients("narrow", 50)
    gramian = rows @ rows.T
    with NoReading():
        weights = UPGrad(projector=Projector(iterations=20))(gramian)
    exact = UPGrad(projector=Projector(tolerance=1e-8))(gramian)
    assert_close(rows.T @ weights, rows.T @ exact, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="reads"), NoReading():
        UPGrad()(gramian)


class NoReading(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails where the value of a tensor is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "_local_scalar_dense" not in str(func), f"{func} reads a value"
        return func(*args, **(kwargs or {}))


def test_the_error_sees_each_condition() -> None:
    """A point that pulls at a bound, one that is free and not flat, and one that is both."""
    gramian, bounds = torch.tensor([[1.0, -0.5], [-0.5, 1.0]]), torch.tensor([[1.0, 1.0]])
    assert float(error_of(bounds, gramian, 0.5, bounds)) == 0.0
    assert float(error_of(bounds, gramian, 0.5, torch.tensor([[2.0, 1.0]]))) > 0.1
    pulled = torch.tensor([[1.0, -3.0], [-3.0, 10.0]])
    assert float(error_of(bounds, pulled, 0.05, bounds)) > 0.1


@given(m=st.integers(1, 12), seed=st.integers(0, 2**32 - 1), size=st.floats(-12, 2))
@settings(max_examples=100, deadline=None)
def test_the_error_of_any_point_is_bounded(m: int, seed: int, size: float) -> None:
    """Also of points far from the solution, with rows of both signs."""
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = partial(torch.randn, generator=generator, device="cpu", dtype=torch.float64)
    rows, bounds, away = (x.to(DEVICE) for x in (draw(m, 4), draw(3, m), draw(3, m)))
    gramian, shift = rows @ rows.T + 1e-2 * torch.eye(m), 1e-2
    exact, _ = pivot(bounds, gramian, 200, bounds > 0)
    assert float(error_of(bounds, gramian, shift, exact)) < 1e-9
    point = (exact + 10**size * away).maximum(bounds)
    error = (point - exact).sum(0).norm()
    size_of_point = max(point.sum(0).norm(), point.norm())
    assert float(error) <= float(error_of(bounds, gramian, shift, point)) * size_of_point + 1e-9
