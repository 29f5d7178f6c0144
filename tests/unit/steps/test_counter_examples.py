"""Series of steps that were wrong: the first are harmless, and later ones differ in one thing."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, MixedSamplesError
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, features, irregular
from tests.unit.engines import assert_exact, counted_passes

B = 6

both_modes = pytest.mark.parametrize("batch_dim", [0, "auto"])
Mode = Literal["auto"] | int


def assert_series(
    model: nn.Module, losses: Callable[[Any], Tensor], steps: Sequence[Any], mode: Mode
) -> None:
    """Assert that one engine that verifies nothing is exact at each step, done twice."""
    engine = Engine(model, batch_dim=mode, verify="never")
    for step in steps:
        for _ in range(2):
            assert_exact(engine, losses(step), model)


class Packed(nn.Module):
    """Tokens of all samples, one behind the other in a buffer, from some place on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor, owners: Tensor, start: int = 0) -> Tensor:
        y = self.first(x).tanh()[start : start + len(owners)]
        samples = int(owners.max()) + 1
        weights = self.gate(y).exp()
        total = torch.zeros(samples, 1).index_add(0, owners, weights)
        y = y * weights / total[owners]
        return self.last(torch.zeros(samples, 4).index_add(0, owners, y))


@both_modes
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_a_slice_of_packed_samples_begins_elsewhere(batch_dim: Mode) -> None:
    """Where two samples of two tokens lie is regular by accident if they come first."""
    model, x = Packed(), irregular(12, 3)

    def losses(step: tuple[int, int]) -> Tensor:
        samples, start = step
        output = model(x, torch.arange(samples).repeat_interleave(2), start)
        return features(output, 1).squeeze(1)

    steps = [(2, 2), (3, 1), (3, 0), *[(3, start) for start in (2, 1, 4, 0, 6, 3, 5) * 2]]
    assert_series(model, losses, steps, batch_dim)


@both_modes
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_samples_of_equal_lengths_come_between_others(batch_dim: Mode) -> None:
    model = Packed()
    lengths = [[3, 1], [3, 1, 1], [3, 1, 1, 1], [2] * 6, [3, *[1] * 5], [3, 1, 1, 1, 1, 3], [2] * 6]

    def losses(step: list[int]) -> Tensor:
        owners = torch.arange(len(step)).repeat_interleave(torch.tensor(step))
        return features(model(irregular(len(owners), 3), owners), 1).squeeze(1)

    assert_series(model, losses, [*lengths, [3, 1, 1]], batch_dim)


@both_modes
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_a_function_in_python_may_be_called_like_an_operation(batch_dim: Mode) -> None:
    class Permute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
            ctx.order = order
            return x[order]

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
            found = torch.empty_like(cotangents[0])
            found[ctx.order] = cotangents[0]
            return found, None

    model, x = nn.Linear(3, 4), irregular(B, 3)

    def losses(order: Tensor) -> Tensor:
        permuted: Tensor = Permute.apply(model(x).tanh(), order)  # type: ignore[no-untyped-call]
        return permuted.square().sum(1)

    assert_series(model, losses, [torch.arange(B), torch.tensor([1, 0, 2, 3, 5, 4])], batch_dim)


@both_modes
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_constants_in_front_of_samples_may_have_other_lengths(batch_dim: Mode) -> None:
    model, x = nn.Linear(3, 4), irregular(B, 3)

    def losses(length: int) -> Tensor:
        parts = torch.ones(length, 4), model(x).tanh(), torch.ones(B - length, 4)
        return torch.cat(parts)[B:].square().sum(1)

    assert_series(model, losses, [B, B - 1, B - 3], batch_dim)


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_a_flipped_batch_may_have_one_coefficient_at_first() -> None:
    model, x = nn.Linear(3, 4), irregular(5, 3)

    def losses(coefficients: Tensor) -> Tensor:
        hidden = model(x).tanh()
        return (hidden + coefficients.unsqueeze(1) * hidden.flip(0)).square().sum(1)

    assert_series(model, losses, [torch.tensor([0.0, 0, 1, 0, 0]), torch.ones(5)], "auto")


