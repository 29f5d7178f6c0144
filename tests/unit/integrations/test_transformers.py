"""The `Trainer` of transformers: runs of some steps beside rows of plain autograd."""

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from autogram import Engine, InvalidLossesError
from autogram.integrations.transformers import JacobianTrainer
from autogram.testing import reference_jacobian
from tests.unit.integrations.small_transformers import (
    arguments,
    classifier,
    language_model,
    stacked,
    texts,
)
from tests.unit.integrations.weightings import mean, weighting

pytestmark = pytest.mark.slow

SCALE = 2.0**22


@pytest.mark.parametrize("each", [1, 2, 3])
def test_steps_are_those_of_plain_autograd(tmp_path: Path, each: int) -> None:
    """With accumulation, clipping, logs, and the rest at the end of an epoch."""
    model, data = classifier(), texts()
    twin = copy.deepcopy(model)
    options = arguments(tmp_path, gradient_accumulation_steps=each)
    trainer = JacobianTrainer(model, options, train_dataset=data, weighting=weighting)
    trainer.train()
    parameters = list(twin.parameters())
    means = []
    for _ in range(2):
        for start in range(0, len(data), 4 * each):
            inputs = stacked(data[start : start + 4 * each])
            labels = inputs.pop("labels")
            losses = F.cross_entropy(twin(**inputs).logits, labels, reduction="none")
            rows = reference_jacobian(losses, parameters)
            shares = (weighting(rows @ rows.T) @ rows).split([p.numel() for p in parameters])
            for p, share in zip(parameters, shares, strict=True):
                p.grad = share.view_as(p).clone()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            torch.optim.SGD(parameters, lr=0.3).step()
            batches = [part.mean() for part in losses.detach().split(4)]
            means.append(float(sum(batches) / len(batches)))
    for p, q in zip(model.parameters(), parameters, strict=True):
        assert (p - q).abs().max() < 1e-9
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.global_step == len(means)
    assert logged == pytest.approx(means, abs=1e-4)


class InHalf(JacobianTrainer):
    """float16 on a CPU, which accelerate refuses: autocast and scaler are given by hand."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
        self.accelerator.scaler = scaler

    def compute_loss_context_manager(self) -> ExitStack:
        stack = super().compute_loss_context_manager()
        stack.enter_context(torch.autocast("cpu", torch.float16))
        return stack


class Watch(TrainerCallback):
    """Which steps the optimizer skipped."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []

    def on_optimizer_step(self, *_: Any, **options: Any) -> None:
        self.skipped.append(options["optimizer"].step_was_skipped)


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions(tmp_path: Path, precision: str, each: int) -> None:
    torch.set_default_dtype(torch.float32)
    model, watch = classifier(), Watch()
    make = InHalf if precision == "fp16" else JacobianTrainer
    options = arguments(
        tmp_path,
        bf16=precision == "bf16",
        gradient_accumulation_steps=each,
        num_train_epochs=15,
        optim="adamw_torch",
        learning_rate=0.02,
        max_grad_norm=0.0,  # accelerate unscales gradients for it where float16 is its own alone
    )
    trainer = make(model, options, train_dataset=texts(), weighting=mean, callbacks=[watch])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    count = len(losses) // 15
    assert sum(losses[-count:]) < 0.95 * sum(losses[:count])
    assert all(p.isfinite().all() for p in model.parameters())
    assert any(watch.skipped) == (precision == "fp16")
    assert sum(watch.skipped) < len(watch.skipped) / 3


