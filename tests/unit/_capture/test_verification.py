"""Faults inside of the library that a verification finds, and when it looks."""

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    Jacobian,
    VerificationError,
    concatenate,
)
from autogram._blocks import Columns, Folded, bundle, candidates, columns
from autogram._capture.autograd.passes import Pass
from autogram._capture.backward import rounding, verification
from autogram._capture.backward.assembly import Assembly
from autogram._capture.backward.verification import Check
from autogram._capture.places.finding import PlacesInGraph
from autogram._capture.samples import inferred
from autogram._capture.samples.objectives import Objectives
from autogram._capture.samples.survey import Survey
from autogram._capture.uses import Use
from autogram._jacobian import parts
from autogram._jacobian.parts import JacobianPart
from tests.unit.checks import features
from tests.unit.engines import assert_exact, batch, mlp, per_sample
from tests.unit.networks import Recurrent


def dropping(monkeypatch: pytest.MonkeyPatch, is_dropped: Callable[[Use], bool]) -> None:
    """Makes assemblies miss some uses."""
    add = Assembly._add

    def add_others(self: Assembly, use: Use, *others: Any) -> None:
        if not is_dropped(use):
            add(self, use, *others)

    monkeypatch.setattr(Assembly, "_add", add_others)


@pytest.mark.parametrize("batch_dim", [0, None, "auto"])
def test_a_dropped_use_of_a_shared_parameter(
    monkeypatch: pytest.MonkeyPatch, batch_dim: Any
) -> None:
    dropping(monkeypatch, lambda use: use.index == 1)
    model = Recurrent()
    engine = Engine(model, batch_dim=batch_dim, unseen="error")  # else `None` asks for no use
    losses = per_sample(model(batch(5, 4)))
    with pytest.raises(VerificationError, match=r"`cell\.weight`.*used in `linear`") as found:
        engine.compute_gramian(losses)
    assert "The result does not agree with an ordinary backward pass" in str(found.value)
    assert set(found.value.gaps) == {"cell.weight", "cell.bias"}
    assert not found.value.is_of_samples


def test_a_dropped_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not blamed."""
    dropping(monkeypatch, lambda use: use.index == 1)
    model = mlp()
    engine = Engine(model)
    losses = per_sample(model(batch(5, 3)))
    with pytest.raises(
        VerificationError, match=r"A use of `2\.weight`, `2\.bias` was not"
    ) as found:
        engine.compute_gramian(losses)
    assert found.value.gaps == {"2.weight": 1, "2.bias": 1}


@pytest.mark.parametrize(
    ("keep", "batch_dim"), [("auto", 0), ("rows", 0), ("factors", 0), ("factors", None)]
)
def test_a_jacobian_is_verified(
    monkeypatch: pytest.MonkeyPatch, keep: Any, batch_dim: int | None
) -> None:
    """By its product with the vector. Without a fault it passes, with one it does not.

    Rows of the whole batch would be ordinary gradients, and have no fault.
    """
    model = Recurrent()
    engine = Engine(model, batch_dim=batch_dim, verify="always")
    losses = features(model(batch(5, 4)), 2)
    for _ in range(20):
        engine.jacobian(losses, keep=keep)
    dropping(monkeypatch, lambda use: use.index == 1)
    with pytest.raises(VerificationError, match=r"`cell\.weight`.*used in `linear`"):
        engine.jacobian(losses, keep=keep)


class Tokens(nn.Module):
    """A layer whose input has samples and tokens in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_a_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples before tokens, read as tokens before samples."""
    find = inferred.layout_of_places

    def turned(*arguments: Any) -> Folded:
        layout = find(*arguments)
        assert isinstance(layout, Folded)
        return Folded(layout.dim, layout.after, layout.batch, layout.before)

    monkeypatch.setattr(inferred, "layout_of_places", turned)
    model = Tokens()
    engine = Engine(model, batch_dim=0)
    losses = per_sample(model(batch(4, 7, 3)))
    with pytest.raises(VerificationError, match=r"samples are mixed, or the engine") as error:
        engine.compute_gramian(losses)
    assert error.value.is_of_samples
    assert set(error.value.gaps) == {"layer.weight", "layer.bias"}


class Normalised(nn.Module):
    """Batch normalisation in training mode behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def contrastive(output: Tensor) -> Tensor:
    """An in-batch contrastive loss."""
    output = F.normalize(output, dim=1)
    return F.cross_entropy(
        output @ output.roll(1, 1).T, torch.arange(len(output)), reduction="none"
    )


