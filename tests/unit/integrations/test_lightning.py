"""The mixin for Lightning: runs of some steps beside loops that are written by hand."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autogram import Engine, InvalidOptionError, UnsupportedError
from autogram.integrations.lightning import JacobianDescent
from autogram.testing import reference_jacobian
from autogram.weightings import UPGrad
from tests.unit.checks import assert_close_to_reference
from tests.unit.integrations.weightings import mean, weighting

# Lightning gives advice on loaders, and calls what PyTorch has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning", "ignore:.*LeafSpec"
)


class Net(JacobianDescent, lightning.LightningModule):
    """A classifier with a logged loss, and a note of what its hooks are called with."""

    def __init__(self, micro_batches: int = 1, weigh: Any = weighting) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.weighting = weigh
        self.micro_batches = micro_batches
        self.norms: list[float] = []

    def training_losses(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self.layers(x), y, reduction="none")
        self.log("loss", losses.mean(), prog_bar=True)
        return losses

    def loss(self, batch: tuple[Tensor, Tensor]) -> float:
        """The mean, outside of a trainer."""
        return float(F.cross_entropy(self.layers(batch[0]), batch[1]).detach())

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self.layers(x), y))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)


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


def by_hand(model: Net, batches: list[tuple[Tensor, Tensor]], epochs: int, each: int) -> None:
    """The same training by rows of plain autograd."""
    optimizer = model.configure_optimizers()
    parameters = list(model.parameters())
    for _ in range(epochs):
        for start in range(0, len(batches), each):
            x, y = (torch.cat(parts) for parts in zip(*batches[start : start + each], strict=True))
            rows = reference_jacobian(
                F.cross_entropy(model.layers(x), y, reduction="none"), parameters
            )
            gradient = weighting(rows @ rows.T) @ rows
            parts = gradient.split([p.numel() for p in parameters])
            for p, part in zip(parameters, parts, strict=True):
                p.grad = part.view_as(p).clone()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


def assert_same_parameters(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    """Assert that they agree, and are finite."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.isfinite().all()
        assert (p - q).abs().max() < tolerance


@pytest.mark.parametrize("each", [1, 2, 3])
def test_steps_are_those_of_plain_autograd(tmp_path: Path, each: int) -> None:
    """With accumulation of whole steps, and of the rest at the end of an epoch, and clipping."""
    model, batches = Net(each), data()
    twin = copy.deepcopy(model)
    before = copy.deepcopy(model)
    run = trainer(tmp_path)
    run.fit(model, loader(batches))
    by_hand(twin, batches, 2, each)
    assert_same_parameters(model, twin)
    assert not torch.equal(model.layers[0].weight, before.layers[0].weight)
    assert run.global_step == len(model.norms) == 2 * -(-len(batches) // each)
    assert max(model.norms) > 0.5 + 1e-6


PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {"precision": "32-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
}


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("name", [*PRECISIONS, "16-mixed"])
def test_precisions(tmp_path: Path, name: str, each: int) -> None:
    """The precision plugins, that of float16 with a scale that is too large at first."""
    torch.set_default_dtype(torch.float32)
    model, batches = Net(each, mean), data()
    options, scaler = PRECISIONS.get(name), None
    if options is None:  # Lightning takes bfloat16 for "16-mixed" on a CPU, unless it is made to
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10**6)
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    before = sum(map(model.loss, batches))
    trainer(tmp_path, max_epochs=10, **options).fit(model, loader(batches))
    model.float()
    after = sum(map(model.loss, batches))
    assert after < 0.97 * before
    if scaler is not None:
        skipped = 22 - int(torch.tensor(scaler.get_scale()).log2())
        assert 0 < skipped < len(model.norms) / 2
        assert skipped == sum(norm != norm for norm in model.norms)


