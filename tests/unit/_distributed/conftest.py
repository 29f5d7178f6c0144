"""Processes that a file of tests shares: to start them takes longer than most scenarios."""

from pathlib import Path

import pytest

from tests.unit.processes import run_in_processes


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What each process says of each of the file's ``scenarios``, in as many as its ``RANKS``."""
    folder: Path = tmp_path_factory.mktemp("processes")
    return run_in_processes(request.module.scenarios, folder, request.module.RANKS)
