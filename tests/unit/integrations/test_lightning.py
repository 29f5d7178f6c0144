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

from autogram import Engine, InvalidOptionError, UnsupportedError
from autogram.integrations.lightning import JacobianDescent
from autogram.testing import reference_jacobian
from autogram.weightings import UPGrad
from tests.unit.checks import assert_close_to_reference
from tests.unit.integrations.classifiers import (
    WITHOUT_ADVICE,
    Net,
    Plain,
    assert_same_parameters,
    data,
    loader,
    trainer,
)
from tests.unit.integrations.weightings import mean, weighting

pytestmark = WITHOUT_ADVICE


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


@pytest.mark.parametrize("each", [1, 2, 3])
def test_steps_are_those_of_plain_autograd(tmp_path: Path, each: int) -> None:
    """With accumulation of whole steps, and of the rest at the end of an epoch, and clipping."""
    model, batches = Net(), data()
    twin = copy.deepcopy(model)
    before = copy.deepcopy(model)
    run = trainer(tmp_path, accumulate_grad_batches=each, gradient_clip_val=0.5)
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
    model, batches = Net(mean), data()
    options, scaler = PRECISIONS.get(name), None
    if options is None:  # Lightning takes bfloat16 for "16-mixed" on a CPU, unless it is made to
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10**6)
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    before = sum(map(model.loss, batches))
    run = trainer(tmp_path, max_epochs=10, accumulate_grad_batches=each, **options)
    run.fit(model, loader(batches))
    model.float()
    after = sum(map(model.loss, batches))
    assert after < 0.97 * before
    if scaler is not None:
        skipped = 22 - int(torch.tensor(scaler.get_scale()).log2())
        assert 0 < skipped < len(model.norms) / 2
        assert skipped == sum(norm != norm for norm in model.norms)


class Recorder(Callback):
    """Notes what there is at the end of each batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: list[Any] = []

    def on_train_batch_end(self, _: Any, module: Any, outputs: Any, *__: Any) -> None:
        self.losses.append(outputs["loss"])
        self.weights.append(module.objective_weights)


def test_loggers_bars_and_callbacks(tmp_path: Path) -> None:
    """They get what they get from other modules."""
    model, batches = Net(), data()
    logger, bar, recorder = CSVLogger(tmp_path), TQDMProgressBar(), Recorder()
    trainer(
        tmp_path,
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        callbacks=[bar, recorder],
        enable_progress_bar=True,
    ).fit(model, loader(batches), loader(batches[:1]))
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "loss" in lines[0]
    assert "validation" in lines[0]
    assert len(lines) > 5
    assert "loss" in bar.get_metrics(bar.trainer, model)
    sizes = [weights and [len(part) for part in weights] for weights in recorder.weights[:5]]
    assert sizes == [None, [5, 5], None, [5, 5], [2]]
    assert all(loss.isfinite() and not loss.requires_grad for loss in recorder.losses)


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
    model, batches = Net(), data()
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
    model, batches = Net(lambda gramian: seen.append(len(gramian)) or mean(gramian)), data(10)
    act = getattr(model, place)

    def fail(*args: Any) -> Any:
        if args[-1] == (place == "training_losses"):  # the number of the batch
            raise InterruptedError("half-way")
        return act(*args)

    monkeypatch.setattr(model, place, fail)
    with pytest.raises(InterruptedError):
        trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2).fit(model, loader(batches))
    assert not seen
    monkeypatch.undo()
    trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2).fit(model, loader(batches))
    assert seen == [10]


class Tasks(Net):
    """Losses of two tasks, and an engine on the trunk alone."""

    def training_losses(self, batch: tuple[Tensor, Tensor], _: int) -> Any:
        x, y = batch
        output = self.layers[2](self.layers[:2](x))
        return {"class": F.cross_entropy(output, y), "size": output.square().mean()}

    def make_engine(self) -> Engine:
        return Engine(self.layers[0], batch_dim=None)


@pytest.mark.parametrize("which", ["sum", "weighted"])
def test_tasks(tmp_path: Path, which: Any) -> None:
    """The head gets the gradient of the sum of the losses, or by weights of the losses' form."""
    model, batches = Tasks(UPGrad()), data(5)
    model.gradients_outside = which
    recorder = Recorder()
    twin = copy.deepcopy(model)
    trainer(tmp_path, callbacks=[recorder], max_epochs=1).fit(model, loader(batches))
    losses = list(twin.training_losses(batches[0], 0).values())
    rows = reference_jacobian(torch.stack(losses), twin.layers[0].parameters())
    weights = recorder.weights[0][0]
    assert_close_to_reference(torch.stack(list(weights.values())), UPGrad()(rows @ rows.T))
    torch.autograd.backward(losses, list(weights.values()), retain_graph=True)
    if which == "sum":
        head = twin.layers[1:]
        head.zero_grad()
        sum(losses).backward(inputs=[*head.parameters()])
    twin.configure_optimizers().step()
    assert_same_parameters(model, twin)
    (shown,) = recorder.losses
    assert shown == pytest.approx(float(sum(losses).detach()) / 2, rel=1e-6)


