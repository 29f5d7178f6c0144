"""The monitor's numbers beside explicit rows, and what they cost."""

from math import isinf, isnan, log

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchjd.aggregation import UPGrad as UPGradOfTorchjd

from autogram import Engine, InvalidOperandError, InvalidOptionError, UnsupportedError
from autogram.monitor import ConflictMonitor, Numbers, cosines, noise_and_signal
from autogram.testing import reference_jacobian
from autogram.weightings import UPGrad
from tests.unit.checks import irregular


def expected_numbers(rows: Tensor, weights: Tensor) -> Numbers:
    """By loops over pairs of rows."""
    m = len(rows)
    pairs = [(i, j) for i in range(m) for j in range(i)]
    products = [float(rows[i] @ rows[j]) for i, j in pairs]
    norms = rows.norm(dim=1)
    angles = [
        p / float(norms[i] * norms[j]) if norms[i] * norms[j] > 0 else 0.0
        for p, (i, j) in zip(products, pairs, strict=True)
    ]
    mean = rows.mean(0)
    noise = float((rows - mean).square().sum()) / (m - 1)
    eigenvalues = torch.linalg.svdvals(rows).square()
    shares = weights.abs() / weights.abs().sum()
    return Numbers(
        conflicting=sum(p < 0 for p in products) / len(pairs),
        mean_cosine=sum(angles) / len(pairs),
        least_cosine=min(angles),
        mean_norm=float(norms.mean()),
        largest_norm=float(norms.max()),
        effective_rank=float(eigenvalues.sum() ** 2 / eigenvalues.square().sum()),
        noise=noise,
        signal=float(mean.square().sum()) - noise / m,
        entropy=-sum(float(s) * log(s) for s in shares if s > 0) / log(m),
    )


def assert_same_numbers(actual: Numbers, expected: Numbers) -> None:
    assert vars(actual) == pytest.approx(vars(expected), rel=1e-9, abs=1e-12)


