"""Options of a `Trainer`: with constant weights, runs are those of the `Trainer` alone."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from autogram import CompiledPartWarning, InvalidLossesError, UnsupportedError
from autogram.integrations._refused_arguments import REFUSED
from autogram.integrations.transformers import JacobianTrainer
from autogram.monitor import ConflictMonitor
from tests.unit.integrations.small_transformers import (
    arguments,
    classifier,
    language_model,
    texts,
)
from tests.unit.integrations.weightings import mean, weighting

COUNT = 16  # samples, in four batches
Samples = list[dict[str, Tensor]]

# What the trainer itself does before, between or after passes.
UNTOUCHED = set(
    re.findall(
        r"\w+",
        """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon optim_target_modules max_grad_norm bf16 bf16_full_eval fp16_full_eval tf32
    activation_checkpointing gradient_checkpointing torch_compile torch_compile_mode
    liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps logging_strategy
    logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name
    project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps
    eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
    hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
    ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
    ddp_timeout fsdp_config debug skip_memory_metrics do_train do_eval do_predict
    resume_from_checkpoint local_rank
    """,
    )
)
# What a step of the engine has to do itself; tests here or in the files beside it are of each.
OURS = {
    "gradient_accumulation_steps",
    "label_smoothing_factor",
    "fp16",  # the scaler
    "auto_find_batch_size",  # begins a step anew
    "average_tokens_across_devices",  # weights are of the samples of all devices, whatever it says
}


def test_each_field_is_known() -> None:
    """One that a new version adds is to be looked at: a step may have to follow it."""
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    places = {
        name: [name in group for group in (UNTOUCHED, OURS, set(REFUSED))].count(True)
        for name in fields
    }
    assert [name for name, count in places.items() if count != 1] == []
    assert UNTOUCHED | OURS | set(REFUSED) == set(fields)


VALUES: dict[str, Any] = {
    "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "deepspeed": {"zero_optimization": {"stage": 1}},
    "fsdp": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "optim": "lomo",
    "parallelism_config": object(),
    "torch_compile_backend": "autogram",
    "use_liger_kernel": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_is_refused_at_construction(tmp_path: Path, name: str) -> None:
    """With what to write instead; not by accelerate, and not by the first step."""
    # Without a package or several devices, or without warnings, these cannot be passed.
    later = name in ("deepspeed", "fsdp", "gradient_checkpointing_kwargs")
    options = arguments(tmp_path, **({} if later else {name: VALUES[name]}))
    if later:
        setattr(options, name, VALUES[name])
    match = rf"`TrainingArguments` have {name}=.*Leave out `{name}`, and use "
    with pytest.raises(UnsupportedError, match=match + re.escape(REFUSED[name][2])):
        JacobianTrainer(classifier(), options, train_dataset=texts(4), weighting=mean)


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    options = arguments(tmp_path)
    options._n_gpu = 2
    with pytest.raises(
        UnsupportedError, match=r"Use one process.*`nn.DataParallel` copies the model"
    ):
        JacobianTrainer(classifier(), options, train_dataset=texts(4), weighting=weighting)


def test_other_makers_of_backward_passes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launcher of accelerate chooses them, without an argument of the trainer."""
    kind = property(lambda _: DistributedType.DEEPSPEED)
    options = arguments(tmp_path)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(UnsupportedError, match=r"leaves backward passes to DEEPSPEED.*Use an"):
        JacobianTrainer(classifier(), options, train_dataset=texts(4), weighting=mean)


