"""Steps that are measured: gradient descent, autogram, and other ways to a Gramian or to norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchjd.autogram import Engine as TorchjdEngine

from autogram import Engine
from tests.speed.training import constant_weights
from tests.speed.workloads import Workload

Precision = Literal["float32", "TF32", "bf16 autocast"]
PRECISIONS: tuple[Precision, ...] = ("float32", "TF32", "bf16 autocast")


@contextmanager
def precision(name: Precision, device: str) -> Iterator[None]:
    """Computes with some precision in a block."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = name == "TF32"
    half = torch.autocast(device, torch.bfloat16) if name == "bf16 autocast" else nullcontext()
    try:
        with half:
            yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass
class Problem:
    """A model on one batch, with an optimizer.

    Attributes:
        call: The model, or what it was compiled to.
    """

    workload: Workload
    model: nn.Module
    call: Callable[[Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, workload: Workload, device: str) -> Problem:
        """With random weights, equal for all who ask, made where they are needed."""
        torch.manual_seed(0)
        with torch.device(device):
            model = workload.make_model()
            batch = workload.make_batch(workload.batch_size)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        return cls(workload, model, model, *batch, optimizer)

    def losses(self) -> Tensor:
        """The losses of the samples, ``(B,)``."""
        return self.workload.compute_losses(self.call(self.inputs), self.targets)


@dataclass
class Backward:
    """A backward pass.

    Attributes:
        function: Takes the losses.
        engine: autogram's, if there is one.
    """

    function: Callable[[Tensor], object]
    engine: Engine | None = None


def descend(_problem: Problem) -> Backward:
    """The gradient of the mean."""
    return Backward(lambda losses: losses.mean().backward())


def two_passes(problem: Problem) -> Backward:
    """autogram's Gramian, and a backward pass of weighted losses."""
    engine = Engine(problem.model, batch_dim=0)

    def backward(losses: Tensor) -> None:
        losses.backward(constant_weights(engine.compute_gramian(losses)))

    return Backward(backward, engine)


def fused(problem: Problem) -> Backward:
    """autogram's fused step."""
    engine = Engine(problem.model, batch_dim=0)
    return Backward(lambda losses: engine.backward(losses, constant_weights), engine)


def torchjd(problem: Problem) -> Backward:
    """The engine of torchjd, and a backward pass of weighted losses."""
    engine = TorchjdEngine(problem.model, batch_dim=0)
    return Backward(
        lambda losses: losses.backward(constant_weights(engine.compute_gramian(losses)))
    )


def per_sample_gradients(problem: Problem) -> Backward:
    """Rows by torch.func, multiplied by each other, and summed with the weights."""
    model, workload = problem.model, problem.workload
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, parameters, (x.unsqueeze(0),))
        return workload.compute_losses(outputs, y.unsqueeze(0))[0]

    rows_of = vmap(grad(loss), in_dims=(None, 0, 0))

    def backward(_losses: Tensor) -> None:
        detached = {name: p.detach() for name, p in trained.items()}
        rows = rows_of(detached, problem.inputs, problem.targets)
        flat = {name: x.flatten(1) for name, x in rows.items()}
        gramian = sum(x @ x.T for x in flat.values())
        assert isinstance(gramian, Tensor)
        weights = constant_weights(gramian)
        for name, p in trained.items():
            p.grad = (weights.to(flat[name]) @ flat[name]).view(p.shape).to(p.dtype)

    return Backward(backward)


def ghost_norms(problem: Problem) -> Backward:
    """Opacus' norms of the samples' gradients, without the products between them."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(problem.model, use_ghost_clipping=True)

    def backward(losses: Tensor) -> None:
        losses.sum().backward()
        wrapped.get_norm_sample()

    return Backward(backward)


STEPS: dict[str, Callable[[Problem], Backward]] = {
    "SGD": descend,
    "autogram": two_passes,
    "fused": fused,
    "torchjd": torchjd,
    "torch.func": per_sample_gradients,
}
if find_spec("opacus") is not None:
    STEPS["Opacus (norms alone)"] = ghost_norms
