"""Functions that are traced once, and then carried out by what was traced."""

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from autogram._blocks import Block, settled
from autogram._blocks.scratch import Memory, allocate
from tests.unit._blocks.blocks import Operators

Function = Callable[..., Tensor]


class Counted:
    """A settled function, and how often its Python code has run."""

    def __init__(self, function: Function) -> None:
        self.runs = 0
        self.function = function
        self.settled = settled.settled(self._run)

    def __call__(self, *args: Any) -> Tensor:
        return self.settled(*args)

    def _run(self, *args: Any) -> Tensor:
        self.runs += 1
        return self.function(*args)


def _strided(x: Tensor) -> Tensor:
    return x.T.unsqueeze(0).expand(2, -1, -1).sum((0, 2))


def _shifted(x: Tensor) -> Tensor:
    return x[1:, 2:] * x[:-1, :-2]


def _in_place(x: Tensor) -> Tensor:
    total = x.new_zeros(x.shape[0] + 1, x.shape[1])
    total[1:] = x
    total[0].add_(x.sum(0)).mul_(2)
    return total


def _in_several_parts(x: Tensor) -> Tensor:
    first, second = x.split(2)
    values, _ = torch.sort(second, 1)
    return torch.cat([first.mT, values.mT], 1)


def _by_name(x: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x, x.flip(0), out=result)
    return torch.sum(input=result, dim=1)


def _unchanged(x: Tensor) -> Tensor:
    return x.contiguous().view(x.shape).permute(0, 1)


def _of_nothing(x: Tensor) -> Tensor:
    return torch.eye(3, dtype=x.dtype, device=x.device).view(9)


def _changed_between(x: Tensor) -> Tensor:
    y = x + 1
    first, second = y.split(2)
    before = first.sum(), second.exp()
    y.mul_(2)
    return before[0] + before[1] - first.sum() - second.exp()


def _in_two_buffers(x: Tensor) -> Tensor:
    first, second = x.new_zeros(x.shape), x.new_zeros(x.shape)
    second.add_(x)
    third = x.new_zeros(x.shape)
    return first + 2 * second + 3 * third


def _by_equal_numbers(x: Tensor) -> Tensor:
    x = x.long()
    zeros = [(x.abs() * zero).reciprocal() for zero in (0.0, -0.0)]
    return torch.cat([*zeros, (x * 1) / 2, ((x * 1.0) / 2), x[:1], x[1:2]])


def _by_shape(x: Tensor) -> Tensor:
    return x.sum(0) if len(x) > x.size(1) or x.is_floating_point() else x


@pytest.mark.parametrize(
    "function",
    [
        _strided,
        _shifted,
        _in_place,
        _in_several_parts,
        _by_name,
        _unchanged,
        _of_nothing,
        _changed_between,
        _in_two_buffers,
        _by_equal_numbers,
        _by_shape,
    ],
)
def test_other_values_of_the_same_form(function: Function) -> None:
    counted = Counted(function)
    for x in torch.randn(4, 4, 5).unbind():
        given = x.clone()
        assert torch.equal(counted(given), function(x))
        assert torch.equal(given, x)
    assert counted.runs == 1


@pytest.mark.parametrize(
    "others",
    [
        (torch.zeros(4, 5), torch.zeros(4, 4)),
        (torch.zeros(4, 4), torch.zeros(4, 5).T[:4]),
        (torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float16)),
        (torch.zeros(4, 4), torch.zeros(4, 4, device="meta")),
    ],
    ids=["shape", "strides", "dtype", "device"],
)
def test_other_forms(others: Sequence[Tensor]) -> None:
    counted = Counted(_strided)
    for runs, x in enumerate(others, start=1):
        counted(x.clone() if x.is_contiguous() else x)
        assert counted.runs == runs


def test_inputs_that_begin_elsewhere() -> None:
    counted = Counted(_shifted)
    for x in (torch.randn(4, 5), torch.randn(3, 4, 5)[2]):
        assert torch.equal(counted(x), _shifted(x))
    assert counted.runs == 1