MIXED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], set[str]]] = {
    "batch normalisation": (Normalised, per_sample, {"first.weight"}),
    "contrastive": (mlp, contrastive, {"0.weight", "0.bias", "2.weight", "2.bias"}),
    "centred": (mlp, lambda y: y.sum(1) - y.sum(1).mean(), {"0.weight", "0.bias", "2.weight"}),
    "swapped": (mlp, lambda y: per_sample(y).flip(0), {"0.weight", "0.bias", "2.weight", "2.bias"}),
}


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first dimension is taken for that of the samples, whatever the graph tells."""

    def plain(use: Use, _: object, samples: int) -> Folded:
        return next(iter(candidates(use.shape, (0,), samples)))

    monkeypatch.setattr(PlacesInGraph, "is_mixed", False)
    monkeypatch.setattr(inferred, "layout_of_places", plain)


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("samples", [6, 7])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_samples_that_are_taken_for_others(name: str, samples: int) -> None:
    make_model, of, concerned = MIXED[name]
    model = make_model()
    engine = Engine(model, batch_dim=0)
    losses = of(model(batch(samples, 3)))
    with pytest.raises(VerificationError, match="`batch_dim=None`") as found:
        engine.compute_gramian(losses)
    assert found.value.is_of_samples
    assert set(found.value.gaps) >= concerned


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("name", MIXED)
def test_auto_is_exact_where_verification_finds_mixed_samples(name: str) -> None:
    """With a warning, and without another look at the next call."""
    make_model, of, _ = MIXED[name]
    model = make_model()
    engine = Engine(model)
    with pytest.warns(CoupledObjectivesWarning, match="samples are mixed"):
        assert_exact(engine, of(model(batch(6, 3))), model)
    for _ in range(3):
        assert_exact(engine, of(model(batch(6, 3))), model)


@pytest.mark.usefixtures("blind")
def test_two_samples() -> None:
    """Of which random signs alone would miss one fault or the other."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = mlp(outputs=3)
        engine = Engine(model, batch_dim=0)
        with pytest.raises(VerificationError):
            engine.compute_gramian(per_sample(model(batch(2, 3))).flip(0))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls that were verified, which the test numbers."""
    verified: list[int] = []
    compare = Check.compare

    def count(check: Check, *others: Any) -> Any:
        verified.append(1)
        return compare(check, *others)

    monkeypatch.setattr(Check, "compare", count)
    return verified


SCHEDULES = {
    "first": [1, 2, 4, 8, 14, 16],  # new shapes at 11, new calls at 14
    "always": [*range(1, 18)],
    "never": [],
}


@pytest.mark.parametrize("batch_dim", [0, None])
@pytest.mark.parametrize("mode", SCHEDULES)
def test_calls_that_are_verified(counted: list[int], mode: Any, batch_dim: int | None) -> None:
    """Where the batch is one sample and rows are few, a new graph has no check of its own."""
    model = mlp()
    engine = Engine(model, verify=mode, batch_dim=batch_dim)
    verified = []
    for call in range(1, 18):
        losses = per_sample(model(batch(5 if call < 11 else 4, 3)))
        engine.compute_gramian(losses.exp() if call >= 14 else losses)
        if counted:
            verified.append(call)
            counted.clear()
    is_late = mode == "first" and batch_dim is None
    assert verified == [call for call in SCHEDULES[mode] if call != 14 or not is_late]


def test_verify_does_not_wait_for_its_turn(counted: list[int]) -> None:
    model = mlp()
    engine = Engine(model, verify="never")
    losses = per_sample(model(batch(5, 3)))
    engine.compute_gramian(losses)
    engine.verify(losses)
    assert counted == [1]


# What is called, and how often Jᵀ of one vector is computed, for one parameter or for all.
CHECKED: dict[str, tuple[Callable[[Engine, Tensor], Any], Counter[str], Counter[str]]] = {
    "Gramian": (
        lambda engine, losses: engine.compute_gramian(losses),
        Counter(),
        Counter({"for one": 4}),
    ),
    "step": (
        lambda engine, losses: engine.backward(losses, lambda gramian: gramian.diagonal()),
        Counter({"for all": 1}),
        Counter({"for all": 2}),
    ),
    "Jacobian": (
        lambda engine, losses: engine.jacobian(losses),
        Counter(),
        Counter({"for all": 1}),
    ),
}


@pytest.mark.parametrize("checked", [8, 32], ids=["without programs", "with programs"])
@pytest.mark.parametrize("call", CHECKED)
def test_what_a_check_costs(call: str, checked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary pass, and Jᵀ u for each parameter once. The call before it has neither."""
    make, without, with_check = CHECKED[call]
    model = mlp()
    engine = Engine(model)
    counts: list[Counter[str]] = [Counter()]

    def count(place: Any, name: str, what: str) -> None:
        monkeypatch.setattr(place, name, counting(getattr(place, name), counts, what))

    count(Pass, "differentiate", "passes")
    count(columns, "products", "products")
    count(bundle, "products", "products")
    for _ in range(checked):
        counts.append(Counter())
        if len(counts) == checked:  # programs write down no function that is counted
            count(Columns, "weighted_sum", "for one")
            count(verification, "weighted_sums", "for all")
            count(parts, "weighted_sums", "for all")
        make(engine, per_sample(model(batch(5, 3))))
    plain, dear = counts[checked - 1 :]
    assert (plain.pop("passes"), dear.pop("passes")) == (1, 2)
    assert dear.pop("products", 0) == plain.pop("products", 0)
    if call == "step":  # each of the sums for all may be made of sums for one
        assert dear.pop("for one", 0) == 2 * plain.pop("for one", 0)
    elif call == "Jacobian":
        dear.pop("for one", 0)
    assert (plain, dear) == (without, with_check)


