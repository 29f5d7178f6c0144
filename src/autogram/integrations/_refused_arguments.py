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
        "There are no gradients before the last batch of a step, which could be exchanged",
        "no `sync_each_batch`",
    ),
    "activation_checkpointing_kwargs": _REENTRANT,
    "deepspeed": (
        bool,
        "DeepSpeed makes backward passes itself, and knows nothing of weights",
        "several processes without it (`torchrun`)",
    ),
    "fsdp": (
        bool,
        "An engine knows `fully_shard` alone, and steps with accelerate's wrapping are not tested",
        "`fully_shard` and `Engine(model, distributed=True)` in a loop of your own",
    ),
    "gradient_checkpointing_kwargs": _REENTRANT,
    "optim": (
        lambda value: value in ("lomo", "adalomo"),
        "This optimizer updates parameters in the backward pass, before there are weights",
        'another one, for instance "adamw_torch"',
    ),
    "parallelism_config": (
        bool,
        "An engine does not follow models or sequences that are spread over processes",
        "one model for each process (`torchrun`)",
    ),
    "torch_compile_backend": (
        lambda value: value == "autogram",
        "accelerate has a list of backends, which this one is not in",
        '`model.compile(backend="autogram")` before the trainer is made',
    ),
    "use_liger_kernel": (
        bool,
        "Its models compute one loss of all samples, and no logits",
        "the model's own layers",
    ),
}
"""By field: whether a value is refused, why, and what to use in its place."""


def refuse(arguments: Any) -> None:
    """Refuses arguments by which a step would not be what they say.

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
