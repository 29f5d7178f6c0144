"""Python functions of torch that are recorded inside."""

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autogram._capture.composite import inlined


class Names(TorchFunctionMode):
    """Writes down what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_the_body_runs_under_the_mode() -> None:
    """A call of the copy shows what the function calls, and not the function itself."""
    x = torch.ones(2, 3)
    with Names() as names:
        output = inlined(F.glu)(torch.ones(2, 4))
        inlined(F.layer_norm)(x, (3,))
    assert torch.equal(output, F.glu(torch.ones(2, 4)))
    assert "layer_norm" in names.seen
    assert names.seen.count("glu") == 1


def test_the_original_is_not_touched() -> None:
    """It hands itself to a mode as before."""
    before = F.dropout.__globals__
    inlined(F.dropout)
    assert F.dropout.__globals__ is before
    x = torch.ones(2)
    with Names() as names:
        F.dropout(x, 0.5)
    assert names.seen[0] == "dropout"


def test_a_builtin_function_has_no_body() -> None:
    assert inlined(torch.matmul) is None
    assert inlined(torch.Tensor.add) is None
