"""Memory that is written to again and again."""

import threading
import weakref

import pytest
import torch
from torch import Tensor

from autogram._blocks import Arena
from autogram._blocks.kernels.workspace import Workspace

pytestmark = pytest.mark.cpu

LIKE = torch.zeros((), dtype=torch.float32, device="cpu")


def take(arena: Arena | None, *shapes: tuple[int, ...]) -> list[Tensor]:
    assert arena is not None
    return [arena.take(shape, LIKE) for shape in shapes]


def is_inside(arena: Arena, tensor: Tensor) -> bool:
    """Whether a tensor lies in the memory of an arena."""
    return tensor.untyped_storage().data_ptr() == arena._memory.untyped_storage().data_ptr()


def after_a_step(*shapes: tuple[int, ...]) -> Arena:
    """An arena that has been asked for some pieces in an earlier step."""
    arena = Arena()
    with arena.borrowed() as memory:
        assert not any(is_inside(arena, piece) for piece in take(memory, *shapes))
    return arena


def test_as_much_as_in_the_step_before() -> None:
    arena = after_a_step((3, 5), (7,))

    with arena.borrowed() as memory:
        first, second, third = take(memory, (3, 5), (7,), (9,))

    assert (first.shape, second.shape, third.shape) == ((3, 5), (7,), (9,))
    assert [is_inside(arena, x) for x in (first, second, third)] == [True, True, False]
    assert first.is_contiguous()


def test_pieces_are_apart() -> None:
    arena = after_a_step((3, 5), (7,))

    with arena.borrowed() as memory:
        first, second = take(memory, (3, 5), (7,))
        version = first._version
        first.fill_(1)
        second.fill_(2)

    assert (first == 1).all()
    assert first._version == version + 1  # that of `second` is counted for itself


def test_other_dtypes() -> None:
    arena = after_a_step((3,), (8,))

    with arena.borrowed() as memory:
        assert memory is not None
        odd, double = memory.take((3,), LIKE.byte()), memory.take((4,), LIKE.double())

    assert (odd.dtype, double.dtype) == (torch.uint8, torch.float64)
    assert is_inside(arena, double)
    assert double.data_ptr() % 8 == 0


def test_a_step_that_begins_again() -> None:
    arena = after_a_step((3, 5))

    with arena.borrowed() as memory:
        (first,) = take(memory, (3, 5))
        arena.restart()
        (second,) = take(memory, (3, 5))

    assert first.data_ptr() == second.data_ptr()


def test_smaller_steps_let_go_of_memory() -> None:
    arena = after_a_step((100, 100))

    for _ in range(2):
        with arena.borrowed() as memory:
            take(memory, (10, 10))

    with arena.borrowed() as memory:
        assert not is_inside(arena, take(memory, (10, 10), (1000,))[1])


def test_one_borrower_at_a_time() -> None:
    arena = after_a_step((3, 5))

    with arena.borrowed():
        with arena.borrowed() as other:
            assert other is None
        with arena.borrowed() as other:
            assert other is None

    with arena.borrowed() as memory:
        assert memory is arena


def test_not_for_another_device() -> None:
    arena = Arena()

    with arena.borrowed() as memory:
        assert memory is not None
        assert memory.take((3, 5), LIKE.to("meta")).is_meta

    assert len(arena._memory) == 0


def test_scratch_memory_is_used_again_and_grows() -> None:
    workspace = Workspace()
    first = workspace.scratch((3, 5), LIKE, "rows")
    assert workspace.scratch((5, 2), LIKE, "rows").data_ptr() == first.data_ptr()
    assert workspace.scratch((3, 5), LIKE, "first").data_ptr() != first.data_ptr()
    assert workspace.scratch((40, 5), LIKE, "rows").shape == (40, 5)


def test_each_thread_has_its_own() -> None:
    workspace = Workspace()
    found = [workspace.scratch((3, 5), LIKE, "rows")]
    arenas = [workspace.arena]

    def look() -> None:
        found.append(workspace.scratch((3, 5), LIKE, "rows"))
        arenas.append(workspace.arena)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0].data_ptr() != found[1].data_ptr()
    assert arenas[0] is not arenas[1]


def test_memory_of_all_threads_is_freed() -> None:
    workspace = Workspace()
    memory = workspace.scratch((3, 5), LIKE, "rows")._base
    assert memory is not None
    kept = weakref.ref(memory)
    del memory
    arena = weakref.ref(workspace.arena)
    workspace.free()
    assert kept() is arena() is None
    assert workspace.scratch((3, 5), LIKE, "rows").shape == (3, 5)