def test_options() -> None:
    counted = Counted(lambda x, dim: x.sum(dim))
    x = torch.randn(4, 5)
    assert [counted(x, dim).shape for dim in (0, 1, 0)] == [(5,), (4,), (5,)]
    assert counted.runs == 2


def test_the_first_time_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "_WORTH_A_TRACE", 2)
    counted = Counted(_strided)
    for x in torch.randn(4, 4, 5).unbind():
        counted(x.clone())
    assert counted.runs == 2


def test_repetitions_are_left_out() -> None:
    def repeat(x: Tensor) -> Tensor:
        return torch.stack([(x[1:] @ x.mT).exp(), (x[1:] @ x.mT).exp().neg()]).sum(0)

    counted = Counted(repeat)
    x = torch.randn(4, 5)
    expected = repeat(x)
    for _ in range(2):
        with Operators() as operators:
            assert torch.equal(counted(x), expected)
    assert [operators.names.count(name) for name in ("aten::mm", "aten::exp", "aten::neg")] == [
        1,
        1,
        1,
    ]


def test_several_results() -> None:
    counted = Counted(lambda x: (x + 1, x.mT, (x + 1).sum(1), x + 1))
    for x in torch.randn(3, 4, 5).unbind():
        first, second, third, fourth = counted(x)
        expected = x + 1
        assert torch.equal(second, x.mT)
        assert torch.equal(third, expected.sum(1))
        first.zero_()  # no other result lies there
        assert torch.equal(fourth, expected)
    assert counted.runs == 1


def test_one_settled_function_in_another() -> None:
    inner = Counted(_shifted)
    outer = Counted(lambda x: inner(x) + inner(2 * x))
    for x in torch.randn(4, 4, 5).unbind():
        assert torch.equal(outer(x), 5 * _shifted(x))
    assert (outer.runs, inner.runs) == (1, 2)
    assert torch.equal(inner(x), _shifted(x))


def test_values_that_cut() -> None:
    counted = Counted(lambda x, n: x[:n])
    for n in (1, 2, 3):
        assert len(counted(torch.zeros(4), torch.tensor(n))) == n
    assert counted.runs == 3


@pytest.mark.parametrize("read", [bool, float, Tensor.tolist, Tensor.item])
def test_values_are_never_settled(read: Callable[[Tensor], object]) -> None:
    def double_if_true(x: Tensor) -> Tensor:
        return 2 * x if read(x.amax()) else x

    counted = Counted(double_if_true)
    for x in (torch.zeros(1), torch.ones(1), torch.zeros(1)):
        assert torch.equal(counted(x), 2 * x)
    assert counted.runs == 3


def test_tensors_from_elsewhere_are_never_settled() -> None:
    hidden = [torch.ones(3)]
    counted = Counted(lambda x: x + hidden[0])
    counted(torch.zeros(3))
    hidden[0] = torch.zeros(3)
    assert torch.equal(counted(torch.zeros(3)), torch.zeros(3))


def test_one_tensor_given_twice() -> None:
    counted = Counted(lambda x, y: x - y)
    x, y = torch.randn(3), torch.randn(3)
    for first, second in ((x, x), (x, y), (y, x), (y, y)):
        assert torch.equal(counted(first, second), first - second)


def test_blocks() -> None:
    counted = Counted(lambda p, q: torch.stack([x.operands[0] for x in (*p, *q)]).sum((1, 2)))

    def block() -> Block:
        return Block("kbo->kbo", (torch.randn(1, 3, 4),))

    for sizes in ((1, 2), (2, 1), (1, 2), (2, 1)):
        some, others = ([block() for _ in range(n)] for n in sizes)
        expected = torch.cat([x.operands[0] for x in (*some, *others)]).sum(1)
        assert torch.equal(counted(some, others), expected)
    assert counted.runs == 2


