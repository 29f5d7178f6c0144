"""Values of ``TrainingArguments`` that steps of an engine cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autogram import UnsupportedError

Test = Callable[[Any], bool]


def _has(option: str) -> Test:
    """Whether a dict of options, if there is one, has an option on."""
    return lambda options: bool(options) and bool(options.get(option))


_REENTRANT = (
    _has("use_reentrant"),
    "An engine refuses reentrant checkpoints",
    '`{"use_reentrant": False}`',
)

REFUSED: dict[str, tuple[Test, str, str]] = {
    "accelerator_config": (
        lambda config: _has("sync_each_batch")(config.gradient_accumulation_kwargs),
        "Gradients to exchange exist only after the last batch of a step",
        "no `sync_each_batch`",
    ),
    "activation_checkpointing_kwargs": _REENTRANT,
    "deepspeed": (
        bool,
        "DeepSpeed makes backward passes itself, and does not know the weights",
        "several processes without it (`torchrun`)",
    ),
    "fsdp": (
        bool,
        "An engine supports only `fully_shard`; steps with accelerate's wrapping are untested",
        "`fully_shard` and `Engine(model, distributed=True)` in your own loop",
    ),
    "gradient_checkpointing_kwargs": _REENTRANT,
    "optim": (
        lambda value: value in ("lomo", "adalomo"),
        "This optimizer updates parameters in the backward pass, before the weights are known",
        'another one, for instance "adamw_torch"',
    ),
    "parallelism_config": (
        bool,
        "An engine does not support models or sequences that are split over processes",
        "one model for each process (`torchrun`)",
    ),
    "torch_compile_backend": (
        lambda value: value == "autogram",
        "It is not in accelerate's list of backends",
        '`model.compile(backend="autogram")` before the trainer is made',
    ),
    "use_liger_kernel": (
        bool,
        "Its models compute one loss for all samples, and no logits",
        "the model's own layers",
    ),
}
"""By field: whether a value is refused, why, and the alternative."""


def refuse(arguments: Any) -> None:
    """Refuses arguments that a step cannot follow.

    Raises:
        UnsupportedError: One of them has such a value.
    """
    for name, (is_refused, reason, instead) in REFUSED.items():
        value = getattr(arguments, name, None)
        if is_refused(value):
            raise UnsupportedError(
                f"`TrainingArguments` have {name}={value!r}. {reason}. Leave out `{name}`, and use "
                f"{instead}."
            )