class Recorder(Callback):
    """Notes what it is given at the end of each batch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, *arguments: Any, **_: Any) -> None:
        self.outputs.append(arguments[2])


def test_loggers_bars_and_callbacks(tmp_path: Path) -> None:
    """They get what they get from other modules."""
    model, batches = Net(2), data()
    logger, bar, recorder = CSVLogger(tmp_path), TQDMProgressBar(), Recorder()
    trainer(
        tmp_path,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[bar, recorder],
        enable_progress_bar=True,
    ).fit(model, loader(batches), loader(batches[:1]))
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "loss" in lines[0]
    assert "validation" in lines[0]
    assert len(lines) > 5
    assert "loss" in bar.get_metrics(bar.trainer, model)
    weights = [output["weights"] for output in recorder.outputs[:5]]
    assert [w and [len(part) for part in w] for w in weights] == [None, [5, 5], None, [5, 5], [2]]
    assert all(output["loss"].isfinite() for output in recorder.outputs)


def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    """With an engine made anew."""
    model, batches = Net(), data()
    twin = copy.deepcopy(model)
    first = trainer(tmp_path)
    first.fit(model, loader(batches))
    first.save_checkpoint(tmp_path / "last.ckpt")
    resumed = Net()
    trainer(tmp_path, max_epochs=4).fit(resumed, loader(batches), ckpt_path=tmp_path / "last.ckpt")
    trainer(tmp_path, max_epochs=4).fit(twin, loader(batches))
    assert_same_parameters(resumed, twin)


def test_nothing_is_left_after_a_fit(tmp_path: Path) -> None:
    """No hooks; and a second fit has an engine of its own."""
    model, batches = Net(2), data()
    for _ in range(2):
        trainer(tmp_path, max_epochs=1).fit(model, loader(batches))
        assert model._micro_batches is None
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks


@pytest.mark.parametrize("place", ["training_losses", "on_train_batch_end"])
def test_a_step_that_was_interrupted_is_no_part_of_the_next_fit(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error between the two batches of a step, and another fit."""
    seen: list[int] = []
    model, batches = Net(2, lambda gramian: seen.append(len(gramian)) or mean(gramian)), data(10)
    act = getattr(model, place)

    def fail(*args: Any) -> Any:
        if args[-1] == (place == "training_losses"):  # the number of the batch
            raise InterruptedError("half-way")
        return act(*args)

    monkeypatch.setattr(model, place, fail)
    with pytest.raises(InterruptedError):
        trainer(tmp_path, max_epochs=1).fit(model, loader(batches))
    assert not seen
    monkeypatch.undo()
    trainer(tmp_path, max_epochs=1).fit(model, loader(batches))
    assert seen == [10]


class Tasks(Net):
    """Losses of two tasks, an engine on the trunk alone, and two optimizers."""

    def training_losses(self, batch: tuple[Tensor, Tensor], _: int) -> Any:
        x, y = batch
        output = self.layers[2](self.layers[:2](x))
        return {"class": F.cross_entropy(output, y), "size": output.square().mean()}

    def make_engine(self) -> Engine:
        return Engine(self.layers[0], batch_dim=None)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[i].parameters(), lr=0.1) for i in (0, 2)]

    def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
        self.norms.append(0.0)


def test_tasks_and_several_optimizers(tmp_path: Path) -> None:
    """The head gets its gradient by the same weights."""
    model, batches = Tasks(weigh=UPGrad()), data(5)
    recorder = Recorder()
    twin = copy.deepcopy(model)
    trainer(tmp_path, callbacks=[recorder], max_epochs=1).fit(model, loader(batches))
    losses = list(twin.training_losses(batches[0], 0).values())
    rows = reference_jacobian(torch.stack(losses), twin.layers[0].parameters())
    weights = recorder.outputs[0]["weights"][0]
    assert_close_to_reference(torch.stack(list(weights.values())), UPGrad()(rows @ rows.T))
    torch.autograd.backward(losses, list(weights.values()))
    for optimizer in twin.configure_optimizers():
        optimizer.step()
    assert_same_parameters(model, twin)


def test_without_weighting_or_losses(tmp_path: Path) -> None:
    class Without(JacobianDescent, lightning.LightningModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    model = Without()
    with pytest.raises(InvalidOptionError, match=r"Without has no `weighting`. Set `self"):
        trainer(tmp_path).fit(model, loader(data()))
    model.weighting = weighting
    model.micro_batches = 0
    with pytest.raises(InvalidOptionError, match="`micro_batches` is 0"):
        trainer(tmp_path).fit(model, loader(data()))
    model.micro_batches = 1
    with pytest.raises(UnsupportedError, match="has no `training_losses"):
        trainer(tmp_path).fit(model, loader(data()))


def test_copies_have_no_engine(tmp_path: Path) -> None:
    """As a strategy makes them that starts processes."""

    class Copying(Callback):
        def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
            module.weighting = None  # functions of tests have no pickle
            self.copy = pickle.loads(pickle.dumps(module.layers)), copy.deepcopy(module)

    copying = Copying()
    trainer(tmp_path, callbacks=[copying], max_epochs=1).fit(Net(), loader(data(5)))
    assert copying.copy[1]._micro_batches is None
