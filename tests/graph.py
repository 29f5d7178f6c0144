"""A plugin of pytest: engines read uses from autograd's graph, and record no forward pass.

``pytest -p tests.graph`` so runs the tests of one capture with the other.
"""

from autogram._capture.from_graph import switch


def pytest_configure() -> None:
    """Sets the switch for the whole run."""
    switch.is_on = True