class Scale(nn.Module):
    """A product with a number, of the strides of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return x * self.scale


@both_modes
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_a_strided_view_may_be_of_other_strides(batch_dim: Mode) -> None:
    model, x = Scale(), irregular(B, B)

    def losses(batch: Tensor) -> Tensor:
        return model(batch).as_strided((B, B), (B, 1)).square().sum(1)

    assert_series(model, losses, [x, x.T.contiguous().T], batch_dim)


@both_modes
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_a_product_with_zeros_may_come_alive_beside_another_use(batch_dim: Mode) -> None:
    model, x = nn.Linear(3, B), irregular(B, 3)

    def losses(coefficients: Tensor) -> Tensor:
        hidden = model(x).tanh()
        return hidden.square().sum(1) + (coefficients @ hidden).sum(0)

    steps = [torch.zeros(B, B), irregular(B, B)]
    if batch_dim == "auto":
        assert_series(model, losses, steps, batch_dim)
    else:
        engine = Engine(model, batch_dim=0, verify="never")
        assert_exact(engine, losses(steps[0]), model)
        with pytest.raises(MixedSamplesError):
            engine.compute_gramian(losses(steps[1]))


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_one_part_of_a_split_may_come_alive() -> None:
    model, x = nn.Linear(3, B), irregular(B, 3)

    def losses(coefficients: Tensor) -> Tensor:
        hidden = model(x).tanh()
        first, second = hidden.repeat(2, 1).split(B)
        return first.square().sum(1) + (coefficients @ second).sum(0)

    assert_series(model, losses, [torch.zeros(B, B), irregular(B, B)], "auto")


@both_modes
def test_chosen_entries_may_leave_the_diagonal(batch_dim: Mode) -> None:
    model, x = nn.Conv1d(1, B, 1), irregular(B, 1, 1)

    def losses(chosen: Tensor) -> Tensor:
        return model(x).tanh()[:, :, 0].T.gather(1, chosen.view(B, 1)).square().sum(1)

    assert_series(model, losses, [torch.arange(B), torch.arange(B).flip(0)], batch_dim)


@both_modes
def test_indexed_entries_may_leave_the_diagonal(batch_dim: Mode) -> None:
    model, x = nn.Conv1d(1, B, 1), irregular(B, 1, 1)

    def losses(chosen: Tensor) -> Tensor:
        return model(x).tanh()[:, :, 0].T[torch.arange(B), chosen].square()

    assert_series(model, losses, [torch.arange(B), torch.arange(B).flip(0)], batch_dim)


@both_modes
def test_samples_may_lie_along_another_dimension_at_other_sizes(batch_dim: Mode) -> None:
    model, x = nn.Linear(3, 1), irregular(12, 3)

    def losses(step: tuple[int, Tensor]) -> Tensor:
        rows, chosen = step
        picked = model(x).tanh().view(rows, -1).gather(1, chosen)
        return picked.view(4, 3).square().sum(1)

    in_order = torch.arange(12).view(1, 12)
    steps = [(4, torch.arange(3).expand(4, 3)), (1, in_order), (1, in_order.flip(1))]
    assert_series(model, losses, steps, batch_dim)


def test_samples_are_not_sought_again_once_all_branches_are_alive() -> None:
    first, last, x = nn.Linear(3, 4), nn.Linear(4, 4), irregular(B, 3)
    nn.init.zeros_(last.weight)
    model = nn.Sequential(first, last)
    engine = Engine(model, batch_dim=0, verify="never")
    counts = []
    for step in range(5):
        if step == 2:
            nn.init.eye_(last.weight)
        losses = features(model(x) + model[0](x), 2)
        with counted_passes(losses) as passes:
            engine.compute_gramian(losses)
        counts.append(len(passes))
    assert counts[-1] == 1


def test_samples_that_a_branch_moves_once_it_is_alive_cost_no_pass() -> None:
    model, x = nn.Linear(3, 4), irregular(B, 3)
    engine = Engine(model, batch_dim=0, verify="never")
    counts = []
    for coefficient in (0.0, 0.0, 0.5, 0.25, 0.125):
        losses = (model(x).tanh() + coefficient * model(x).flip(0)).square().sum(1)
        jacobian = reference_jacobian(losses, model.parameters())
        with counted_passes(losses) as passes:
            gramian = engine.compute_gramian(losses)
        assert_close_to_reference(gramian, jacobian @ jacobian.T)
        counts.append(len(passes))
    assert counts == [1] * 5


@pytest.mark.parametrize("objectives", [1, 2])
def test_numbers_that_scales_would_make_infinite_show_their_places(objectives: int) -> None:
    model = nn.Linear(3, 4).half()
    engine = Engine(model, batch_dim=0, verify="never")
    for samples in (B, B + 2, B + 34):
        output = model(irregular(samples, 3).half()).float()
        losses = 40 * features(output, objectives)
        jacobian = reference_jacobian(losses, list(model.parameters())).float()
        expected, gramian = jacobian @ jacobian.T, engine.compute_gramian(losses).float()
        assert (gramian - expected).abs().max() < 1e-2 * expected.abs().max()


def test_samples_without_a_loss_that_a_constant_exchanges() -> None:
    """Two samples count nothing at first, and a permutation exchanges just these."""
    layer = nn.Linear(3, 4)
    engine = Engine(layer, batch_dim=0, verify="never")
    order = torch.tensor([0, 2, 1, 3, 4, 5])
    for alive in (False, False, True, True):
        weights = torch.ones(6)
        weights[1:3] = float(alive)
        losses = layer(torch.randn(6, 3)).tanh()[order].square().sum(1) * weights
        assert_exact(engine, losses, layer)


@both_modes
@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
def test_a_row_of_all_elements_is_rolled(batch_dim: Mode) -> None:
    """The element that goes to the next sample counts nothing at first."""
    first, last, x = nn.Linear(3, 4), nn.Linear(4, 2), irregular(B, 3)

    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return self.last(self.first(x).tanh().roll(1) * weights)

    model = Rolled()
    engine = Engine(model, batch_dim=batch_dim, verify="never")
    for weight in (0.0, 0.0, 1.0, 1.0):
        weights = torch.tensor([weight, 1, 1, 1])
        losses = features(model(x, weights), 1).squeeze(1)
        assert_exact(engine, losses, model)
