"""What is timed: steps of gradient descent, and of Jacobian descent with some engine."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torchjd.autogram import Engine as TorchjdEngine

from autogram import Engine

from .workloads import Workload

BASELINE = "SGD"


class GramianEngine(Protocol):
    """What the engines of autogram and of torchjd have in common."""

    def compute_gramian(self, output: Tensor, /) -> Tensor:
        """Gramian of the Jacobian of the output."""


class FusedEngine:
    """autogram's engine, whose fused step is measured.

    Args:
        model: The model to train.
    """

    def __init__(self, model: nn.Module) -> None:
        self._engine = Engine(model)

    def compute_gramian(self, output: Tensor, /) -> Tensor:
        """Gramian of the Jacobian of the output, and gradients with constant weights."""
        return self._engine.backward(output, constant_weights, return_gramian=True)[1]


def _make_torchjd_engine(model: nn.Module) -> GramianEngine:
    return TorchjdEngine(model, batch_dim=0)


EngineFactory = Callable[[nn.Module], GramianEngine]

ENGINES: dict[str, EngineFactory] = {
    "autogram": Engine,
    "fused": FusedEngine,
    "torchjd": _make_torchjd_engine,
}


def constant_weights(gramian: Tensor) -> Tensor:
    """Weights of the mean, which cost nothing."""
    return gramian.new_full((len(gramian),), 1 / len(gramian))


COMPILED = "compiled "  # in front of the names of trainers whose model is compiled


def make_trainer(workload: Workload, name: str) -> "Trainer":
    """The trainer of a name: that of an engine or of the baseline, perhaps with `COMPILED`."""
    own = name.removeprefix(COMPILED)
    make_engine = None if own == BASELINE else ENGINES[own]
    backend = None
    if own != name:
        backend = "inductor" if make_engine is None else "autogram"
    return Trainer(workload, make_engine, backend)


class Trainer:
    """A model on one batch, trained by gradient descent, or by Jacobian descent with an engine.

    Every trainer has a model of its own, as engines leave hooks on theirs.

    Args:
        workload: What is trained.
        make_engine: Makes the engine, if there is one.
        backend: What compiles the model, if anything does.
    """

    def __init__(
        self,
        workload: Workload,
        make_engine: EngineFactory | None = None,
        backend: str | None = None,
    ) -> None:
        torch.manual_seed(0)
        self._workload = workload
        self._model = workload.make_model()
        self._inputs, self._targets = workload.make_batch(workload.batch_size)
        # A small rate: the weights should move, as they do in training, but not diverge.
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._engine = make_engine(self._model) if make_engine else None
        self._run = torch.compile(self._model, backend=backend) if backend else self._model

    def step(self) -> None:
        """Train for one step."""
        losses = self.forward()
        self.compute_gramian(losses)
        self.backward(losses)
        self.update()

    def forward(self) -> Tensor:
        """Losses of the samples, shape ``(B,)``."""
        return self._workload.compute_losses(self._run(self._inputs), self._targets)

    def compute_gramian(self, losses: Tensor) -> None:
        """Compute the Gramian, if there is an engine for it."""
        if self._engine is not None:
            self._engine.compute_gramian(losses)

    def backward(self, losses: Tensor) -> None:
        """Accumulate the gradient: of the mean, or of the sum with constant weights."""
        if self._engine is None:
            losses.mean().backward()
        elif not isinstance(self._engine, FusedEngine):  # which has done so
            losses.backward(torch.full_like(losses, 1 / losses.numel()))

    def update(self) -> None:
        """Move the parameters along the gradient."""
        self._optimizer.step()
        self._optimizer.zero_grad()