def test_numbers_of_a_training_in_which_things_change() -> None:
    """Other batch sizes at each step, one objective or several for each sample."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    engine, monitor = Engine(model), ConflictMonitor(UPGrad(), every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (size, several) in enumerate([(6, False), (3, True), (7, False), (2, True)]):
        output = model(irregular(size, 3) + step).sin()
        losses = output if several else output.square().sum(1)
        rows = reference_jacobian(losses, model.parameters())
        weights = engine.backward(losses, monitor)
        assert weights.flatten().tolist() == pytest.approx(UPGrad()(rows @ rows.T).tolist())
        assert_same_numbers(monitor.latest(), expected_numbers(rows, weights.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    assert [step for step, _ in monitor.history()] == [0, 1, 2, 3]


def test_an_objective_without_a_gradient_has_no_direction() -> None:
    rows = irregular(4, 3)
    rows[1] = 0
    weights = torch.tensor([1.0, 0.0, -2.0, 0.0])
    monitor = ConflictMonitor()
    monitor.observe(rows @ rows.T, weights)
    assert_same_numbers(monitor.latest(), expected_numbers(rows, weights))
    assert cosines(rows @ rows.T)[1].tolist() == [0, 0, 0, 0]


def test_the_number_of_directions() -> None:
    """Equal gradients have one, orthogonal ones of equal length have m."""
    monitor = ConflictMonitor(every=1)
    monitor.observe(torch.ones(4, 4))
    assert monitor.latest().effective_rank == pytest.approx(1)
    monitor.observe(1e-30 * torch.eye(4, dtype=torch.float32))
    assert monitor.latest().effective_rank == pytest.approx(4)


def test_noise_and_signal_have_no_bias() -> None:
    """Over all pairs of samples from a population, they are its covariance and mean."""
    population = irregular(5, 3)
    mean = population.mean(0)
    pairs = [population[[i, j]] for i in range(5) for j in range(5)]  # drawn with replacement
    found = [torch.stack(noise_and_signal(rows @ rows.T)) for rows in pairs]
    noise, signal = torch.stack(found).mean(0).tolist()
    assert noise == pytest.approx(float((population - mean).square().sum() / 5))
    assert signal == pytest.approx(float(mean.square().sum()))


def test_the_noise_scale_is_of_averages() -> None:
    monitor = ConflictMonitor(every=1)
    gramians = [irregular(6, 4) + 1, irregular(3, 4) + 2, torch.full((3, 4), torch.inf)]
    for rows in gramians:
        monitor.observe(rows @ rows.T)
    parts = [noise_and_signal(rows @ rows.T) for rows in gramians]
    expected = sum(noise for noise, _ in parts[:2]) / sum(signal for _, signal in parts[:2])
    assert monitor.noise_scale() == pytest.approx(float(expected))
    assert monitor.noise_scale(2) == pytest.approx(float(parts[1][0] / parts[1][1]))
    assert isnan(monitor.noise_scale(1))
    noise = torch.eye(2)  # orthogonal gradients have no signal
    monitor.observe(noise)
    assert isnan(monitor.noise_scale(1))
    assert isnan(monitor.latest().noise_scale)


LARGE, SMALL = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@pytest.mark.parametrize(
    "gramian",
    [
        torch.eye(3),
        torch.zeros(3, 3),
        torch.full((3, 3), LARGE),
        LARGE * torch.eye(3),
        torch.full((3, 3), SMALL) + SMALL * torch.eye(3),
        torch.full((3, 3), 1e-45),
        torch.diag(torch.tensor([LARGE, -LARGE, 0])),
        -torch.eye(3),
        torch.full((3, 3), torch.inf),
        torch.full((1, 1), LARGE),
    ],
    ids=lambda gramian: str(gramian[0].tolist()),
)
@pytest.mark.parametrize("weights", [[1.0, 1, 1], [0.0, 0, 0], [LARGE, LARGE, LARGE]], ids=str)
def test_no_number_is_infinite(gramian: Tensor, weights: list[float]) -> None:
    """A logger writes JSON, and a curve with an infinite point has no scale."""
    monitor = ConflictMonitor(every=1)
    monitor.observe(gramian.float(), torch.tensor(weights)[: len(gramian)].float())
    numbers = {**monitor.scalars(), "own": monitor.latest().noise_scale}
    assert not [name for name, value in numbers.items() if isinf(value)]


def test_ratio_of_numbers_that_are_far_apart() -> None:
    numbers = Numbers(*[1.0] * 6, noise=1e300, signal=1e-300, entropy=1.0)
    assert isnan(numbers.noise_scale)


def test_a_short_text() -> None:
    monitor = ConflictMonitor(UPGrad(), every=2)
    assert repr(monitor) == f"ConflictMonitor({UPGrad()!r}, every=2, 0 looks at 0 Gramians)"
    for _ in range(3):
        monitor(torch.eye(2))
    assert repr(monitor).endswith("every=2, 2 looks at 3 Gramians)")
    assert repr(ConflictMonitor()) == "ConflictMonitor(None, every=10, 0 looks at 0 Gramians)"


def test_what_is_not_defined_is_not_a_number() -> None:
    monitor = ConflictMonitor(every=1)
    monitor.observe(torch.full((1, 1), 4.0), torch.ones(1))
    single = monitor.latest()
    assert single.mean_norm == single.largest_norm == 2
    assert single.effective_rank == 1
    for name in ("conflicting", "mean_cosine", "least_cosine", "noise", "signal", "entropy"):
        assert isnan(getattr(single, name)), name
    assert isnan(single.noise_scale)
    gramian = -torch.ones(3, 3)
    gramian[0, 0] = torch.inf
    monitor.observe(gramian)
    assert isnan(monitor.latest().conflicting)
    assert isnan(monitor.latest().entropy)


def test_scalars_for_a_logger() -> None:
    monitor = ConflictMonitor()
    monitor.observe(torch.eye(3) + 1, torch.ones(3))
    scalars = monitor.scalars("x/")
    assert scalars["x/entropy"] == pytest.approx(1)
    assert scalars["x/conflicting"] == 0
    assert scalars["x/least_cosine"] == pytest.approx(0.5)
    assert scalars["x/noise_scale"] == pytest.approx(1 / (1 + 1 / 3 - 1 / 3))
    assert all(isinstance(value, float) for value in scalars.values())


def test_each_tenth_and_the_last_hundred() -> None:
    monitor = ConflictMonitor(lambda gramian: gramian.diagonal(), every=10, length=3)
    for step in range(55):
        monitor(torch.eye(2) * (step + 1))
    history = monitor.history()
    assert [step for step, _ in history] == [30, 40, 50]
    assert [numbers.largest_norm**2 for _, numbers in history] == pytest.approx([31, 41, 51])
    monitor.reset()
    assert monitor.history() == []
    monitor(torch.eye(2))
    assert [step for step, _ in monitor.history()] == [0]


def test_a_weighting_that_changes_the_gramian_does_not_change_the_numbers() -> None:
    def careless(gramian: Tensor) -> Tensor:
        return gramian.neg_().diagonal()

    monitor = ConflictMonitor(careless)
    monitor(torch.eye(2) + 1)
    assert monitor.latest().least_cosine == pytest.approx(0.5)


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_from_the_device_before_it_is_asked_for() -> None:
    """Ten steps cost one look of at most sixty operations, none of which waits."""
    monitor = ConflictMonitor(lambda gramian: gramian.sum(1), every=10)
    gramian = irregular(6, 4) @ irregular(6, 4).T
    monitor(gramian)
    monitor.reset()
    with Operations() as own:
        for _ in range(10):
            monitor(gramian)
    assert "_local_scalar_dense" not in own.names
    assert "_to_copy" not in own.names  # to another device or dtype
    assert len(own.names) - 10 < 60
    with Operations() as asked:
        monitor.latest()
    assert asked.names.count("_local_scalar_dense") <= 9


def test_the_monitor_is_a_small_part_of_a_step() -> None:
    """Calls in ten steps of a small network; most of those of a step take longer."""
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())])
    engine = Engine(model, verify="never")

    def steps(weighting) -> int:
        with Operations() as own:
            for _ in range(10):
                losses = model(irregular(16, 8)).square().sum(1)
                engine.backward(losses, weighting)
        return len(own.names)

    steps(UPGrad())
    without, with_monitor = steps(UPGrad()), steps(ConflictMonitor(UPGrad()))
    assert 0 < with_monitor - without < 0.03 * without


def test_refusals() -> None:
    with pytest.raises(InvalidOptionError, match=r"`every` is 0\. Pass a positive integer"):
        ConflictMonitor(every=0)
    with pytest.raises(
        InvalidOptionError, match=r"`last` is 0\. Pass a positive integer, or `None`"
    ):
        ConflictMonitor().noise_scale(0)
    with pytest.raises(InvalidOperandError, match="`UPGrad` is an aggregator"):
        ConflictMonitor(UPGradOfTorchjd())
    monitor = ConflictMonitor()
    with pytest.raises(UnsupportedError, match="has no weighting to call"):
        monitor(torch.eye(2))
    with pytest.raises(UnsupportedError, match="has seen no Gramian"):
        monitor.latest()
    with pytest.raises(InvalidOperandError, match=r"shape \(2, 3\)\. Pass a square matrix"):
        monitor.observe(torch.ones(2, 3))


def test_a_captured_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, while a CUDA graph is captured."""

    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="while a CUDA graph is captured, and does not see"):
        ConflictMonitor().observe(torch.eye(2).as_subclass(OnGpu))