@pytest.mark.slow
def test_bars_evaluation_and_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is around the steps works as ever."""
    options = arguments(tmp_path, disable_tqdm=False, eval_strategy="epoch", save_strategy="epoch")
    model, data = classifier(), texts()
    trainer = JacobianTrainer(
        model, options, train_dataset=data, eval_dataset=data[:4], weighting=weighting
    )
    trainer.train()
    assert "10/10" in capsys.readouterr().err
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["epoch"] for entry in evaluated] == [1.0, 2.0]
    again = JacobianTrainer(
        classifier(), arguments(tmp_path), train_dataset=data, weighting=weighting
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for p, q in zip(model.parameters(), again.model.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-9


def test_a_training_that_begins_anew_with_smaller_batches(tmp_path: Path) -> None:
    """Memory runs out in the second micro-batch: the first one is no part of another step."""
    seen: list[int] = []

    class Short(JacobianTrainer):
        def compute_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
            if len(inputs["labels"]) == 8 and self.was_called:
                raise RuntimeError("CUDA out of memory.")
            self.was_called = True
            return super().compute_losses(model, inputs)

    def weigh(gramian: Tensor) -> Tensor:
        seen.append(len(gramian))
        return mean(gramian)

    options = arguments(
        tmp_path,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        auto_find_batch_size=True,
    )
    trainer = Short(classifier(), options, train_dataset=texts(), weighting=weigh)
    trainer.was_called = False
    trainer.train()
    assert sum(seen) == 18


@pytest.mark.slow
def test_nothing_is_left_on_the_model(tmp_path: Path) -> None:
    """Behind a training, and behind one that fails; each has an engine of its own."""
    made: list[Engine] = []

    class Counting(JacobianTrainer):
        def make_engine(self, model: nn.Module) -> Engine:
            made.append(super().make_engine(model))
            return made[-1]

    model = classifier()
    options = arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=2)
    trainer = Counting(model, options, train_dataset=texts(6), weighting=weighting)
    for _ in range(2):
        trainer.train()
    broken = Counting(
        model,
        options,
        train_dataset=[{"input_ids": torch.ones(2, dtype=torch.long)}],
        weighting=weighting,
    )
    with pytest.raises(InvalidLossesError, match=r"no tensor `labels`.*return your own losses"):
        broken.train()
    assert len(made) == 3
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_losses_of_tokens(tmp_path: Path) -> None:
    """Of the next token in language models, without padding, as the model's own loss is."""
    model = language_model()
    trainer = JacobianTrainer(model, arguments(tmp_path), weighting=weighting)
    inputs = stacked(texts(4))
    inputs["labels"] = inputs["input_ids"].where(inputs["attention_mask"] > 0, -100)
    losses = trainer.compute_losses(model, inputs)
    assert losses.shape == (4,)
    for i, loss in enumerate(losses):
        own = model(**{name: tensor[i : i + 1] for name, tensor in inputs.items()}).loss
        assert torch.allclose(loss, own.to(loss))


def test_losses_of_numbers(tmp_path: Path) -> None:
    model = classifier(labels=1)
    trainer = JacobianTrainer(model, arguments(tmp_path), weighting=weighting)
    inputs = stacked(texts(4))
    inputs["labels"] = torch.randn(4)
    losses = trainer.compute_losses(model, inputs)
    expected = (model(**inputs).logits.squeeze(1) - inputs["labels"]).square()
    assert torch.allclose(losses, expected.to(losses))
    inputs["labels"] = torch.randn(4, 7)
    with pytest.raises(
        InvalidLossesError, match=r"There are logits of shape .*return your own losses"
    ):
        trainer.compute_losses(Constant(), inputs)


class Constant(nn.Module):
    """Logits of three classes."""

    def forward(self, **_: Any) -> dict[str, Tensor]:
        return {"logits": torch.randn(4, 3)}


def test_losses_of_ones_own(tmp_path: Path) -> None:
    """Of two tasks, in a dict."""

    class Tasks(JacobianTrainer):
        def compute_losses(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
            logits = model(**inputs).logits
            return {
                "class": F.cross_entropy(logits, inputs["labels"]),
                "size": logits.square().mean(),
            }

        def make_engine(self, model: nn.Module) -> Engine:
            return Engine(model, batch_dim=None)

    model = classifier()
    before = copy.deepcopy(model.state_dict())
    options = arguments(tmp_path, num_train_epochs=1)
    Tasks(model, options, train_dataset=texts(), weighting=weighting).train()
    assert any(not torch.equal(x, before[name]) for name, x in model.state_dict().items())
