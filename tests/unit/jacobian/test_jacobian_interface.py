"""What a person meets who calls a Jacobian: shapes, names, errors, memory."""

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from autogram import (
    ChangedTensorError,
    Engine,
    InvalidOperandError,
    Jacobian,
    NonFiniteError,
    UnsupportedError,
)
from autogram.testing import reference_jacobian
from tests.unit.alive import live_tensors
from tests.unit.checks import assert_close_to_reference, features
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.jacobians import assert_operator_is, flat
from tests.unit.networks import Call
from tests.unit.resources.test_memory import MODELS as VARIOUS


@pytest.fixture
def model() -> nn.Sequential:
    return mlp()


def make(model: nn.Module, *, shape: tuple[int, ...] = (4,)) -> tuple[Jacobian, Tensor]:
    """A Jacobian of losses of some shape, and the explicit rows."""
    engine = Engine(model)
    count = torch.Size(shape[1:]).numel()
    losses = features(model(batch(shape[0], 3)), count).view(shape)
    jacobian = engine.jacobian(losses)
    return jacobian, reference_jacobian(losses, model.parameters())


def test_properties(model: nn.Module) -> None:
    jacobian, expected = make(model)
    assert jacobian.shape == tuple(expected.shape)
    assert jacobian.dtype == expected.dtype
    assert jacobian.device == expected.device
    assert jacobian.names == [name for name, _ in model.named_parameters()]
    assert repr(jacobian) == (
        f"Jacobian(4 x 32, 4 parameters, dtype={expected.dtype}, device='{expected.device}')"
    )


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3)])
def test_weights_may_have_either_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    jacobian, expected = make(model, shape=shape)
    m = len(expected)
    weights = torch.randn(2, m)
    assert_close_to_reference(flat(jacobian.vjp(weights[0])), weights[0] @ expected)
    assert_close_to_reference(flat(jacobian.vjp(weights[0].view(shape))), weights[0] @ expected)
    assert_close_to_reference(flat(jacobian.vjp(weights), 2), weights @ expected)
    assert_close_to_reference(flat(jacobian.vjp(weights.view(2, *shape)), 2), weights @ expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_weights_of_another_dtype(dtype: torch.dtype) -> None:
    """Results have the dtype of the Jacobian, those of biases and of scales, too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).float()
    losses = per_sample(model(batch(4, 3).float()))
    jacobian = Engine(model).jacobian(losses)
    weights = torch.tensor([1, -2, 0, 3]).to(dtype)
    found = jacobian.vjp(weights)
    assert {x.dtype for x in found.values()} == {jacobian.dtype} == {torch.float32}
    expected = weights.float() @ reference_jacobian(losses, model.parameters())
    torch.testing.assert_close(flat(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (5,), (4, 1), (1, 3), (2, 2, 2)])
def test_weights_of_another_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match=r"A vector of shape .*pass \(4,\)"):
        jacobian.vjp(torch.ones(shape))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("vjp", r"A dict was given\. Pass one tensor"),
        ("accumulate_grad", r"it has `task`, .* Losses of several tasks take one tensor"),
        ("least_squares", r"A dict was given\. Pass one tensor"),
    ],
)
def test_weights_in_another_form(model: nn.Module, method: str, message: str) -> None:
    """A Jacobian does not know what form the losses had."""
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match=message):
        getattr(jacobian, method)({"task": torch.ones(4)})


@pytest.mark.parametrize("method", ["vjp", "accumulate_grad", "least_squares"])
@pytest.mark.parametrize("form", [lambda w: w * 1j, Tensor.to_sparse], ids=["complex", "sparse"])
def test_weights_of_other_numbers(model: nn.Module, method: str, form) -> None:
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match=r"A vector of dtype .*real numbers in a dense"):
        getattr(jacobian, method)(form(torch.ones(4)))
    assert all(p.grad is None for p in model.parameters())


def test_gradients_take_one_vector(model: nn.Module) -> None:
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match="Stacks of vectors are for `vjp`"):
        jacobian.accumulate_grad(torch.ones(2, 4))


def test_direction_as_a_list_and_in_part(model: nn.Module) -> None:
    jacobian, expected = make(model)
    direction = [torch.randn_like(p) for p in model.parameters()]
    v = torch.cat([x.flatten() for x in direction])
    assert_close_to_reference(jacobian.jvp(direction), expected @ v)
    part = {"2.weight": direction[2]}
    v[:20] = v[30:] = 0
    assert_close_to_reference(jacobian.jvp(part), expected @ v)


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        ([torch.ones(5, 3)], "The direction has 1 tensors, and the Jacobian is of 4"),
        ({"3.weight": torch.ones(5, 3)}, "`3.weight` is not a parameter of the"),
        ({"0.weight": torch.ones(3, 5)}, r"`0.weight` has shape \(3, 5\), and the"),
        ({"0.weight": torch.ones(5, 3) * 1j}, "`0.weight` has dtype .*Pass real numbers"),
        ({"0.weight": 1.0}, r"`0.weight` is a float.*Pass a tensor"),
        (torch.ones(4), "The direction is a Tensor. Pass a dict of tensors by name"),
        (None, "The direction is a NoneType. Pass a dict of tensors by name"),
    ],
)
def test_direction_that_does_not_fit(model: nn.Module, direction, message: str) -> None:
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match=message):
        jacobian.jvp(direction)


@pytest.mark.parametrize("index", [2, -1, slice(1, 3), [3, 0, 3], torch.tensor([1, 2]), []])
def test_rows_of_some_objectives(model: nn.Module, index) -> None:
    jacobian, expected = make(model, shape=(3, 2))
    chosen = torch.arange(6)[index].flatten()
    rows = jacobian.rows(index)
    assert [tuple(x.shape) for x in rows.values()] == [
        (len(chosen), *p.shape) for p in model.parameters()
    ]
    if len(chosen):
        assert_close_to_reference(flat(rows, len(chosen)), expected[chosen])


def test_rows_of_one_parameter(model: nn.Module) -> None:
    jacobian, expected = make(model)
    rows = jacobian.rows(slice(None), ["2.bias"])
    assert list(rows) == ["2.bias"]
    assert_close_to_reference(rows["2.bias"], expected[:, -2:])
    assert jacobian.rows(0, (name for name in ["2.bias"])).keys() == rows.keys()
    with pytest.raises(InvalidOperandError, match="`bias` is not a parameter"):
        jacobian.rows(slice(None), ["bias"])


def test_row_that_does_not_exist(model: nn.Module) -> None:
    jacobian, _ = make(model)
    with pytest.raises(IndexError):
        jacobian.rows(4)


def test_block_gramians_by_layer(model: nn.Module) -> None:
    jacobian, expected = make(model)
    blocks = jacobian.block_gramians(by=lambda name: name.split(".")[0])
    assert list(blocks) == ["0", "2"]
    assert_close_to_reference(blocks["0"], expected[:, :20] @ expected[:, :20].T)
    assert_close_to_reference(blocks["2"], expected[:, 20:] @ expected[:, 20:].T)


@pytest.mark.parametrize("by", [["0.weight"], "0.weight", {"a": ["0.weight"]}], ids=str)
def test_names_are_no_groups(model: nn.Module, by) -> None:
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match=r"not an optimizer's groups.*a function"):
        jacobian.block_gramians(by)


def test_an_optimizer_is_no_group(model: nn.Module) -> None:
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match=r"a `SGD`\. Pass `optimizer\.param_groups`"):
        jacobian.block_gramians(torch.optim.SGD(model.parameters(), lr=1.0))


def test_groups_of_one_name(model: nn.Module) -> None:
    """The second one would have its number for a name."""
    jacobian, _ = make(model)
    first, *others = model.parameters()
    groups = [{"params": [first], "name": "1"}, {"params": others}]
    with pytest.raises(InvalidOperandError, match=r"are called `1`.*a different name"):
        jacobian.block_gramians(torch.optim.SGD(groups, lr=1.0).param_groups)


def test_weights_by_group_of_an_optimizer(model: nn.Module) -> None:
    """What is in no group of the optimizer stays as it is."""
    jacobian, expected = make(model)
    groups = [{"params": [model[0].weight], "name": "first"}, {"params": [model[2].bias]}]
    by = torch.optim.SGD(groups, lr=1.0).param_groups
    norms = jacobian.row_norms(by)
    assert list(norms) == ["first", "1"]
    jacobian.accumulate_grad({"1": torch.ones(4), "first": 1 / norms["first"]}, by)
    rows = expected[:, :15]
    unit = (rows / rows.norm(dim=1, keepdim=True)).sum(0)
    assert_close_to_reference(model[0].weight.grad.flatten(), unit)
    assert_close_to_reference(model[2].bias.grad, expected[:, 30:].sum(0))
    assert model[0].bias.grad is None
    assert model[2].weight.grad is None


def test_weights_by_parameter(model: nn.Module) -> None:
    """Without a grouping, each parameter is a group."""
    jacobian, expected = make(model)
    weights = {name: torch.full((4,), float(i)) for i, name in enumerate(jacobian.names)}
    jacobian.accumulate_grad(weights)
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    factors = torch.tensor([0.0, 1, 2, 3]).repeat_interleave(torch.tensor([15, 5, 10, 2]))
    assert_close_to_reference(found, factors * expected.sum(0))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"0": torch.ones(4)},
            r"The dict of weights does not fit .*: it lacks `2`\. Pass an entry",
        ),
        (dict.fromkeys(["0", "2", "1", "3"], torch.ones(4)), r"groups .*: it has `1`, `3`\. "),
        ({"0": torch.ones(4), "x": torch.ones(4)}, r"it has `x`, and it lacks `2`\..*`by`"),
        ({"0": torch.ones(4), "2": torch.ones(3)}, r"A vector of shape \(3,\) was given"),
        ({"0": torch.ones(4), "2": 1.0}, r"A float was given"),
        (torch.ones(4), r"one tensor of weights\. Pass a dict .*, or leave out `by`"),
    ],
    ids=["lacks", "has", "both", "shape", "number", "tensor"],
)
def test_weights_that_do_not_fit_the_groups(model: nn.Module, weights, message: str) -> None:
    jacobian, _ = make(model)
    with pytest.raises(InvalidOperandError, match=message):
        jacobian.accumulate_grad(weights, lambda name: name.split(".")[0])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_by_group_that_are_not_finite(model: nn.Module) -> None:
    jacobian, _ = make(model)
    weights = {name: torch.ones(4) for name in jacobian.names}
    weights["2.bias"] = torch.tensor([1.0, torch.inf, 1.0, torch.nan])
    with pytest.raises(NonFiniteError, match=r"weights that are infinite .* the objectives 1, 3"):
        jacobian.accumulate_grad(weights)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies(model: nn.Module, copied) -> None:
    """Its parameters would be others."""
    jacobian, _ = make(model)
    with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled.*Keep the results"):
        copied(jacobian)


def test_no_parameter_in_common(model: nn.Module) -> None:
    jacobian, _ = make(model)
    other, _ = make(mlp())
    with pytest.raises(InvalidOperandError, match="no parameter in common"):
        jacobian.cross_gramian(other)


def test_no_jacobian(model: nn.Module) -> None:
    jacobian, _ = make(model)
    for other in (torch.ones(4), Engine(model).sketch(per_sample(model(batch(4, 3))), 8)):
        with pytest.raises(InvalidOperandError, match=r"where a Jacobian is.*`engine\.jacobian`"):
            jacobian.cross_gramian(other)  # type: ignore[arg-type]


def test_no_objectives(model: nn.Module) -> None:
    engine = Engine(model)
    jacobian = engine.jacobian(per_sample(model(batch(0, 3))))
    assert jacobian.shape == (0, 32)
    assert jacobian.gramian().shape == (0, 0)
    assert jacobian.row_norms().shape == (0,)
    assert jacobian.dense().shape == (0, 32)
    assert [x.shape for x in jacobian.vjp(torch.ones(0)).values()] == [
        p.shape for p in model.parameters()
    ]
    jacobian.accumulate_grad(torch.ones(0))
    assert all(p.grad is None for p in model.parameters())


def test_results_are_their_owners(model: nn.Module) -> None:
    """Changing what a method returned changes no later result."""
    jacobian, expected = make(model)
    for _ in range(2):
        dense, rows, gradients = jacobian.dense(), jacobian.rows(1), jacobian.vjp(torch.ones(4))
        assert_close_to_reference(dense, expected)
        assert_close_to_reference(flat(rows), expected[1])
        assert_close_to_reference(flat(gradients), expected.sum(0))
        for tensor in (dense, *rows.values(), *gradients.values()):
            tensor.zero_()


def test_weights_that_require_a_gradient(model: nn.Module) -> None:
    jacobian, _ = make(model)
    weights = torch.ones(4, requires_grad=True)
    jacobian.accumulate_grad(weights)
    assert not any(x.requires_grad for x in jacobian.vjp(weights).values())
    assert not any(p.grad.requires_grad for p in model.parameters())


def test_hooks_on_parameters_run(model: nn.Module) -> None:
    jacobian, expected = make(model)
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    seen = []
    model[2].bias.register_post_accumulate_grad_hook(seen.append)
    jacobian.accumulate_grad(torch.ones(4))
    total = expected.sum(0)
    assert_close_to_reference(model[0].weight.grad.flatten(), 2 * total[:15])
    assert_close_to_reference(model[2].bias.grad, total[-2:])
    assert seen == [model[2].bias]


def test_gradient_in_the_dtype_of_the_parameter() -> None:
    model = mlp().bfloat16()
    engine = Engine(model)
    jacobian = engine.jacobian(per_sample(model(batch(4, 3).bfloat16())))
    assert jacobian.dtype == jacobian.gramian().dtype == torch.float32
    jacobian.accumulate_grad(torch.ones(4))
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert all(x.dtype == torch.float32 for x in jacobian.vjp(torch.ones(4)).values())


def test_functional_call_with_two_sets_of_parameters(model: nn.Module) -> None:
    """Names that belong to two tensors are told apart."""
    engine = Engine(model)
    other = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    x = batch(4, 3)
    losses = per_sample(model(x) * functional_call(model, other, x))
    jacobian = engine.jacobian(losses)
    both = [*model.parameters(), *other.values()]
    expected = reference_jacobian(losses, both)
    assert len(set(jacobian.names)) == len(jacobian.names) == 8
    assert_close_to_reference(jacobian.gramian(), expected @ expected.T)
    assert jacobian.shape == (4, 64)


@pytest.mark.parametrize("changed", ["parameter", "activation"])
def test_tensors_that_were_changed(changed: str) -> None:
    """A factor may be a parameter itself, or an activation that the user can reach."""
    model = Call(lambda x, w: torch.einsum("bi,ij,jk->bk", x, w, w), (3, 3))
    (weight,) = model.parameters()
    engine = Engine(model)
    x = batch(4, 3)
    jacobian = engine.jacobian(per_sample(model(x)), keep="factors")
    jacobian.gramian()
    with torch.no_grad():
        (weight if changed == "parameter" else x).mul_(2)
    with pytest.raises(ChangedTensorError, match="was changed in place since"):
        jacobian.gramian()


METHODS: dict[str, Callable[[Jacobian], object]] = {
    "gramian": lambda jacobian: jacobian.gramian(),
    "block_gramians": lambda jacobian: jacobian.block_gramians(),
    "row_norms": lambda jacobian: jacobian.row_norms(),
    "row_norms by group": lambda jacobian: jacobian.row_norms(lambda _: "all"),
    "vjp": lambda jacobian: jacobian.vjp(torch.ones(4)),
    "accumulate_grad": lambda jacobian: jacobian.accumulate_grad(torch.ones(4)),
    "accumulate_grad by group": lambda jacobian: jacobian.accumulate_grad(
        {name: torch.ones(4) for name in jacobian.names}
    ),
    "jvp": lambda jacobian: jacobian.jvp({"2.weight": torch.ones(2, 5)}),
    "least_squares": lambda jacobian: jacobian.least_squares(torch.ones(4)),
    "cross_gramian": lambda jacobian: jacobian.cross_gramian(jacobian),
    "rows": lambda jacobian: jacobian.rows(0),
    "dense": lambda jacobian: jacobian.dense(),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_check_the_factors_that_they_read(method: str) -> None:
    model = mlp()
    hidden: list[Tensor] = []
    model[2].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    engine = Engine(model)
    jacobian = engine.jacobian(per_sample(model(batch(4, 3))), keep="factors")
    expected = jacobian.rows(0, ["0.weight"])
    with torch.no_grad():
        hidden[0].mul_(2)
    with pytest.raises(ChangedTensorError, match="was changed in place since"):
        METHODS[method](jacobian)
    assert_close_to_reference(jacobian.rows(0, ["0.weight"])["0.weight"], expected["0.weight"])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.cpu
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("name", VARIOUS)
def test_memory_is_freed_with_the_jacobian(name: str) -> None:
    make_model, shape = VARIOUS[name]
    model = make_model()
    engine = Engine(model)

    def step() -> None:
        losses = per_sample(model(batch(*shape)))
        jacobian = engine.jacobian(losses)
        dead = weakref.ref(losses)
        del losses
        assert dead() is None, "the Jacobian keeps the graph"
        jacobian.vjp(jacobian.row_norms())
        jacobian.cross_gramian(jacobian)

    step()  # caches of first times
    before = live_tensors()
    step()
    assert live_tensors() == before


def test_inference_mode(model: nn.Module) -> None:
    jacobian, expected = make(model)
    with torch.inference_mode():
        assert_operator_is(jacobian, expected)
