"""The Jacobian written like a matrix: against the explicit matrix, and what does not fit."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autogram import Engine, InvalidOperandError, Jacobian, concatenate
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, features, irregular
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.jacobians import assert_accumulates, assert_is_matrix, assert_operator_is


def make(model: nn.Module, shape: tuple[int, ...] = (4,)) -> tuple[Jacobian, Tensor]:
    """A Jacobian of losses of some shape, and the explicit matrix."""
    count = torch.Size(shape[1:]).numel()
    losses = features(model(batch(shape[0], 3)), count).view(shape)
    return Engine(model).jacobian(losses), reference_jacobian(losses, model.parameters())


@pytest.mark.parametrize("columns", [1, 3, 4])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (1, 4), (4, 1)], ids=str)
def test_products_with_matrices(shape: tuple[int, ...], columns: int) -> None:
    """Also where a matrix has the shape of the losses."""
    jacobian, expected = make(mlp(), shape)
    m, n = expected.shape
    v, w = irregular(n, columns), irregular(m, columns)
    assert_close_to_reference(jacobian @ v, expected @ v)
    assert_close_to_reference(jacobian.T @ w, expected.T @ w)


@pytest.mark.parametrize(("m", "columns"), [(4, 0), (0, 0), (0, 1), (0, 2)])
def test_products_of_nothing(m: int, columns: int) -> None:
    model = mlp()
    jacobian = Engine(model).jacobian(per_sample(model(batch(m, 3))))
    assert torch.equal(jacobian @ torch.ones(32, columns), torch.zeros(m, columns))
    assert torch.equal(jacobian.T @ torch.ones(m, columns), torch.zeros(32, columns))


def test_products_from_the_left() -> None:
    jacobian, expected = make(mlp(), (4, 3))
    m, n = expected.shape
    v, w = irregular(2, n), irregular(2, m)
    assert_close_to_reference(w @ jacobian, w @ expected)
    assert_close_to_reference(w[0] @ jacobian, w[0] @ expected)
    assert_close_to_reference(v @ jacobian.T, v @ expected.T)
    assert_close_to_reference(v[0] @ jacobian.T, v[0] @ expected.T)


def test_product_of_two_jacobians() -> None:
    model = mlp()
    (first, rows), (second, others) = make(model), make(model, (2, 3))
    assert_close_to_reference(first @ second.T, rows @ others.T)


def test_transposed() -> None:
    jacobian, expected = make(mlp())
    transposed = jacobian.T
    assert transposed.shape == tuple(expected.T.shape)
    assert (transposed.dtype, transposed.device) == (jacobian.dtype, jacobian.device)
    assert transposed.T is jacobian
    assert repr(transposed) == f"{jacobian!r}.T"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_operands_of_another_dtype(dtype: torch.dtype) -> None:
    jacobian, expected = make(mlp())
    v = torch.arange(expected.shape[1]).to(dtype)
    assert_close_to_reference(jacobian @ v, expected @ v.to(expected))
    w = torch.tensor([1, -2, 0, 3]).to(dtype)
    assert_close_to_reference(jacobian.T @ w, expected.T @ w.to(expected))


@pytest.mark.parametrize(
    "index", [0, -1, np.int64(2), torch.tensor(1), slice(1, None, 2), [3, 0, 3], ..., []], ids=str
)
def test_rows_by_index(index) -> None:
    jacobian, expected = make(mlp(), (2, 3))
    found = jacobian[index]
    assert found.shape == expected[index].shape
    if found.numel():
        assert_close_to_reference(found, expected[index])


def test_rows_by_mask() -> None:
    jacobian, expected = make(mlp())
    mask = torch.tensor([True, False, True, True])
    assert_close_to_reference(jacobian[mask], expected[mask])


def test_iteration_is_over_rows() -> None:
    jacobian, expected = make(mlp())
    assert_close_to_reference(torch.stack(list(jacobian)), expected)


@pytest.mark.parametrize("index", [4, -5, [0, 4]], ids=str)
def test_rows_that_do_not_exist(index) -> None:
    jacobian, _ = make(mlp())
    with pytest.raises(IndexError):
        jacobian[index]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((slice(1), slice(2)), r"not choose rows only.*`jacobian\[i\]\[j\]`"),
        (([0, 1],), r"The index \(\[0, 1\],\) does not choose rows only"),
        (None, r"The index None does not choose rows only"),
        (torch.zeros(2, 2, dtype=torch.int64), "does not choose rows only"),
        (True, "`objectives` is True. Pass the number of an objective"),
    ],
    ids=str,
)
def test_no_index_of_rows(index, message: str) -> None:
    jacobian, _ = make(mlp())
    with pytest.raises(InvalidOperandError, match=message):
        jacobian[index]


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (
            torch.ones(31),
            r"is 4 x 32.*, but a tensor of shape .*\(31,\) .*`\(32, c\)`",
        ),
        (torch.ones(4, 32), r"4 x 32.*of shape \(4, 32\) .*right.*`\(32,\)` or .*`\(32, c\)`"),
        (torch.ones(2, 32, 1), r"of shape \(2, 32, 1\)"),
        (torch.tensor(1.0), r"of shape \(\)"),
        (torch.ones(32) * 1j, "of dtype torch.complex.*Pass real numbers"),
        (torch.ones(32, device="meta"), "which has no values"),
        ({"0.weight": torch.ones(5, 3)}, "is a dict.*flat tensor.*`jvp` and `vjp`"),
        ([1.0] * 32, "is a list.*flat tensor"),
        (np.ones(32), r"is a ndarray.*flat tensor"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_operands_that_do_not_fit(operand, message: str) -> None:
    jacobian, _ = make(mlp())
    with pytest.raises(InvalidOperandError, match=message):
        jacobian @ operand


def test_sparse_operand() -> None:
    jacobian, _ = make(mlp())
    with pytest.raises(InvalidOperandError, match="Pass real numbers in a dense tensor"):
        jacobian @ torch.ones(32).to_sparse()


def test_other_sizes_that_do_not_fit() -> None:
    """Each of the four products says which side and which size."""
    jacobian, _ = make(mlp())
    with pytest.raises(InvalidOperandError, match=r"32 x 4.*\(32,\).*right.*`\(4,\)`.*`\(4, c\)`"):
        jacobian.T @ torch.ones(32)
    with pytest.raises(InvalidOperandError, match=r"4 x 32.*\(32,\).*left.*`\(4,\)`.*`\(c, 4\)`"):
        torch.ones(32) @ jacobian
    with pytest.raises(
        InvalidOperandError, match=r"32 x 4.*\(2, 4\).*left.*`\(32,\)`.*`\(c, 32\)`"
    ):
        torch.ones(2, 4) @ jacobian.T
    with pytest.raises(InvalidOperandError, match=r"is a ndarray.*flat tensor"):
        np.ones(4) @ jacobian


def test_matrix_of_all_pairs_of_parameters() -> None:
    jacobian, _ = make(mlp())
    with pytest.raises(InvalidOperandError, match=r"32 x 32.*not formed.*as `J.T @ \(J @ v\)`"):
        jacobian.T @ jacobian
    with pytest.raises(InvalidOperandError, match=r"Both operands.*Write `jacobian @ other.T`"):
        jacobian @ jacobian


def test_complex_numbers_are_pairs() -> None:
    model = nn.Linear(3, 2, dtype=torch.complex128)
    losses = model(batch(4, 3).to(torch.complex128)).abs().square().sum(1)
    jacobian = Engine(model).jacobian(losses)
    assert_is_matrix(jacobian, reference_jacobian(losses, model.parameters()))


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]


class Rounded(nn.Module):
    """Numbers of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return (4 + x).round().long().clamp(0, 8)


