"""What all tests of compiled models begin with."""

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing is left of what other tests have compiled, and the compiler's advice is not ours."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        for module in ("torch", "sympy"):
            warnings.filterwarnings("ignore", module=rf"{module}\..*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
    torch._dynamo.reset()