def by_number(output: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """A loss that is not the model's, as transformers asks for it: for all labels of a step."""
    losses = F.cross_entropy(output.logits, labels, reduction="sum")
    return (losses + output.logits.square().sum()) / num_items_in_batch


def numbers(count: int) -> Samples:
    """Texts with a number each."""
    return [{**text, "labels": torch.randn(())} for text in texts(count)]


def several(count: int) -> Samples:
    """Texts that may be of each of three classes."""
    return [{**text, "labels": torch.rand(3).round()} for text in texts(count)]


def next_tokens(count: int) -> Samples:
    """Texts of one length whose tokens are labels."""
    samples = texts(count)
    return [{"input_ids": x["input_ids"], "labels": x["input_ids"]} for x in samples]


def adapted() -> nn.Module:
    """A language model with adapters."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(language_model(), config)
    return model.to(torch.get_default_dtype())


@dataclasses.dataclass
class Case:
    """Arguments, data and a model that a run is with."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: Callable[[int], Samples] = texts
    make: Callable[[], Any] = classifier
    function: Any = None


CASES = {
    "classes": Case(),
    "labels smoothed": Case({"label_smoothing_factor": 0.2}),
    "labels smoothed, accumulated": Case(
        {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}
    ),
    "a loss of one's own": Case(function=by_number),
    "a loss of one's own, accumulated": Case(
        {"gradient_accumulation_steps": 2}, function=by_number
    ),
    "numbers": Case(data=numbers, make=lambda: classifier(1)),
    "several classes": Case(data=several),
    "tokens": Case(data=next_tokens, make=language_model),
    "tokens, accumulated": Case(
        {"gradient_accumulation_steps": 2}, data=next_tokens, make=language_model
    ),
    "tokens smoothed": Case({"label_smoothing_factor": 0.2}, data=next_tokens, make=language_model),
    "tokens and adapters": Case(data=next_tokens, make=adapted),
    "noise on embeddings": Case({"neftune_noise_alpha": 5.0}),
    "a cache emptied": Case({"torch_empty_cache_steps": 1}),
    "checkpoints": Case({"activation_checkpointing": True}),
    "a scheduler": Case({"lr_scheduler_type": "linear", "warmup_steps": 2}),
    "another optimizer": Case({"optim": "adafactor", "weight_decay": 0.1, "learning_rate": 0.01}),
    "an order at random": Case({"train_sampling_strategy": "random", "seed": 3}),
    "compiled": Case({"torch_compile_backend": "aot_eager"}),
}


def runs(case: Case, folder: Path, weigh: Any = mean) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """The trained model and the log of the trainer alone, and of ours."""
    model, data = case.make(), case.data(COUNT)
    models = [model, copy.deepcopy(model)]
    for net, make in zip(models, (Trainer, JacobianTrainer), strict=True):
        kwargs = {"weighting": weigh} if make is JacobianTrainer else {}
        options = arguments(folder, **case.options)
        trainer = make(net, options, train_dataset=data, compute_loss_func=case.function, **kwargs)
        trainer.train()
        yield net, trainer.state.log_history


@pytest.mark.slow
@pytest.mark.filterwarnings(f"ignore::{CompiledPartWarning.__module__}.CompiledPartWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize("name", CASES)
def test_options_are_those_of_the_trainer(tmp_path: Path, name: str) -> None:
    """Parameters, losses, norms of gradients and rates."""
    (plain, expected), (model, logged) = runs(CASES[name], tmp_path)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-7
    for key in ("loss", "grad_norm", "learning_rate"):
        values = [[x[key] for x in log if key in x] for log in (logged, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
        assert values[0]


@pytest.mark.slow
def test_what_to_write_in_place_of_a_backend(tmp_path: Path) -> None:
    """The engine then sees each call: it does not warn of parts that are compiled."""

    def make() -> nn.Module:
        model = classifier()
        model.compile(backend="autogram")
        return model

    (plain, _), (model, _) = runs(Case(make=make), tmp_path)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-7


def ragged(count: int) -> Samples:
    """Texts whose tokens are labels, but for those of the padding."""
    return [
        {**x, "labels": x["input_ids"].where(x["attention_mask"] > 0, -100)} for x in texts(count)
    ]


def tokens_by_number(output: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """The loss of the next tokens."""
    losses = F.cross_entropy(output.logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return losses.sum() / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize("function", [None, tokens_by_number])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_samples_with_more_tokens_have_more_weight_alone(
    tmp_path: Path, smoothing: float, function: Any
) -> None:
    """The trainer weighs tokens alike; each sample here is the mean of its tokens."""
    options = {"label_smoothing_factor": smoothing, "gradient_accumulation_steps": 2}
    case = Case(options, ragged, language_model, function)
    counts = torch.tensor([float((x["labels"][1:] >= 0).sum()) for x in ragged(COUNT)])
    parts = iter([part / part.sum() for part in counts.split(8)] * 2)
    (plain, _), (model, _) = runs(case, tmp_path, lambda gramian: next(parts).to(gramian))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-7


def test_numbers_of_a_monitor_are_logged(tmp_path: Path) -> None:
    """Beside each loss, and not beside other entries."""
    monitor = ConflictMonitor(mean, every=2)
    options = arguments(
        tmp_path, num_train_epochs=1, eval_strategy="epoch", logging_first_step=True
    )
    data = texts(COUNT)
    trainer = JacobianTrainer(
        classifier(), options, train_dataset=data, eval_dataset=data[:4], weighting=monitor
    )
    trainer.log({"loss": 1.0})  # before there is a number
    trainer.train()
    logged = trainer.state.log_history
    assert len(logged) == 6  # four steps, an evaluation, and times
    for entry in logged:
        assert ("conflict/conflicting" in entry) == ("loss" in entry)
    assert {f"conflict/{name}" for name in ("entropy", "noise_scale")} < set(logged[-3])
    assert {k: v for k, v in logged[-3].items() if "/" in k} == pytest.approx(
        monitor.scalars(), nan_ok=True
    )


def test_overrides_whose_loss_would_not_be_weighted_are_refused(tmp_path: Path) -> None:
    class Whole(JacobianTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return model(**inputs).loss

    class Penalised(JacobianTrainer):
        def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            return loss + sum(p.square().sum() for p in model.parameters())

    for make in (Whole, Penalised):
        trainer = make(classifier(), arguments(tmp_path), train_dataset=texts(4), weighting=mean)
        with pytest.raises(UnsupportedError, match=r"overrides `compute_loss` or.*Write `compute_"):
            trainer.train()


def test_a_loss_of_ones_own_has_one_number(tmp_path: Path) -> None:
    kwargs = {"train_dataset": texts(4), "weighting": mean}
    results = {r"returns \(1, 3\) instead": lambda output, *_, **__: output.logits}
    results["returns float instead"] = lambda *_, **__: 1.0
    for match, function in results.items():
        trainer = JacobianTrainer(
            classifier(), arguments(tmp_path), compute_loss_func=function, **kwargs
        )
        with pytest.raises(InvalidLossesError, match=f"called for each sample.*{match}.*Return a"):
            trainer.train()


def test_a_model_with_another_loss_is_refused(tmp_path: Path) -> None:
    """As one that adds a penalty, or that has labels at other tokens than others of its kind."""

    class Balanced(type(classifier())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = None if output.loss is None else output.loss + 0.1
            return output

    model, options = Balanced(classifier().config), arguments(tmp_path, remove_unused_columns=False)
    trainer = JacobianTrainer(model, options, train_dataset=texts(4), weighting=mean)
    with pytest.raises(
        InvalidLossesError, match=r"The model's own loss is .*return your own losses"
    ):
        trainer.train()


def test_labels_that_nothing_can_smooth(tmp_path: Path) -> None:
    options = arguments(tmp_path, label_smoothing_factor=0.1)
    trainer = JacobianTrainer(classifier(1), options, train_dataset=numbers(4), weighting=mean)
    with pytest.raises(InvalidLossesError, match=r"`label_smoothing_factor` is 0.1. Override"):
        trainer.train()


def test_an_accelerator_that_is_made_anew(tmp_path: Path) -> None:
    """As in a search for hyperparameters: its backward passes are the engine's, too."""
    seen: list[int] = []
    options = arguments(tmp_path, num_train_epochs=1)
    trainer = JacobianTrainer(
        classifier(),
        options,
        train_dataset=texts(4),
        weighting=lambda gramian: seen.append(len(gramian)) or mean(gramian),
    )
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    assert seen == [4]
