"""Memory that is handed out piece by piece, and taken back as a whole."""

import torch
from torch import Tensor

from autogram._blocks import Arena

LIKE = torch.zeros((), dtype=torch.float32)


def take(arena: Arena | None, *shapes: tuple[int, ...]) -> list[Tensor | None]:
    assert arena is not None
    return [arena.take(shape, LIKE) for shape in shapes]


def after_a_step(*shapes: tuple[int, ...]) -> Arena:
    """An arena that has been asked for some pieces in an earlier step."""
    arena = Arena()
    with arena.borrowed() as memory:
        assert take(memory, *shapes) == [None] * len(shapes)
    return arena


def test_as_much_as_in_the_step_before() -> None:
    arena = after_a_step((3, 5), (7,))

    with arena.borrowed() as memory:
        first, second, third = take(memory, (3, 5), (7,), (9,))

    assert first is not None
    assert second is not None
    assert (first.shape, second.shape, third) == ((3, 5), (7,), None)
    assert first.is_contiguous()


def test_pieces_are_apart() -> None:
    arena = after_a_step((3, 5), (7,))

    with arena.borrowed() as memory:
        first, second = take(memory, (3, 5), (7,))
        assert first is not None
        assert second is not None
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

    assert odd is not None
    assert double is not None
    assert (odd.dtype, double.dtype) == (torch.uint8, torch.float64)
    assert double.data_ptr() % 8 == 0


def test_the_same_memory_again() -> None:
    arena = after_a_step((3, 5))
    found = []

    for _ in range(2):
        with arena.borrowed() as memory:
            found += take(memory, (3, 5))

    first, second = found
    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr()


def test_a_step_that_begins_again() -> None:
    arena = after_a_step((3, 5))

    with arena.borrowed() as memory:
        (first,) = take(memory, (3, 5))
        arena.restart()
        (second,) = take(memory, (3, 5))

    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr()


def test_smaller_steps_let_go_of_memory() -> None:
    arena = after_a_step((100, 100))

    for _ in range(2):
        with arena.borrowed() as memory:
            take(memory, (10, 10))

    with arena.borrowed() as memory:
        assert take(memory, (10, 10), (1000,))[1] is None


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
        assert memory.take((3, 5), LIKE.to("meta")) is None

    assert len(arena._memory) == 0
