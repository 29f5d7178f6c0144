"""Rules by node, in cases of their own: sizes of one, options, nodes of other devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import RuleError, UnsupportedError
from autogram.rules._nodes import (
    joint_recipe,
    node_recipe,
    of_nodes,
    read_fields,
    registered_operations,
)
from tests.unit._blocks.rows import layouts_of, rows_of
from tests.unit.rules._nodes.comparing import (
    HAS_MKLDNN,
    compared,
    inputs_of,
    nodes_behind,
    operation_of,
)


def parameter(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def positive(*shape: int) -> Tensor:
    return torch.rand(shape).add(0.5).requires_grad_()


def uses_of(output: Tensor, *parameters: Tensor) -> list[tuple[Any, int]]:
    """The inputs of nodes at which parameters are, without views of them."""
    return [
        (node, position)
        for node in nodes_behind(output)
        for position, (following, _) in enumerate(node.next_functions)
        if any(getattr(following, "variable", None) is x for x in parameters)
    ]


def assert_compared(output: Tensor, *parameters: Tensor) -> None:
    """Assert that each use of the parameters has a recipe, and the rows of its node."""
    uses = uses_of(output, *parameters)
    assert len(uses) == len(parameters)
    for node, position in uses:
        assert compared(node, position) > 0, (node.name(), position)


# Functions of a parameter and a constant, by the sizes of both.
BROADCAST = {
    "add": lambda p, x: torch.add(x, p, alpha=2.5),
    "sub": lambda p, x: torch.sub(x, p, alpha=2.5),
    "rsub": lambda p, x: torch.rsub(p, x, alpha=2.5),
    "mul": lambda p, x: p * x,
    "numerator": lambda p, x: p / x,
    "denominator": lambda p, x: x / p,
    "base": lambda p, x: p**x,
    "exponent": lambda p, x: x**p,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "lerp": lambda p, x: torch.lerp(p, x, 0.3),
    "end": lambda p, x: torch.lerp(x, p, 0.3),
    "weight": lambda p, x: torch.lerp(x, x + 1, p),
    "addcmul": lambda p, x: torch.addcmul(x, p, x, value=2.0),
    "addcdiv": lambda p, x: torch.addcdiv(x, x, p, value=2.0),
    "where": lambda p, x: torch.where(x > 1, p, x),
    "masked_fill": lambda p, x: p.expand_as(p * x).masked_fill(x > 1, 0.0),
    "expand": lambda p, x: p.expand(torch.broadcast_shapes(p.shape, x.shape)),
}
SIZES = {
    "number": ((), (3, 4)),
    "size one": ((1,), (3, 4)),
    "both of size one": ((1, 1), (3, 1)),
    "last": ((4,), (2, 3, 4)),
    "middle": ((3, 1), (2, 3, 4)),
    "in turn": ((3, 1, 4), (3, 5, 1)),
    "constant is smaller": ((3, 4), (4,)),
    "constant is a number": ((3, 4), ()),
    "equal": ((3, 4), (3, 4)),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", BROADCAST)
def test_broadcast_parameters(name: str, sizes: str) -> None:
    own, other = SIZES[sizes]
    p, x = positive(*own), positive(*other).detach()
    output = BROADCAST[name](p, x)
    for node, position in uses_of(output, p):
        assert compared(node, position) > 0


def test_values_that_are_masked_out_may_be_infinite() -> None:
    p, mask = parameter(3), torch.tensor([[True, False, True], [True, True, False]])
    node = torch.where(mask, p, 0.0).grad_fn
    recipe = node_recipe("Where", node, 0)
    assert recipe is not None
    cotangent = torch.where(mask, 2.0, torch.inf).unsqueeze(0)
    (block,) = recipe.formula.blocks(None, cotangent, mask)
    torch.testing.assert_close(rows_of(block, (3,)), torch.tensor([[[4.0, 2.0, 2.0]]]))


def conv(dims: int, *shape: int, transposed: bool = False, **options: Any) -> tuple[Tensor, ...]:
    """The result of a convolution of two images, with its kernel and its bias."""
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    groups = options.get("groups", 1)
    channels = shape[0] if transposed else shape[1] * groups
    weight = parameter(*shape)
    bias = parameter(shape[1] * groups if transposed else shape[0])
    x = torch.randn(2, channels, *(9, 8, 7)[:dims])
    return getattr(F, name)(x, weight, bias, **options), weight, bias


CONVOLUTIONS = {
    "1d": partial(conv, 1, 4, 3, 3),
    "2d strided": partial(conv, 2, 4, 3, 3, 2, stride=(2, 1), padding=(1, 0)),
    "2d, one stride": partial(conv, 2, 4, 3, 3, 2, stride=[2], padding=[1], dilation=[1]),
    "2d dilated": partial(conv, 2, 4, 3, 3, 2, dilation=2),
    "2d grouped": partial(conv, 2, 4, 3, 3, 2, groups=2),
    "depthwise": partial(conv, 2, 4, 1, 3, 3, groups=4, padding=1),
    "one channel": partial(conv, 2, 1, 1, 1, 1),
    "3d": partial(conv, 3, 2, 2, 3, 2, 2),
    "transposed": partial(conv, 2, 3, 4, 3, 2, transposed=True),
    "transposed, strided": partial(
        conv, 2, 3, 4, 3, 2, transposed=True, stride=2, padding=1, output_padding=1
    ),
    "transposed, dilated": partial(
        conv, 2, 3, 4, 3, 2, transposed=True, stride=2, dilation=3, output_padding=2
    ),
    "transposed, grouped": partial(conv, 1, 4, 3, 3, transposed=True, groups=2),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    assert_compared(*CONVOLUTIONS[name]())


def test_convolution_of_an_image_without_a_batch() -> None:
    weight, bias = parameter(4, 3, 2, 2), parameter(4)
    assert_compared(F.conv2d(torch.randn(3, 5, 5), weight, bias, padding=1), weight, bias)


INDICES = torch.tensor([[1, 0, 3], [1, 1, 2]])
OF_TABLES = "embedding", "embedding of one", "padding", "negative padding", "sparse"
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda p: F.embedding(INDICES, p),
    "embedding of one": lambda p: F.embedding(torch.tensor(2), p),
    "padding": lambda p: F.embedding(INDICES, p, padding_idx=1),
    "negative padding": lambda p: F.embedding(INDICES, p, padding_idx=-3),
    "sparse": lambda p: F.embedding(INDICES, p, sparse=True),
    "index": lambda p: p[INDICES],
    "negative index": lambda p: p[torch.tensor([-1, 0, -4])],
    "index and slice": lambda p: p[INDICES[0], ...],
    "mask": lambda p: p[torch.tensor([True, False, True, True])],
    "int32": lambda p: torch.ops.aten.index(p, [INDICES.int()]),
    "index_select": lambda p: p.index_select(0, INDICES[1]),
    "index_select of one": lambda p: p.index_select(0, torch.tensor(2)),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, shape) for name in READS for shape in ((4, 3), (4, 1))),
        *((name, shape) for name in READS if name not in OF_TABLES for shape in ((4,), (4, 2, 3))),
    ],
    ids=str,
)
def test_reads_of_rows(name: str, shape: tuple[int, ...]) -> None:
    p = parameter(*shape)
    assert_compared(READS[name](p), p)


def test_gathered_elements_of_a_vector() -> None:
    p = parameter(5)
    assert_compared(p.gather(0, torch.tensor([0, 3, 3])), p)


FLAT = INDICES.flatten()
OFFSETS = torch.tensor([0, 2, 2, 3])
WEIGHTS = torch.tensor([0.5, 2.0, -1.0, 0.25, 3.0, 1.0], dtype=torch.float64)
BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "padding": {"mode": "mean", "padding_idx": 1},
    "negative padding": {"mode": "sum", "padding_idx": -3},
    "weights": {"mode": "sum", "per_sample_weights": WEIGHTS},
}


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("kind", ["matrix", "offsets", "with the last offset"])
def test_bags_of_rows(name: str, kind: str) -> None:
    p, options = parameter(4, 3), dict(BAGS[name])
    if kind == "matrix":
        if "per_sample_weights" in options:
            options["per_sample_weights"] = WEIGHTS.view(2, 3)
        assert_compared(F.embedding_bag(INDICES, p, **options), p)
    elif kind == "offsets":
        assert_compared(F.embedding_bag(FLAT, p, OFFSETS, **options), p)
    else:
        ends = torch.tensor([*OFFSETS.tolist(), len(FLAT)])
        assert_compared(F.embedding_bag(FLAT, p, ends, include_last_offset=True, **options), p)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(5), (3, 4, 5)),
    "layer of two dimensions": (lambda: nn.LayerNorm((4, 5)), (3, 4, 5)),
    "layer of one": (lambda: nn.LayerNorm(1), (3, 4, 1)),
    "batch": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "batch of images": (lambda: nn.BatchNorm2d(4), (3, 4, 2, 5)),
    "running": (lambda: nn.BatchNorm2d(4).eval(), (3, 4, 2, 5)),
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 2, 5)),
    "group of one": (lambda: nn.GroupNorm(1, 1), (3, 1, 2)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (3, 4, 2, 5)),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalisations(name: str) -> None:
    make, shape = NORMS[name]
    module = make()
    for weights in module.parameters():
        nn.init.normal_(weights)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    assert_compared(module(torch.randn(shape)), *module.parameters())


@pytest.mark.parametrize("times", [(3, 1), (2, 3, 1), (1, 2), (2, 2)], ids=str)
def test_repeated_tensors(times: tuple[int, ...]) -> None:
    for shape in ((2, 3), (1, 4), (1, 1)):
        p = parameter(*shape)
        assert_compared(p.repeat(*times), p)


def test_what_a_tensor_is_changed_to() -> None:
    p, x = parameter(3), torch.zeros(2, 3).requires_grad_().clone()
    x.copy_(p)
    assert_compared(x, p)
    assert compared(x.grad_fn, 1) > 0


def invertible(*shape: int) -> Tensor:
    """Stacked matrices far from singular ones."""
    return torch.randn(shape).mul(0.1).add(torch.eye(shape[-1])).requires_grad_()


SYSTEMS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "matrix": lambda: ((a := invertible(3, 3)), torch.linalg.solve(a, torch.randn(3, 4))),
    "stacked": lambda: ((a := invertible(3, 3)), torch.linalg.solve(a, torch.randn(2, 3, 4))),
    "size one": lambda: ((a := invertible(1, 3, 3)), torch.linalg.solve(a, torch.randn(2, 3, 4))),
    "from the right": lambda: (
        (a := invertible(3, 3)),
        torch.linalg.solve(a, torch.randn(2, 4, 3), left=False),
    ),
    "triangular": lambda: (
        (a := invertible(3, 3)),
        torch.linalg.solve_triangular(a, torch.randn(2, 3, 4), upper=True),
    ),
    "with ones on the diagonal": lambda: (
        (a := invertible(3, 3)),
        torch.linalg.solve_triangular(
            a, torch.randn(4, 3), upper=False, left=False, unitriangular=True
        ),
    ),
    "distances to points": lambda: ((p := parameter(5, 2)), torch.cdist(torch.randn(3, 2), p)),
    "distances from points": lambda: ((p := parameter(5, 2)), torch.cdist(p, torch.randn(3, 2))),
    "distances of zero": lambda: ((p := parameter(5, 2)), torch.cdist(p.detach()[:3], p)),
    "stacked distances": lambda: (
        (p := parameter(1, 5, 2)),
        torch.cdist(torch.randn(3, 4, 2), p),
    ),
    "distances from many points": lambda: (
        (p := parameter(3, 2)),
        torch.cdist(torch.randn(30, 2), p),
    ),
    "image": lambda: (
        (p := parameter(1, 2, 3, 3)),
        F.grid_sample(p, torch.rand(1, 4, 2, 2), align_corners=True),
    ),
    "images": lambda: (
        (p := parameter(2, 1, 3, 3)),
        F.grid_sample(p, torch.rand(2, 3, 1, 2), "bicubic", "border", align_corners=False),
    ),
    "image in space": lambda: (
        (p := parameter(1, 2, 3, 2, 2)),
        F.grid_sample(p, torch.rand(1, 4, 1, 1, 3), align_corners=False),
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_solutions_distances_and_images(name: str) -> None:
    p, output = SYSTEMS[name]()
    assert_compared(output, p)


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "another operation": lambda p: p.cumsum(0),
    "input of a normalisation": lambda p: F.layer_norm(p, (4,)),
    "input of a convolution": lambda p: F.conv1d(p.unsqueeze(0), torch.randn(2, 4, 3)),
    "index in the second dimension": lambda p: p[:, INDICES],
    # By sizes, the next one could be a mask of a matrix.
    "index of one": lambda p: torch.ops.aten.index(p, [torch.tensor(2)]),
    "other distances": lambda p: torch.cdist(p, torch.randn(3, 4), 1.0),
    "solution that is a vector": lambda p: torch.linalg.solve(p, torch.randn(4)),
    "several matrices": lambda p: torch.linalg.solve(p.expand(2, 4, 4), torch.randn(2, 4, 1)),
    "two indices": lambda p: p[INDICES, INDICES],
    "mask of elements": lambda p: p[p > 0],
    "index_select in the second dimension": lambda p: p.index_select(1, INDICES[0]),
    "gathered elements of a matrix": lambda p: p.gather(0, INDICES),
    "largest of bags": lambda p: F.embedding_bag(INDICES, p, mode="max"),
    "rounded": lambda p: torch.div(p, 2.0, rounding_mode="floor"),
    "divided by zero": lambda p: torch.ops.aten.div.Scalar(p, 0),
    "complex table": lambda p: p.to(torch.complex128)[INDICES],
    "summed over and in one tensor alone": lambda p: torch._trilinear(
        p, torch.randn(4), torch.randn(4), [], [0], [0], [0]
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_cases_that_no_rule_knows(name: str) -> None:
    node = UNKNOWN[name](parameter(4, 4)).grad_fn
    assert node_recipe(operation_of(node), node, 0) is None


def test_weights_of_bags_have_no_rule() -> None:
    p, weights = parameter(4, 3), parameter(2, 3)
    output = F.embedding_bag(INDICES, p, mode="sum", per_sample_weights=weights)
    (bags,) = [node for node in nodes_behind(output) if operation_of(node) == "EmbeddingBag"]
    assert [node_recipe("EmbeddingBag", bags, i) is None for i, _ in inputs_of(bags)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
def test_counts_of_tokens_are_refused(function: Callable[..., Tensor]) -> None:
    node = function(INDICES, parameter(4, 3), scale_grad_by_freq=True).grad_fn
    with pytest.raises(UnsupportedError, match="divides gradients by the counts"):
        node_recipe(operation_of(node), node, 0)


def lstm() -> Any:
    """The node of the first direction of a layer."""
    x = torch.randn(5, 4, 3, dtype=torch.float32)
    return nn.LSTM(3, 2, dtype=torch.float32)(x)[0].grad_fn


def group_norm() -> Any:
    """A node of group normalisation, with a weight and a bias."""
    return F.group_norm(torch.randn(4, 6, 2), 3, parameter(6), parameter(6)).grad_fn


@pytest.mark.parametrize(
    ("make", "positions", "number"),
    [
        pytest.param(lstm, (1, 2, 3, 4), 0, marks=HAS_MKLDNN),
        pytest.param(lstm, (2, 4), 1, marks=HAS_MKLDNN),
        (group_norm, (1, 2), 0),
    ],
)
def test_blocks_of_several_inputs(
    make: Callable[[], Any], positions: tuple[int, ...], number: int
) -> None:
    """They are those of the inputs one by one, from one formula."""
    node = make()
    operation = operation_of(node)
    assert operation in registered_operations()
    result = node._input_metadata[number]
    cotangent = torch.randn(2, *result.shape, dtype=result.dtype)
    joint = joint_recipe(operation, node, positions, number)
    assert joint is not None
    saved = read_fields(node, joint.fields)
    assert saved is not None
    for layout in layouts_of(result.shape, joint.formula.dims, joint.formula.depth):
        blocks = list(joint.formula.blocks(layout, cotangent, *saved))
        assert len(blocks) == len(positions)
        for position, block in zip(positions, blocks, strict=True):
            recipe = node_recipe(operation, node, position, number)
            assert recipe is not None
            own = read_fields(node, recipe.fields)
            assert own is not None
            (alone,) = recipe.formula.blocks(layout, cotangent, *own)
            following, which = node.next_functions[position]
            shape = tuple(following._input_metadata[which].shape)
            torch.testing.assert_close(rows_of(block, shape), rows_of(alone, shape))


def test_other_inputs_have_recipes_of_their_own() -> None:
    node = F.linear(torch.randn(3, 2), parameter(4, 2), parameter(4)).grad_fn
    assert joint_recipe("Addmm", node, (0, 2)) is None
    assert joint_recipe("Cumsum", node, (0, 2)) is None


def test_sparse_factors_have_no_formula() -> None:
    p = parameter(4, 3)
    node = torch.mm(torch.eye(4).to_sparse(), p).grad_fn
    operation, position = operation_of(node), len(node.next_functions) - 1
    recipe = node_recipe(operation, node, position)
    assert recipe is None or read_fields(node, recipe.fields) is None


def test_no_saved_tensor_is_read() -> None:
    """A checkpointed part would be computed again."""
    packed = []

    def unpack(_: Any) -> Any:
        raise AssertionError("A tensor was read.")

    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x), unpack):
        p, x = parameter(4, 4), torch.randn(4, 4)
        outputs = [f(p, x.abs() + 1) for f in BROADCAST.values()]
        outputs += [read(p) for read in READS.values()]
        outputs += [
            F.embedding_bag(INDICES, p, mode="mean"),
            F.linear(x, p),
            torch.bmm(p[None], x[None]),
        ]
        outputs += [F.conv1d(x[None], parameter(2, 4, 3)), F.layer_norm(x, (4,), parameter(4))]
    assert packed
    found = [
        node_recipe(operation_of(node), node, position)
        for node in nodes_behind(*outputs)
        for position, _ in inputs_of(node)
    ]
    assert sum(recipe is not None for recipe in found) > 30


def test_an_operation_has_one_rule() -> None:
    with pytest.raises(RuleError, match="`Addmm` have a rule already"):
        of_nodes("Addmm")(lambda _: None)


# Calls in half precision whose factors are computed. A layer normalisation is left out: its node
# has saved the statistics in half precision, too, and no epsilon.
COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numerator": lambda p, x: p / x,
    "denominator": lambda p, x: x / p,
    "base": lambda p, x: p**x,
    "exponent": lambda p, x: x**p,
    "number as exponent": lambda p, _: p**2.5,
    "number as base": lambda p, _: 2.5**p,
    "weight": lambda p, x: torch.lerp(x, 2 * x, p),
    "scale": lambda p, x: torch.sub(x, p, alpha=1.7),
    "prelu": lambda p, x: F.prelu(-x, p),
    "batch_norm": lambda p, x: F.batch_norm(x, None, None, p, p, True),
    "running": lambda p, x: F.batch_norm(x, x[0], x[1], p, p),
    "group_norm": lambda p, x: F.group_norm(x.unsqueeze(2), 2, p, p),
}


def rows_in(dtype: torch.dtype, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The rows of the first input with a recipe, for numbers that half precision has."""
    torch.manual_seed(0)
    p, x = torch.rand(4).add(0.5).bfloat16(), torch.rand(3, 4).add(0.5).bfloat16()
    output = function(p.to(dtype).requires_grad_(), x.to(dtype))
    for node in nodes_behind(output):
        for position, of_input in inputs_of(node):
            recipe = node_recipe(operation_of(node), node, position)
            saved = None if recipe is None else read_fields(node, recipe.fields)
            if recipe is not None and saved is not None:
                shape = tuple(node._input_metadata[0].shape)
                cotangent = torch.randn(2, *shape, dtype=torch.float64).bfloat16().to(dtype)
                (block,) = recipe.formula.blocks(None, cotangent, *saved)
                return rows_of(block, tuple(of_input.shape)).double()
    raise AssertionError("No input has a recipe.")


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_factors_keep_their_digits(name: str) -> None:
    """They have those of float32 at least, also where all that they are computed from has fewer."""
    found, expected = (rows_in(x, COMPUTED[name]) for x in (torch.bfloat16, torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_number_does_not_widen_the_products() -> None:
    p = torch.randn(3, dtype=torch.float32).requires_grad_()
    node = (p * 2.0).grad_fn
    recipe = node_recipe("Mul", node, 0)
    assert recipe is not None
    saved = read_fields(node, recipe.fields)
    assert saved is not None
    (block,) = recipe.formula.blocks(None, torch.ones(1, 3, dtype=torch.float32), *saved)
    assert {x.dtype for x in block.operands} == {torch.float32}


def test_products_of_ranges_of_rows() -> None:
    """PyTorch has them in half precision alone."""
    x, weight = torch.randn(7, 8).bfloat16(), torch.randn(3, 8, 16).bfloat16().requires_grad_()
    offsets = torch.tensor([2, 5, 7], dtype=torch.int32)
    node = F.grouped_mm(x, weight, offs=offsets).grad_fn
    assert operation_of(node) == "GroupedMm"
    assert compared(node, 1) > 0
