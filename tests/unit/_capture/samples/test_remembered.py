"""What is remembered of layouts: how much, and when."""

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from autogram._blocks import Folded, Partial, Subset
from autogram._capture.samples.proofs.proof import Constant
from autogram._capture.samples.remembered import Shown
from autogram._containers import Latest
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference
from tests.unit.engines import batch, per_sample


def test_more_passes_in_one_graph_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Latest.__init__, "__defaults__", (4,))
    model = nn.Linear(3, 4)
    engine = Engine(model)
    parts = [model(torch.randn(2, n, 3)).square().mean((1, 2)) for n in range(1, 12)]
    losses = torch.stack(parts).sum(0)
    jacobian = reference_jacobian(losses, model.parameters())
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)


def shown(*constants: Tensor) -> Shown:
    return Shown({Constant(n, "index"): x for n, x in enumerate(constants)})


def test_constants_of_what_calls_have_shown() -> None:
    """A later proof of the same graph may depend on more constants."""
    first, second = torch.arange(3), torch.tensor([2, 1, 0])
    assert not shown(first).is_of_others(shown(first.clone()).constants)
    assert shown(first).is_of_others(shown(second).constants)
    assert shown(first).is_of_others(shown(first, second).constants)
    assert shown(first).is_of_others(shown().constants)


def test_what_calls_show_together() -> None:
    regular, other = Folded(0, 1, 5, 1), Folded(1, 1, 5, 1)

    def few(*samples: int) -> Partial:
        return Partial(Subset(samples, 5), None)

    calls = shown()
    first = ((regular, other, few(0)), ())
    assert calls.add(first) is None  # one of five samples, and nothing of the other use
    assert calls.add(first) == first  # as long as nothing else is shown
    assert calls.add(((regular, few(1)), (regular, few(2, 3)))) is None
    # Three of five have shown the first use. `other` has not fitted each time.
    assert calls.add(((regular, other, few(4)), (regular,))) == ((regular,), (regular,))
    assert calls.add(((), ())) == ((regular,), (regular,))
    assert calls.add(((other, few(0)), (regular,))) is None
    assert shown().add(((few(0),), (regular,))) is None


def test_owners_of_different_sizes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many experts, there would be as many comparisons in each step as pairs of experts."""
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    engine = Engine(model)
    compared: list[tuple[Tensor, Tensor]] = []
    equal = torch.equal

    def count(one: Tensor, other: Tensor) -> bool:
        compared.append((one, other))
        return equal(one, other)

    monkeypatch.setattr(torch, "equal", count)
    for _ in range(4):
        x, experts = batch(20, 3), torch.arange(20).fmod(5)[torch.randperm(20)].clamp(max=3)
        h = x
        for number, expert in enumerate(model):
            places = (experts == number).nonzero().squeeze(1)[number:]
            h = h.index_add(0, places, expert(h[places]).tanh())
        losses = per_sample(h.view(5, 4, 3))
        jacobian = reference_jacobian(losses, model.parameters())
        compared.clear()
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
    assert engine._drivers.last.summary.found != "search"
    assert not [one for one, other in compared if one.shape != other.shape]
