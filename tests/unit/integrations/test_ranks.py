"""Trainers in two processes: each step is that of one process with all samples.

With a gradient scaler, the first step overflows on one rank alone, and all of them skip it.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.processes import RANKS, Scenario, run_in_two_processes

STEPS, EACH = 4, 3
SCALE = 2.0**10


def weighting(gramian: Tensor) -> Tensor:
    """Different for each objective, and dependent on all of them."""
    return gramian.sum(1) / gramian.trace()


def make() -> nn.Sequential:
    """The same in all processes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def data(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of one process."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(STEPS, EACH, 4, generator=generator)
    return list(zip(x, torch.randint(3, (STEPS, EACH), generator=generator), strict=True))


def data_after_overflow(rank: int, each: int) -> list[tuple[Tensor, Tensor]]:
    """The same behind a step with one batch that is infinite, on one rank."""
    further = [(x.clone(), y) for x, y in data(rank)[:each]]
    if rank == 1:
        further[-1][0][0] = torch.inf
    return further + data(rank)


def scaler_of() -> torch.amp.GradScaler:
    """What trainers refuse to make on a CPU. Autocast leaves numbers in float64 as they are."""
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Those of a classifier, ``(B,)``."""
    return F.cross_entropy(model(x), y, reduction="none")


def expected(each: int) -> nn.Module:
    """Trained by rows of plain autograd of all processes, ``each`` batches to a step."""
    model = make()
    parameters = list(model.parameters())
    of_ranks = [data(rank) for rank in range(RANKS)]
    for start in range(0, STEPS, each):
        batches = [batch for of in of_ranks for batch in of[start : start + each]]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        rows = reference_jacobian(losses_of(model, x, y), parameters)
        shares = (weighting(rows @ rows.T) @ rows).split([p.numel() for p in parameters])
        for p, share in zip(parameters, shares, strict=True):
            p.grad = share.view_as(p).clone()
        torch.optim.SGD(parameters, lr=0.3).step()
    return model


def assert_same_parameters(model: nn.Module, other: nn.Module) -> None:
    """Assert that they agree."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-9


def pretend_to_be_started_by_torchrun(rank: int) -> None:
    """Trainers then use the group that is there."""
    found = {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in found.items()})
    os.environ.update({"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})


def in_lightning(rank: int, *, each: int, is_scaled: bool, folder: Path) -> None:
    del folder
    import lightning
    from lightning.pytorch.plugins.precision import MixedPrecision
    from torch.utils.data import DataLoader

    from autogram.integrations.lightning import JacobianDescent

    class Net(JacobianDescent, lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.weighting = make(), weighting

        def training_losses(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return losses_of(self.layers, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.3)

    pretend_to_be_started_by_torchrun(rank)
    net, scaler = Net(), scaler_of()
    batches = data_after_overflow(rank, each) if is_scaled else data(rank)
    trainer = lightning.Trainer(
        plugins=MixedPrecision("16-mixed", "cpu", scaler) if is_scaled else None,
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=each,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert trainer.world_size == RANKS
    assert not is_scaled or scaler.get_scale() == SCALE / 2
    assert_same_parameters(net.layers, expected(each))


def in_accelerate(rank: int, *, each: int, is_scaled: bool, folder: Path) -> None:
    del folder
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel

    from autogram.integrations.accelerate import Accelerated

    pretend_to_be_started_by_torchrun(rank)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=each)
    accelerator.scaler = scaler = scaler_of() if is_scaled else None
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(wrapped, DistributedDataParallel)
    steps = Accelerated(Engine(model, distributed=True), weighting, accelerator)
    for batch in data_after_overflow(rank, each) if is_scaled else data(rank):
        with accelerator.accumulate(wrapped):
            steps.backward(losses_of(wrapped, *batch))
            optimizer.step()
            optimizer.zero_grad()
    assert scaler is None or scaler.get_scale() == SCALE / 2
    assert_same_parameters(model, expected(each))


def in_transformers(rank: int, *, each: int, is_scaled: bool, folder: Path) -> None:
    from transformers import TrainingArguments

    from autogram.integrations.transformers import JacobianTrainer

    batches = data_after_overflow(rank, each) if is_scaled else data(rank)
    scaler = scaler_of() if is_scaled else None

    class Own(JacobianTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = scaler

        def compute_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return losses_of(model, inputs["x"], inputs["y"])

        def get_train_dataloader(self) -> Any:
            return [{"x": x, "y": y} for x, y in batches]

    pretend_to_be_started_by_torchrun(rank)
    model = make()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=1,
        gradient_accumulation_steps=each,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Own(model, arguments, train_dataset=batches, weighting=weighting)
    trainer.train()
    assert trainer.accelerator.num_processes == RANKS
    assert scaler is None or scaler.get_scale() == SCALE / 2
    assert_same_parameters(model, expected(each))


TRAINERS = {
    "lightning": in_lightning,
    "accelerate": in_accelerate,
    "transformers": in_transformers,
}


def scenarios(name: str, folder: Path) -> Mapping[str, Scenario]:
    """With and without accumulation and a gradient scaler."""
    return {
        f"{each}, scaled: {is_scaled}": partial(
            TRAINERS[name], each=each, is_scaled=is_scaled, folder=folder
        )
        for each in (1, 2)
        for is_scaled in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_steps_of_two_processes(name: str, tmp_path: Path) -> None:
    said = run_in_two_processes(partial(scenarios, name, tmp_path), tmp_path)
    assert len(said) == 4
    for each, problems in said.items():
        assert problems == ["", ""], f"{each} batches to a step: {' '.join(problems)}"
