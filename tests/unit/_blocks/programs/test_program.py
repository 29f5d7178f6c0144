"""Programs: the same results for other tensors, bit for bit, or no program."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autogram._blocks import Limit, Program, written_down
from autogram._blocks.kernels import CpuKernels
from autogram._blocks.programs.program import as_one_call
from tests.unit._blocks.blocks import Operators
from tests.unit.environment import DEVICE

Function = Callable[..., Any]


def tensors(seed: int) -> list[Tensor]:
    """Two tensors of equal forms for each seed."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(4, 6, 8, generator=generator), torch.randn(4, 6, 3, generator=generator)]


def results_of(value: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [value] if isinstance(value, Tensor) else list(value)


def written(function: Function, given: Sequence[Tensor], memory: Any = None) -> Program | None:
    """The program of a function, whose results were those of the function when it was written."""
    found, program = written_down(
        lambda take, x: function(*x) if memory is None else function(take, *x),
        results_of,
        memory,
        given,
    )
    for ours, plain in zip(results_of(found), results_of(function(*given)), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    return program


def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x.clone()
    part = total[:, 1:]  # begins elsewhere
    part += 1
    total.view(-1)[3] = y[0, 0, 0]
    total[:, :, :3].mul_(y)
    return total, part.sum(0)


def with_views(x: Tensor, y: Tensor) -> list[Tensor]:
    """Views of views, and of what was changed behind them."""
    flat = x.mT.reshape(32, 6) * 2
    again = flat.view(4, 8, 6).unsqueeze(0)
    flat.add_(1)
    return [torch.bmm(again[0], y), again.permute(1, 2, 0, 3).sum((0, 2)), flat.t()]


FUNCTIONS: dict[str, Function] = {
    "products": lambda x, y: torch.bmm(x.transpose(1, 2), y) @ torch.ones_like(y[0, :3]),
    "sums": lambda x, _: x.sum((1,), dtype=torch.float64).to(torch.float32).square().mean(),
    "several results": lambda x, y: (*x.split(2), *torch.linalg.svd(y[0].mT @ y[0])),
    "of one result": lambda x, _: x.max(1).values,
    "attributes": lambda x, y: x.mT.contiguous().mT + y.real.mT.mT[..., :1],
    "bits": lambda x, _: x.view(torch.int64).bitwise_and(3),
    "stacks": lambda x, y: torch.stack([torch.cat((x, y), 2), torch.cat([x, y * 2], -1)]),
    "functions in Python": lambda x, _: F.layer_norm(F.pad(x, (1, 1)), (10,), eps=1e-3),
    "sizes": lambda x, y: x * x.shape[0] + y.new_full((x.size(1), 1), x.dim()),
    "new tensors": lambda x, _: torch.eye(8, dtype=x.dtype).mul(2) @ x[0].t(),
    "out": lambda x, y: torch.bmm(x.mT, y, out=x.new_empty(4, 8, 3)),
    "operators": lambda x, y: (x[:, :, :3] - y) / 2 + (-y) % 3,
    "given back": lambda x, y: (y, x),
    "in place": in_place,
    "views": with_views,
    "operator overloads": lambda x, _: torch.ops.aten.sum.dim_IntList(x, [0]),
    "a part that is missing": lambda x, _: [
        part
        for part in torch.ops.aten.native_layer_norm_backward(
            x, x, [8], x.mean(-1, keepdim=True), x.std(-1, keepdim=True), None, None,
            [True, False, False],
        )
        if part is not None
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_makes_the_same_calls_for_other_tensors(name: str) -> None:
    function = FUNCTIONS[name]
    program = written(function, tensors(0))
    assert program is not None
    for seed in (1, 2):
        expected = results_of(function(*tensors(seed)))
        found = program(None, tensors(seed))
        assert len(found) == len(expected)
        for ours, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=0)
            assert ours.stride() == plain.stride()


class Other(float):
    """A number as other libraries have them, which is written otherwise."""

    def __repr__(self) -> str:
        return f"library.Other({float(self)})"


UNWRITTEN: dict[str, Function] = {
    "a value": lambda x, _: x * x[0, 0, 0].item(),
    "a truth": lambda x, y: x if x.sum() > 0 else y,
    "a list": lambda x, _: x + max(x[0, 0].tolist()),
    "a comparison": lambda x, y: x * torch.equal(x, y),
    "a length": lambda x, _: x.sum() * x[x > 0].shape[0],
    "places": lambda x, _: x.view(-1)[(x.view(-1) > 0).nonzero()].sum(),
    "distinct values": lambda x, _: torch.unique((x * 3).long()).sum() + x,
    "a tensor from elsewhere": lambda x, _: x + ELSEWHERE,
    "memory by its number": lambda x, _: x * (x.data_ptr() > 0),
    "another object": lambda x, _: x + torch.rand(8, generator=torch.Generator(DEVICE)),
    "a number of another library": lambda x, _: torch.mul(x, Other(0.1)),
    "a function that code cannot find": lambda x, _: x**2,
}
ELSEWHERE = torch.ones(8)


@pytest.mark.parametrize("name", UNWRITTEN)
def test_is_none_where_more_decides_than_forms(name: str) -> None:
    assert written(UNWRITTEN[name], tensors(0)) is None


def test_takes_places_that_are_given() -> None:
    """PyTorch counts indices among what decides about sizes, as some are masks."""
    given = [*tensors(0), torch.tensor([3, 0, 3])]
    program = written(lambda x, y, i: x[i, :, 0] + y[i.int(), :, 1], given)
    assert program is not None
    others = [*tensors(1), torch.tensor([1, 2, 0])]
    torch.testing.assert_close(
        program(None, others)[0], others[0][others[2], :, 0] + others[1][others[2], :, 1]
    )


def test_takes_each_view_in_one_call() -> None:
    program = written(lambda x, y: torch.bmm(x.view(4, 48).view(4, 6, 8).mT, y), tensors(0))
    assert program is not None
    others = tensors(1)
    with Operators() as operators:
        program(None, others)
    assert operators.names == ["aten::as_strided", "aten::bmm"]
    assert "bmm" in str(program)


def test_frees_what_is_read_no_more() -> None:
    """As the function itself would: an intermediate result is not kept to the end."""
    program = written(lambda x, _: x.exp().sum(2).cos().sum(), tensors(0))
    assert program is not None
    lines = str(program).splitlines()
    assert sum("exp = None" in line for line in lines) == 1
    assert "exp = None" not in lines[-1]


class TestMemory:
    """Memory is given anew to each call of a program."""

    def test_of_results(self) -> None:
        taken: list[Tensor] = []

        def memory(shape: Sequence[int], like: Tensor) -> Tensor:
            taken.append(like.new_empty(shape).exp_())  # which no program repeats
            return taken[-1]

        def function(take: Any, x: Tensor, y: Tensor) -> Tensor:
            return torch.bmm(x.mT, y, out=take((4, 8, 3), x)) * 1

        found, program = written_down(
            lambda take, x: function(take, *x), results_of, memory, tensors(0)
        )
        assert program is not None
        assert len(taken) == 1
        x, y = tensors(1)
        (found,) = program(memory, (x, y))
        torch.testing.assert_close(found, x.mT @ y)
        torch.testing.assert_close(taken[1], x.mT @ y)
        assert len(taken) == 2

    def test_of_a_workspace(self) -> None:
        """A piece of it is asked for at each call, as it may have grown since."""
        kernels = CpuKernels(Limit(2**40))

        def function(x: Tensor, y: Tensor) -> Tensor:
            return torch.bmm(x.mT, y, out=kernels.scratch((4, 8, 3), x)).sum(0)

        program = written(function, tensors(0))
        assert program is not None
        larger = kernels.scratch((1000,), tensors(0)[0])
        (found,) = program(None, tensors(1))
        torch.testing.assert_close(found, function(*tensors(1)))
        assert larger.view(-1)[0] == torch.bmm(tensors(1)[0].mT, tensors(1)[1])[0, 0, 0]


def test_functions_that_are_one_call_need_no_program() -> None:
    assert as_one_call(torch.add, torch.ones(2), 1).tolist() == [2, 2]


def test_an_error_ends_the_writing() -> None:
    def fail(*_: Any) -> Tensor:
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function"):
        written_down(fail, results_of, None, tensors(0))
    assert as_one_call(torch.add, torch.ones(2), 1).tolist() == [2, 2]
    assert written(FUNCTIONS["products"], tensors(0)) is not None
