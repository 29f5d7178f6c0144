"""Options of Lightning's trainer: with constant weights, runs are those of Lightning alone."""

import copy
import functools
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

from tests.unit.integrations.classifiers import (
    WITHOUT_ADVICE,
    Net,
    Plain,
    assert_same_parameters,
    data,
    loader,
    trainer,
)

pytestmark = WITHOUT_ADVICE

COUNT = 25  # samples, in five batches


class Constant:
    """What Lightning weighs losses by: the mean of a batch, divided by the batches of a step."""

    run: lightning.Trainer

    def __call__(self, gramian: Tensor) -> Tensor:
        each = self.run.accumulate_grad_batches
        return gramian.new_full((len(gramian),), 1 / (5 * each))


def fit(model: Plain, folder: Path, batches: Any, **options: Any) -> lightning.Trainer:
    """Trains a model with options, of which callbacks and plugins are made for each run."""
    validated = loader(batches[:1]) if options.pop("validates", False) else None
    made = {name: value() if callable(value) else value for name, value in options.items()}
    checkpoint = made.pop("ckpt_path", None)
    batches = batches if isinstance(batches, DataLoader) else loader(batches)
    run = trainer(folder, **{"max_epochs": 4, **made})
    if isinstance(model, Net):
        model.weighting.run = run
    run.fit(model, batches, validated, ckpt_path=checkpoint)
    return run


def step(model: nn.Module, interval: str) -> Any:
    """SGD with a rate that falls every other time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.7), "interval": interval}]


def one_cycle(model: nn.Module) -> Any:
    """A rate that changes with each step, of as many as the trainer expects."""
    optimizer = torch.optim.AdamW(model.parameters())
    steps = model.trainer.estimated_stepping_batches
    return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, steps), "interval": "step"}]


def plateau(model: nn.Module) -> Any:
    """A rate that falls where the loss does not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "monitor": "loss", "interval": "epoch"},
    }


def lbfgs(model: nn.Module) -> Any:
    """An optimizer that calls its closure several times."""
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)


def callbacks(*makers: Any) -> Any:
    """New ones for each run."""
    return lambda: [make() for make in makers]


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a scheduler of epochs": {"optimizers": functools.partial(step, interval="epoch")},
    "a scheduler of steps": {"optimizers": functools.partial(step, interval="step")},
    "a scheduler of steps with accumulation": {
        "optimizers": functools.partial(step, interval="step"),
        "accumulate_grad_batches": 2,
    },
    "the number of steps": {"optimizers": one_cycle, "accumulate_grad_batches": 2},
    "a scheduler of losses": {"optimizers": plateau},
    "the norm clipped": {"gradient_clip_val": 0.05},
    "values clipped": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 3},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "accumulation that changes": {
        "callbacks": callbacks(lambda: GradientAccumulationScheduler({0: 1, 1: 3, 3: 2}))
    },
    "validation between the batches of a step": {
        "accumulate_grad_batches": 2,
        "val_check_interval": 1,
        "validates": True,
    },
    "an epoch cut short": {"accumulate_grad_batches": 2, "limit_train_batches": 3},
    "steps counted": {"accumulate_grad_batches": 2, "max_steps": 4, "max_epochs": -1},
    "a loss that stops": {
        "callbacks": callbacks(lambda: EarlyStopping("loss", min_delta=0.05, patience=1))
    },
    "averaged weights": {
        "callbacks": callbacks(lambda: StochasticWeightAveraging(0.1, swa_epoch_start=2))
    },
    "closures": {"optimizers": lbfgs},
    "float64": {"precision": "64-true"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_of_lightning(tmp_path: Path, name: str) -> None:
    options = dict(OPTIONS[name])
    make, batches = options.pop("optimizers", None), data(COUNT)
    plain, model = Plain(make), Net(Constant(), make)
    model.load_state_dict(plain.state_dict())
    before = copy.deepcopy(plain)
    expected, run = (fit(each, tmp_path, batches, **options) for each in (plain, model))
    assert_same_parameters(model, plain)
    assert not torch.equal(plain.layers[0].weight, before.layers[0].weight)
    assert run.global_step == expected.global_step
    assert model.norms == pytest.approx(plain.norms, rel=1e-6)
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (run, expected)]
    assert rates[0] == rates[1]
    assert ("scheduler" in name) <= (rates[0] < run.optimizers[0].defaults["lr"])


class Stream(IterableDataset[Any]):
    """Batches without a number of them."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize("limit", [None, 3])
def test_a_stream_ends_a_step_where_lightning_does(tmp_path: Path, limit: int | None) -> None:
    batches = DataLoader(Stream(data(COUNT)), batch_size=None)
    plain, model = Plain(), Net(Constant())
    model.load_state_dict(plain.state_dict())
    options = {"accumulate_grad_batches": 2, "limit_train_batches": limit}
    steps = [fit(each, tmp_path, batches, **options).global_step for each in (plain, model)]
    assert_same_parameters(model, plain)
    assert steps[0] == steps[1] == 4 * (3 if limit is None else 2)


def in_half() -> MixedPrecision:
    """Lightning takes bfloat16 for "16-mixed" on a CPU, unless a plugin says otherwise."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    return MixedPrecision("16-mixed", "cpu", scaler)


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "32-true"},
    "bfloat16, mixed": {"precision": "bf16-mixed"},
    "bfloat16": {"precision": "bf16-true"},
    "float16": {"plugins": in_half},
}


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions_are_those_of_lightning(tmp_path: Path, name: str, each: int) -> None:
    """Up to rounding, which is small beside the way that the parameters go."""
    torch.set_default_dtype(torch.float32)
    batches = data(COUNT)
    plain, model = Plain(), Net(Constant())
    model.load_state_dict(plain.state_dict())
    before = copy.deepcopy(plain)
    options = {"accumulate_grad_batches": each, "gradient_clip_val": 0.5, **PRECISIONS[name]}
    for net in (plain, model):
        fit(net, tmp_path, batches, **options)
    flat = [
        torch.cat([p.detach().double().flatten() for p in net.parameters()])
        for net in (model, plain, before)
    ]
    way = (flat[1] - flat[2]).norm()
    assert way > 0.05
    assert (flat[0] - flat[1]).norm() < 0.05 * way


def saving_in(folder: Path) -> dict[str, Any]:
    """Options by which a checkpoint is saved after the fourth step."""
    saving = functools.partial(ModelCheckpoint, folder, filename="last", every_n_train_steps=4)
    return {
        "accumulate_grad_batches": 2,
        "enable_checkpointing": True,
        "callbacks": callbacks(saving),
    }


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    """In the middle of an epoch, with the states of the optimizer and of the scheduler."""
    make, batches = functools.partial(step, interval="step"), data(COUNT)
    plain, model = Plain(make), Net(Constant(), make)
    model.load_state_dict(plain.state_dict())
    for net in (plain, model):
        options = saving_in(tmp_path / type(net).__name__)
        fit(net, tmp_path, batches, max_steps=4, **options)
    resumed = [Plain(make), Net(Constant(), make)]  # with other parameters, and a new engine
    for net in resumed:
        folder = tmp_path / type(net).__name__
        run = fit(net, tmp_path, batches, ckpt_path=folder / "last.ckpt", **saving_in(folder))
        assert run.global_step == 12
    assert_same_parameters(*resumed)
