"""Where nodes take samples, for PyTorch's own sample inputs of all of its operators."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from autogram._capture.places.transfers import step, table
from autogram._capture.places.transfers.step import Road
from tests.hunt.samples import OpInfo, name_of, operators
from tests.unit._capture.places.claims import Claims, claims_of, verdicts_of

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore"),  # by operators, about their sample inputs
]

# Whose nodes take minutes to be carried out for samples along each dimension.
DEAR = ("pca_lowrank", "svd_lowrank")
OPERATORS = [x for x in operators() if x.name not in DEAR]
SHARES = 12


def counted(chosen: list[OpInfo], most: int, road: Road) -> Claims:
    """How many claims about nodes of some operators have each verdict."""
    counts: Claims = Counter()
    for operator in chosen:
        claims = claims_of(operator, most, road)
        wrong = [operation for operation, verdict in claims if verdict == "unsound"]
        assert not wrong, f"{name_of(operator)}: samples are elsewhere behind {wrong}"
        counts.update(claims)
    return counts


@pytest.mark.parametrize("share", range(SHARES))
def test_samples_are_where_nodes_take_them(share: int) -> None:
    counts = counted(OPERATORS[share::SHARES], 2, Road.STRUCTURE)
    exact, coarse = (
        sum(n for (_, verdict), n in counts.items() if verdict == of) for of in ("exact", "coarse")
    )
    assert exact > 3 * coarse > 0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("road", [Road.STRUCTURE, Road.EXACT, Road.CONSTANTS, Road.DERIVATIVES])
@pytest.mark.parametrize("share", range(SHARES))
def test_samples_are_where_nodes_take_them_for_many_inputs(share: int, road: Road) -> None:
    assert counted(OPERATORS[share::SHARES], 5, road).total() > 300


def test_a_wrong_claim_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table._TABLE, "Cumsum", step.by_element)
    table._find.cache_clear()
    try:
        (cumsum,) = [x for x in OPERATORS if name_of(x) == "cumsum"]
        with pytest.raises(AssertionError, match="Cumsum"):
            counted([cumsum], 2, Road.STRUCTURE)
    finally:
        monkeypatch.undo()
        table._find.cache_clear()


def test_a_softmax_is_known_exactly() -> None:
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    assert {verdict for _, verdict in verdicts_of(x.softmax(1), Road.STRUCTURE)} == {"exact"}