def counting(
    function: Callable[..., Any], counts: list[Counter[str]], name: str
) -> Callable[..., Any]:
    """A function whose calls are counted by the last counter."""

    def counted(*arguments: Any, **named: Any) -> Any:
        counts[-1][name] += 1
        return function(*arguments, **named)

    return counted


def test_the_entry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one entry of a gradient has another sign."""
    monkeypatch.setattr(columns, "weighted_sum", with_one_sign(columns.weighted_sum, (5, 3), 2, 1))
    model = mlp()
    engine = Engine(model, batch_dim=None, unseen="error")  # else rows need no columns
    with pytest.raises(
        VerificationError, match=r"`0\.weight`: norms .* most at the entry \(2, 1\)"
    ):
        engine.compute_gramian(features(model(batch(5, 3)), 1).sum())


def with_one_sign(
    function: Callable[..., Tensor], shape: tuple[int, ...], *entry: int
) -> Callable[..., Tensor]:
    """Weighted sums, of which those of a shape have another sign in one entry."""

    def changed(*arguments: Any) -> Tensor:
        found = function(*arguments)
        if found.shape[1:] == shape:
            found = found.clone()
            found[(slice(None), *entry)] *= -1
        return found

    return changed


def test_a_gramian_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are right, and no parameter is blamed."""
    monkeypatch.setattr(Objectives, "in_order", lambda _, values, *__: values)
    model = mlp(3, 4)
    engine = Engine(model, batch_dim=0)
    message = (
        r"The Gramian does not agree with an ordinary backward pass, although .*: for a random "
        r"vector u, uᵀ G u is \S+ and ‖Jᵀ u‖² is .*please report it"
    )
    with pytest.raises(VerificationError, match=message) as found:
        engine.compute_gramian(features(model(batch(5, 3)), 3))
    assert found.value.gaps == {}
    assert not found.value.is_of_samples


