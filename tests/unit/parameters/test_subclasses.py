"""Subclasses of tensors, as of libraries for images: inputs, parameters, or both, at some steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference

MODES = [0, 1, 2, 0, 2, 1]


class Own(Tensor):
    """A class whose tensors remember where they come from, on calls of PyTorch, too."""

    origin: str | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, Own):
            known = [x.origin for x in args if isinstance(x, Own)]
            result.origin = known[0] if known else None
        return result


class Net(nn.Module):
    """Parameters as they are, as views, and derived; activations that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, mode: int) -> Tensor:
        h = self.first(x).relu_()
        if mode == 1:
            h = h * torch.cat([self.scale[:2].exp(), self.scale[2:]])
        elif mode == 2:
            h = F.linear(h, self.last.weight.T @ self.last.weight).add_(self.scale)
            h[:, 0] = self.scale
        return self.last(self.norm(h)).add_(1)


def make(*, are_parameters: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    for module in model.modules() if are_parameters else ():
        for name, parameter in list(module._parameters.items()):
            assert parameter is not None
            setattr(module, name, nn.Parameter(parameter.detach().as_subclass(Own)))
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients, each of which has the class of plain autograd's."""
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [x for x in found if x is not None and type(x) is Tensor]


@pytest.mark.parametrize("are_parameters", [False, True])
@pytest.mark.parametrize("are_inputs", [False, True])
def test_steps_are_those_of_plain_autograd(*, are_inputs: bool, are_parameters: bool) -> None:
    model, twin = (make(are_parameters=are_parameters) for _ in range(2))
    engine = Engine(model, batch_dim=0, verify="never")
    for step, mode in enumerate(MODES):
        x = torch.randn(3, 5, 4)
        if are_inputs and step != 1:
            x = x.as_subclass(Own)
            x.origin = "camera"
        output, expected = model(x, mode), twin(x, mode)
        assert type(output) is type(expected)
        assert getattr(output, "origin", None) == getattr(expected, "origin", None)
        losses = output.square().sum((1, 2))
        jacobian = reference_jacobian(losses.as_subclass(Tensor), model.parameters())
        assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
        assert_close_to_reference(engine.jacobian(losses).dense(), jacobian)
        engine.backward(losses, lambda gramian: torch.ones(len(gramian)))
        expected.square().sum().backward()
        torch.testing.assert_close(gradients(model), gradients(twin))
        model(x, mode).sum().backward()
        twin(x, mode).sum().backward()
        torch.testing.assert_close(gradients(model), gradients(twin))


def test_tensors_that_are_made_of_others() -> None:
    """Gradients of a step are read behind it: they have memory in the tensors inside alone."""
    model, twin = (make(are_parameters=False) for _ in range(2))
    engine = Engine(model, batch_dim=0, verify="never")
    weights = torch.linspace(1, 2, 3)
    for _ in range(3):
        x = torch.randn(3, 5, 4)
        losses = model(TwoTensor(x, x.clone()), 0).square().sum((1, 2))
        engine.backward(losses, lambda _: weights)
        (twin(x, 0).square().sum((1, 2)) @ weights).backward()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            if other.grad is not None:
                assert isinstance(parameter.grad, TwoTensor)
                torch.testing.assert_close(parameter.grad.a, other.grad)
                torch.testing.assert_close(parameter.grad.b, other.grad)
        model.zero_grad()
        twin.zero_grad()
