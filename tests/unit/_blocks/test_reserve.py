"""Memory that is handed out again once nobody holds it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autogram._blocks import Memory, Reserve, reserve

LIKE = torch.zeros((), dtype=torch.float32, device="cpu")
SHAPE = (3, 5)
LIMIT = 1000


def take(memory: Memory | None, shape: tuple[int, ...] = SHAPE, like: Tensor = LIKE) -> Tensor:
    assert memory is not None
    taken = memory(shape, like)
    assert taken is not None
    return taken


def in_a_step(keeper: Reserve) -> Tensor:
    """What one step takes."""
    with keeper.borrowed(LIMIT) as memory:
        return take(memory)


def test_again_when_it_is_dropped() -> None:
    keeper = Reserve()
    first = in_a_step(keeper)
    place = first.data_ptr()
    del first

    second = in_a_step(keeper)

    assert second.data_ptr() == place
    assert second.shape == SHAPE
    assert second.is_contiguous()
    assert not second._is_view()


def parameter_with(gradient: Tensor) -> Tensor:
    """A parameter that has a gradient."""
    parameter = torch.zeros_like(gradient, requires_grad=True)
    parameter.grad = gradient
    return parameter


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[1:],
    "an alias": Tensor.detach,
    "its data": lambda x: x.data,
    "its storage": Tensor.untyped_storage,
    "an array": Tensor.numpy,
    "a parameter": parameter_with,
    "another library": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_not_while_it_is_held(name: str) -> None:
    keeper = Reserve()
    first = in_a_step(keeper)
    place = first.data_ptr()
    holder = HOLDERS[name](first)
    del first

    second = in_a_step(keeper)

    assert second.data_ptr() != place
    del holder, second


def test_not_twice_in_a_step() -> None:
    keeper = Reserve()
    for _ in range(2):
        with keeper.borrowed(LIMIT) as memory:
            places = {take(memory).data_ptr() for _ in range(3)}  # each is dropped at once
        assert len(places) == 3


def test_other_shapes_and_dtypes_are_apart() -> None:
    keeper = Reserve()
    for _ in range(2):
        with keeper.borrowed(LIMIT) as memory:
            single, double = take(memory), take(memory, like=LIKE.double())
            column = take(memory, (15,))
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        assert column.shape == (15,)
        assert len({x.data_ptr() for x in (single, double, column)}) == 3


def test_kept_for_one_step() -> None:
    keeper = Reserve()
    kept = StorageWeakRef(in_a_step(keeper).untyped_storage())
    assert not kept.expired()
    with keeper.borrowed(LIMIT):
        pass
    with keeper.borrowed(LIMIT):
        pass
    assert kept.expired()


def test_no_more_than_the_limit() -> None:
    keeper = Reserve()
    for _ in range(2):
        with keeper.borrowed(2 * 15 + 14) as memory:
            take(memory)
            take(memory)
            assert memory is not None
            assert memory(SHAPE, LIKE) is None


def test_changed_storages_are_left_alone() -> None:
    for change in (lambda x: x.resize_(20), lambda x: x.share_memory_()):
        keeper = Reserve()
        first = in_a_step(keeper)
        change(first)
        place = first.data_ptr()
        kept = first.untyped_storage()._weak_ref()  # so that its address is not used again
        del first
        assert in_a_step(keeper).data_ptr() != place
        torch.UntypedStorage._free_weak_ref(kept)


def test_none_for_another_step() -> None:
    keeper = Reserve()
    with keeper.borrowed(LIMIT) as memory, keeper.borrowed(LIMIT) as other:
        assert memory is not None
        assert other is None


def test_none_where_it_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    with Reserve().borrowed(LIMIT) as memory:
        assert memory is not None
        assert memory(SHAPE, LIKE.to("meta")) is None
        monkeypatch.setattr(reserve, "_LARGE", 61)
        assert memory(SHAPE, LIKE) is None  # sixty bytes
        assert memory((4, 4), LIKE) is not None


def test_none_where_uses_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_count_uses", None)
    with Reserve().borrowed(LIMIT) as memory:
        assert memory is not None
        assert memory(SHAPE, LIKE) is None
