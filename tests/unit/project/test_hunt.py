"""A fixed part of the hunt: operators in series of steps in which their arguments change.

``make hunt`` runs all of it, and says what runs a failed step again.
"""

from collections.abc import Iterable

import pytest

from tests.hunt import operators, table
from tests.hunt.pairs import Pair
from tests.hunt.runner import Tally, chooser, run

PARTS = 4
# One of so many scenarios, and one of so many operators: enough for half a minute in all.
SHARE = {"table": 53, "operators": 67}
THINNING = 5


def _failures(pairs: Iterable[Pair], share: int) -> list[str]:
    """What went wrong in a fixed choice of scenarios."""
    tally = Tally()
    for place, pair in enumerate(pairs):
        run(pair, chooser(place, 1, share), tally)
    assert tally.exact > tally.refused.total()
    return [f"{each.id}, step {each.step}: {each.what}" for each in tally.failures]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_by_hand(part: int) -> None:
    assert _failures(table.pairs()[part::PARTS], SHARE["table"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_sample_inputs_of_pytorch(part: int) -> None:
    assert _failures(operators.pairs(part=part, parts=PARTS * THINNING), SHARE["operators"]) == []
