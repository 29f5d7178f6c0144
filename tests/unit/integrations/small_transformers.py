"""Small models of transformers, data for them, and arguments of a trainer."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)


def classifier(labels: int = 3) -> nn.Module:
    """A BERT of two small layers, without dropout."""
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=labels,
    )
    return BertForSequenceClassification(config)


def language_model() -> nn.Module:
    """A Llama of one small layer."""
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def texts(count: int = 18) -> list[dict[str, Tensor]]:
    """Tokens, with padding, and a class."""
    samples = []
    for i in range(count):
        ids, mask = torch.randint(3, 20, (7,)), torch.ones(7, dtype=torch.long)
        ids[5 + i % 3 :], mask[5 + i % 3 :] = 0, 0
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": ids[0] % 3})
    return samples


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """On the CPU, in the order of the data, by plain SGD of a constant rate."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**defaults, **options})


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
