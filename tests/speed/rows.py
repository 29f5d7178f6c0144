"""Steps that form the rows of the Jacobian, one for each sample, by other libraries.

The rows are multiplied by each other for the Gramian, and by the weights for the gradient, as
somebody would write it who has per-sample gradients and needs Gramians.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from typing_extensions import override

from .training import FusedEngine, Trainer, constant_weights, make_trainer
from .workloads import Workload


def combine(rows: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """The Gramian of rows ``(B, ...)``, whose weighted sums become the gradients."""
    flat = {name: x.flatten(1) for name, x in rows.items()}
    gramian = torch.stack([x @ x.T for x in flat.values()]).sum(0)
    weights = constant_weights(gramian)
    for name, x in flat.items():
        parameters[name].grad = (weights @ x).view_as(parameters[name])
    return gramian


OPACUS, VMAP = "Opacus", "vmap(grad)"


class OpacusEngine(FusedEngine):
    """Rows by the hooks of Opacus, which are there after one backward pass.

    Args:
        model: The model to train.
    """

    def __init__(self, model: nn.Module) -> None:
        from opacus.grad_sample import GradSampleModule  # not installed by default

        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._hooked = GradSampleModule(model, loss_reduction="sum")

    @override
    def compute_gramian(self, output: Tensor, /) -> Tensor:
        """Gramian of the Jacobian of the output, and gradients with constant weights."""
        output.sum().backward()
        rows = {name: p.grad_sample for name, p in self._parameters.items()}
        for p in self._parameters.values():
            p.grad_sample = None
        return combine(rows, self._parameters)


class VmapTrainer(Trainer):
    """Rows by ``vmap(grad(...))`` of torch.func, in one forward and backward pass.

    Args:
        workload: What is trained.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._parameters = dict(self._model.named_parameters())
        self.parameters = list(self._parameters.values())

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = functional_call(self._model, parameters, (x.unsqueeze(0),))
            return workload.compute_losses(outputs, y.unsqueeze(0))[0]

        self._rows_of = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def gramian(self) -> Tensor:
        """The Gramian; the gradients are there as well."""
        detached = {name: p.detach() for name, p in self._parameters.items()}
        return combine(self._rows_of(detached, self._inputs, self._targets), self._parameters)

    @override
    def step(self) -> None:
        self.gramian()
        self.update()


def make_any_trainer(workload: Workload, name: str) -> Trainer:
    """The trainer of a name, also of those here."""
    if name == VMAP:
        return VmapTrainer(workload)
    return Trainer(workload, OpacusEngine) if name == OPACUS else make_trainer(workload, name)