def test_a_gramian_that_is_not_symmetric(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added changes no form uᵀ G u."""

    def skewed(self: Objectives, values: Tensor, *dims: int) -> Tensor:
        del self, dims
        upper = torch.ones_like(values).triu()
        return values + upper - upper.T

    monkeypatch.setattr(Objectives, "in_order", skewed)
    model = mlp()
    with pytest.raises(VerificationError, match=r"The Gramian .*: it is not symmetric"):
        Engine(model).compute_gramian(per_sample(model(batch(5, 3))))


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives one percent more."""
    return lambda *arguments: function(*arguments) * 1.01


PRODUCTS: dict[str, tuple[Any, str, Callable[[Jacobian], Any], str]] = {
    "gramian": (columns, "products", lambda j: j.gramian(), "The Gramian"),
    "block_gramians": (columns, "products", lambda j: j.block_gramians(), "The Gramian"),
    "vjp": (columns, "weighted_sum", lambda j: j.vjp(torch.ones(5)), "Jᵀ w"),
    "accumulate_grad": (
        columns,
        "weighted_sum",
        lambda j: j.accumulate_grad(torch.ones(5)),
        "The gradient Jᵀ w",
    ),
    "accumulate_grad by group": (
        columns,
        "weighted_sum",
        lambda j: j.accumulate_grad({"weight": torch.ones(5)}),
        "The gradient Jᵀ w",
    ),
    "jvp": (columns, "directional", lambda j: j.jvp([torch.ones(4, 3)]), "J v"),
    "rows": (JacobianPart, "rows", lambda j: j.rows([1, 3]), "A row of J"),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("others", [0, 1])
def test_products_of_a_verified_jacobian(
    product: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compared with the gradient, also where only the second part was verified."""
    place, name, call, what = PRODUCTS[product]
    model = nn.Linear(3, 4, bias=False)
    engines = [Engine(model, verify="never") for _ in range(others)]
    engines.append(Engine(model, verify="always"))
    sizes = [2] * others + [5 - 2 * others]
    losses = [per_sample(model(batch(size, 3))) for size in sizes]
    jacobian = concatenate([e.jacobian(x) for e, x in zip(engines, losses, strict=True)])
    call(jacobian)
    monkeypatch.setattr(place, name, scaled(getattr(place, name)))
    message = f"{what} does not agree with an ordinary backward pass"
    model.weight.grad = None
    with pytest.raises(VerificationError, match=message) as found:
        call(jacobian)
    assert found.value.gaps == {}
    assert model.weight.grad is None  # nothing was written


@pytest.mark.parametrize("measures", [True, False])
def test_rounding_is_no_error(measures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients of several objectives nearly cancel, rounding errors are left.

    Without a measure of these, some right results would be called wrong.
    """
    if not measures:
        monkeypatch.setattr(rounding, "_MOST_ROUNDINGS", 0)
    alarms = 0
    for seed in range(30):
        torch.manual_seed(seed)
        layers = nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Softplus(), nn.GELU()
        model = nn.Sequential(*layers).bfloat16()
        engine = Engine(model, batch_dim=0, verify="never")
        losses = features(model(batch(1, 1).bfloat16()), 5)
        for _ in range(15):
            try:
                engine.verify(losses)
            except VerificationError:
                alarms += 1
    assert (alarms == 0) == measures


SETTINGS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")


@pytest.fixture
def settings() -> Iterator[dict[str, Any]]:
    """PyTorch's settings of precision, which are put back."""
    found = {name: operator.attrgetter(name)(torch.backends) for name in SETTINGS}
    before = {name: setting.fp32_precision for name, setting in found.items()}
    yield found
    for name, setting in found.items():
        setting.fp32_precision = before[name]


class Hiding(torch.autograd.Function):
    """May do anything."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        del ctx
        return cotangent * 2


@pytest.mark.parametrize(
    ("products", "convolutions", "expected"),
    [
        ("ieee", "ieee", {"linear": False, "convolution": False, "hidden": False}),
        ("ieee", "tf32", {"linear": False, "convolution": True, "hidden": True}),
        ("tf32", "ieee", {"linear": True, "convolution": True, "hidden": True}),
    ],
)
def test_tf32_counts_where_it_is_used(
    products: str, convolutions: str, expected: dict[str, bool], settings: dict[str, Any]
) -> None:
    """On a GPU, PyTorch allows it by default, but not for matrix products."""
    settings["cuda.matmul"].fp32_precision = products
    settings["cudnn.conv"].fp32_precision = settings["cudnn.rnn"].fp32_precision = convolutions
    layers = {
        "linear": nn.Linear(5, 5),
        "convolution": nn.Conv1d(2, 2, 1),
        "hidden": nn.Linear(5, 5),
    }
    for name, layer in layers.items():
        engine = Engine(layer)  # whose taps are Functions in Python, too
        losses = layer(torch.randn(3, 2, 5)).sum((1, 2))
        if name == "hidden":
            losses = Hiding.apply(losses)
        nodes = Survey(engine._channel, losses).nodes
        assert rounding.may_be_tf32(nodes) == expected[name]