def test_without_weighting_or_losses(tmp_path: Path) -> None:
    class Without(JacobianDescent, lightning.LightningModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    model = Without()
    with pytest.raises(InvalidOptionError, match=r"Without has no `weighting`. Set `self"):
        trainer(tmp_path).fit(model, loader(data()))
    model.weighting = weighting
    with pytest.raises(UnsupportedError, match="has no `training_losses"):
        trainer(tmp_path).fit(model, loader(data()))


def test_accumulation_is_an_option_of_the_trainer(tmp_path: Path) -> None:
    """What earlier versions read is not ignored."""
    model = Net()
    model.micro_batches = 2
    with pytest.raises(
        InvalidOptionError, match=r"`micro_batches`, which.*accumulate_grad_batches"
    ):
        trainer(tmp_path).fit(model, loader(data()))


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    """By Lightning, whose advice ends in words of ours."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers[::2]]

    model = Net(make_optimizers=make)
    with pytest.raises(RuntimeError, match="automatic_optimization = False"):
        trainer(tmp_path).fit(model, loader(data()))
    model.automatic_optimization = False
    match = r"Net has `automatic_optimization = False`.*return one with several groups"
    with pytest.raises(UnsupportedError, match=match):
        trainer(tmp_path).fit(model, loader(data()))


def test_strategies_that_make_backward_passes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed does."""
    run = trainer(tmp_path)
    monkeypatch.setattr(type(run.strategy), "handles_gradient_accumulation", True)
    match = r"SingleDeviceStrategy makes backward passes itself.*Use another strategy"
    with pytest.raises(UnsupportedError, match=match):
        run.fit(Net(), loader(data()))


@pytest.mark.parametrize("name", ["training_step", "backward"])
def test_methods_in_place_of_those_of_the_mixin_are_refused(name: str) -> None:
    """Where the class is made: with them, it would train without weights."""
    words = {"training_step": "write `training_losses", "backward": "use Lightning's hooks"}
    match = f"Own overrides `{name}`.*Make `JacobianDescent` the first.*{words[name]}"
    with pytest.raises(UnsupportedError, match=match):
        type("Own", (JacobianDescent, Plain), {name: lambda *_: None})
    with pytest.raises(UnsupportedError, match=r"Last overrides `training_step`"):
        type("Last", (Plain, JacobianDescent), {})


def test_copies_have_no_engine(tmp_path: Path) -> None:
    """As callbacks make them, and a strategy that starts processes."""
    copies: list[Any] = []

    class Copying(Callback):
        def on_before_backward(self, _: Any, module: Any, loss: Tensor) -> None:
            del loss
            module.weighting = None  # functions of tests have no pickle
            copies.append(copy.deepcopy(module))

        def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
            pickle.loads(pickle.dumps(module.layers))
            copies.append(copy.deepcopy(module))

    trainer(tmp_path, callbacks=[Copying()], max_epochs=1).fit(Net(), loader(data(5)))
    assert [(each._micro_batches, each._objectives) for each in copies] == [(None, None)] * 2
