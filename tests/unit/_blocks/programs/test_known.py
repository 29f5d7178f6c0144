"""What is kept of programs."""

import pytest
import torch
from torch import Tensor, nn

from autogram._blocks import are_plain, forms
from autogram._blocks.programs import Programs, known


@pytest.fixture(autouse=True)
def threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of these tests, whatever a run of all tests has."""
    monkeypatch.setattr(known, "_WORTH_WRITING", 3)


def test_a_key_is_due_when_it_has_come_often() -> None:
    programs = Programs()
    assert [programs.is_due("often") for _ in range(4)] == [False, False, True, True]
    assert not programs.is_due("once")
    assert not programs.is_due("often", is_of_many=True)


def test_a_program_is_kept_and_so_is_that_there_is_none() -> None:
    programs = Programs()
    assert programs.get("key") is None
    programs.keep("key", "program")
    programs.keep("another", False)
    assert programs.get("key") == "program"
    assert programs.get("another") is False


def test_keys_that_do_not_come_again_are_dropped() -> None:
    programs = Programs()
    for number in range(3 * known._MOST):
        assert not programs.is_due(number)
        programs.keep(number, number)
    assert len(programs._counts) == len(programs._known) == known._MOST


def test_forms_are_all_but_values() -> None:
    x = torch.zeros(4, 3, dtype=torch.float32)
    assert forms([x, x]) == forms([x + 1, x])
    others = (x.double(), x.t(), x[:3], x.to("meta"), x.t().contiguous().t())
    assert all(forms([x]) != forms([other]) for other in others)


def test_plain_tensors_are_different_ones_of_no_subclass() -> None:
    x = torch.zeros(2)

    class Own(Tensor):
        pass

    assert are_plain([x, x.view(2)])
    assert not are_plain([x, x])
    assert not are_plain([x, torch.zeros(2).as_subclass(Own)])
    assert not are_plain([nn.Parameter(x)])
