"""Programs from the first step on, for tests of the folders beside `_blocks`."""

import pytest

from autogram._blocks.programs import known


def write_programs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines write each program down the first time, where they wait for many."""
    for name in ("_WORTH_WRITING", "_WORTH_WRITING_TOGETHER"):
        monkeypatch.setattr(known, name, 1)
