"""What all tests of compiled models begin with."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


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


@pytest.fixture(autouse=True)
def working_attention(request: pytest.FixtureRequest) -> Iterator[None]:
    """Attention in float64 that inductor compiles right, with an engine and without.

    It takes the intermediate result of the fused one for float32, as the fake tensor has it:
    https://github.com/pytorch/pytorch/issues/185539, mended in 2.13.
    """
    parameters = getattr(request.node, "callspec", None)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    dtypes = [
        fused(*[torch.ones(1, 1, 2, 2, dtype=torch.float64, device=device)] * 3)[1].dtype
        for device in ("cpu", "meta")
    ]
    if parameters is None or "inductor" not in parameters.params.values() or len({*dtypes}) == 1:
        yield
    else:
        with sdpa_kernel(SDPBackend.MATH):
            yield
