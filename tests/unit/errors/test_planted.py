"""Checks find planted errors, and raise no alarm where there is none.

``python -m tests.hunt.planted`` and ``python -m tests.hunt.alarms`` run all of it.
"""

import pytest
import torch

from tests.hunt import alarms, planted


@pytest.mark.parametrize("error", planted.ERRORS)
def test_a_planted_error_is_found(error: str) -> None:
    """In the first call that it makes wrong."""
    for number, case in enumerate(planted.cases(error)):
        is_wrong, is_found = planted.run_case(case, torch.float64)
        assert is_found or not is_wrong, case
        if is_wrong:
            return
        assert number < 100, "the error makes nothing wrong"


@pytest.mark.filterwarnings("ignore::autogram.CoupledObjectivesWarning")
@pytest.mark.parametrize("dtype", alarms.DTYPES, ids=str)
def test_right_results_of_random_programs_raise_no_alarm(dtype: torch.dtype) -> None:
    tally = alarms.run(alarms.programs(40), dtype)
    assert tally.verified > 30
    assert not tally.alarms, tally.alarms[0]