def moved(model: nn.Module, x: Tensor) -> tuple[Jacobian, Tensor]:
    """A Jacobian on the CPU, wherever the model is, and the explicit matrix."""
    losses = per_sample(model(x))
    rows = reference_jacobian(losses, model.parameters()).cpu()
    return Engine(model).jacobian(losses).to("cpu"), rows


MODELS = {
    "linear": (mlp, (4, 3)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3)),
        (3, 2, 9, 9),
    ),
    "positions": (
        lambda: nn.Sequential(nn.LSTM(4, 3, batch_first=True), First(), nn.LayerNorm(3)),
        (3, 5, 4),
    ),
    "table": (lambda: nn.Sequential(Rounded(), nn.Embedding(9, 4), nn.Linear(4, 2)), (4, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_another_device(name: str) -> None:
    """The factors move; on the device of the tests, gradients are added up as before."""
    make_model, shape = MODELS[name]
    model, x = make_model(), batch(*shape)
    jacobian, expected = moved(model, x)
    assert jacobian.device == torch.device("cpu")
    with torch.device("cpu"):
        assert_operator_is(jacobian, expected)
    assert all(x.device.type == "cpu" for x in jacobian.vjp(torch.ones(len(expected))).values())
    assert_accumulates(jacobian, model, *twin_of(model, x))
    there = jacobian.to(x.device)
    assert there.device == x.device
    assert_close_to_reference(there.gramian().cpu(), expected @ expected.T)


def twin_of(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """A copy of a model, and its losses."""
    twin = copy.deepcopy(model)
    return twin, per_sample(twin(x))


def test_same_device_is_the_same_jacobian() -> None:
    jacobian, _ = make(mlp())
    assert jacobian.to(jacobian.device) is jacobian


def test_device_without_values() -> None:
    jacobian, _ = make(mlp())
    with pytest.raises(InvalidOperandError, match=r"`meta`.*no values.*Pass a real device"):
        jacobian.to("meta")


def test_several_parts_move_together() -> None:
    model = mlp()
    (first, rows), (second, others) = moved(model, batch(4, 3)), moved(model, batch(2, 3))
    with torch.device("cpu"):
        assert_is_matrix(concatenate([first, second]), torch.cat([rows, others]))
        assert_close_to_reference(first @ second.T, rows @ others.T)


@pytest.mark.skipif(torch.get_default_device().type == "cpu", reason="needs two devices")
def test_jacobians_on_two_devices() -> None:
    model = mlp()
    here = Engine(model).jacobian(per_sample(model(batch(4, 3))))
    with pytest.raises(
        InvalidOperandError, match=r"on different devices.*`first\.cross_gramian\(second\.to"
    ):
        here.cross_gramian(here.to("cpu"))
