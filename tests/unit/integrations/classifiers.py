"""Classifiers that Lightning trains, by itself and by Jacobian descent, and a trainer for them."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autogram.integrations.lightning import JacobianDescent
from tests.unit.integrations.weightings import weighting

# Lightning gives advice on loaders, and calls what PyTorch has deprecated.
WITHOUT_ADVICE = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning", "ignore:.*LeafSpec"
)


class Plain(lightning.LightningModule):
    """A classifier with a logged loss, which Lightning trains."""

    def __init__(self, make_optimizers: Any = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.make_optimizers = make_optimizers
        self.norms: list[float] = []

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self.layers(x), y, reduction="none")
        self.log("loss", losses.mean(), prog_bar=True)
        return losses

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.losses(batch).mean()

    def loss(self, batch: tuple[Tensor, Tensor]) -> float:
        """The mean, outside of a trainer."""
        return float(F.cross_entropy(self.layers(batch[0]), batch[1]).detach())

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self.layers(x), y))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        del optimizer
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def configure_optimizers(self) -> Any:
        make = self.make_optimizers or momentum
        return make(self)


class Net(JacobianDescent, Plain):
    """The same by Jacobian descent."""

    def __init__(self, weigh: Any = weighting, make_optimizers: Any = None) -> None:
        super().__init__(make_optimizers)
        self.weighting = weigh

    def training_losses(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.losses(batch)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD of a constant rate."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)


def data(count: int = 22) -> list[tuple[Tensor, Tensor]]:
    """Batches of five, and a smaller last one."""
    x, y = torch.randn(count, 4), torch.randint(3, (count,))
    return list(zip(x.split(5), y.split(5), strict=True))


def loader(batches: list[tuple[Tensor, Tensor]]) -> DataLoader[Any]:
    """The same for a trainer."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list will do


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    """A trainer on the CPU that writes into a folder."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    return lightning.Trainer(**{**defaults, **options})


def assert_same_parameters(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    """Assert that they agree, and are finite."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.isfinite().all()
        assert (p - q).abs().max() < tolerance
