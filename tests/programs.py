"""A plugin of pytest: engines write each program down at once, and make its calls from then on.

``pytest -p tests.programs`` so finds what programs do in the first steps of all tests.
"""

from autogram._blocks.programs import known


def pytest_configure() -> None:
    """Takes every key for one that comes again, for the whole run."""
    known._WORTH_WRITING = known._WORTH_WRITING_TOGETHER = 1