def test_memory_is_asked_for_each_time() -> None:
    pieces: list[Tensor] = []

    def take(shape: Sequence[int], like: Tensor) -> Tensor | None:
        pieces.append(like.new_empty(shape))
        return pieces[-1]

    def in_memory(x: Tensor, memory: Memory) -> Tensor:
        return torch.mul(x, 2, out=allocate(memory, x.shape, x))

    counted = Counted(in_memory)
    for _ in range(3):
        x = torch.randn(3)
        assert counted(x, take).data_ptr() == pieces[-1].data_ptr()
        assert torch.equal(pieces[-1], 2 * x)
    assert (counted.runs, len(pieces)) == (1, 3)


def test_no_memory_left() -> None:
    counted = Counted(lambda x, memory: allocate(memory, x.shape, x).copy_(x))
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(counted(x, lambda *_: None), x)
    assert counted.runs == 1


def test_what_is_not_read_again_is_freed() -> None:
    pieces: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def take(shape: Sequence[int], like: Tensor) -> Tensor | None:
        alive.append(sum(piece() is not None for piece in pieces))
        piece = like.new_empty(shape)
        pieces.append(weakref.ref(piece))
        return piece

    def chain(x: Tensor, memory: Memory) -> Tensor:
        for _ in range(5):
            x = torch.mul(x, 2, out=allocate(memory, x.shape, x))
        return x

    counted = Counted(chain)
    for _ in range(2):
        pieces.clear()
        alive.clear()
        counted(torch.randn(3), take)
        assert max(alive) == 1
    assert counted.runs == 1


def test_what_was_not_asked_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(_strided)
    often, first = torch.randn(4, 5), torch.randn(40, 5)
    counted(often)
    counted(first)
    weight = settled._MEMOS._weight // 2
    monkeypatch.setattr(settled, "_MOST", 10 * weight)
    for n in range(50):
        counted(torch.randn(4, 6 + n))
        counted(often)
    assert counted.runs == 52
    assert settled._MEMOS._weight <= 10 * weight
    counted(first)
    assert counted.runs == 53


def test_what_is_heavier_than_all_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "_MOST", 1)
    counted = Counted(_strided)
    for _ in range(2):
        counted(torch.randn(4, 5))
    assert counted.runs == 1
    counted(torch.randn(5, 4))
    counted(torch.randn(4, 5))
    assert counted.runs == 3


def test_threads_share_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "_MOST", 500)
    counted = Counted(_strided)
    tensors = torch.randn(40, 4, 40).unbind()

    def work(start: int) -> bool:
        some = [x[:, : 1 + (start + i) % 30] for i, x in enumerate(tensors)]
        return all(torch.equal(counted(x), _strided(x)) for x in some for _ in range(3))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [True] * 8
    memos = settled._MEMOS
    memos.weigh(("dropped meanwhile",), 100)
    assert memos._weight == sum(memo.weight for memo in memos._memos.values()) <= 500


def test_no_tensor_is_kept() -> None:
    counted = Counted(lambda x, y: (x @ y).sum())
    for _ in range(3):
        x, y = torch.randn(3, 3), torch.randn(3, 3)
        counted(x, y)
    references = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_subclasses_are_left_alone() -> None:
    class Own(Tensor):
        pass

    counted = Counted(_strided)
    for _ in range(3):
        x = torch.randn(4, 5)
        assert isinstance(counted(x.as_subclass(Own)), Own)
    assert counted.runs == 3


def test_inference_mode() -> None:
    counted = Counted(_in_place)
    with torch.inference_mode():
        for x in torch.randn(3, 4, 5).unbind():
            assert torch.equal(counted(x), _in_place(x))
    assert counted.runs == 3


def test_gradients() -> None:
    counted = Counted(_strided)
    for _ in range(2):
        x = torch.randn(4, 5, requires_grad=True)
        counted(x).sum().backward()
        assert torch.equal(x.grad, torch.full((4, 5), 2.0))
    assert counted.runs == 1


def test_another_setting_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(_strided)
    x = torch.randn(4, 5)
    for is_on in (True, False, True):
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda is_on=is_on: is_on)
        counted(x)
    assert counted.runs == 2
