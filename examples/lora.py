"""Fine-tuning with low-rank adapters, where Gramians of samples cost little.

A small language model learns the reference of Python, and then the code of a library module: once
with all parameters, and once with rank-4 adapters (peft) on its linear layers. J has columns only
for trainable parameters; frozen layers just pass cotangents on, as in any backward pass. The fewer
parameters are trained, the less a Gramian with UPGrad's weights therefore adds to a step. The table
shows bits per letter before and after, what is forgotten, and what steps cost.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, arXiv:2106.09685.
"""

import copy

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from autogram import Engine
from autogram.weightings import UPGrad
from examples.problem import is_short
from examples.showing import milliseconds, print_table, save
from examples.text import LanguageModel, Text, losses_of, reference, source_code, validate

BATCH = 16


def pretrained(steps: int, width: int) -> nn.Module:
    """A model that has read the reference."""
    torch.manual_seed(0)
    text, model = Text(reference()), LanguageModel(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        losses_of(model, text.draw(32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """A copy whose only trainable parameters are adapters."""
    targets = ["attend", "join", "widen", "narrow", "scores"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    adapted: nn.Module = inject_adapter_in_model(config, copy.deepcopy(model))
    return adapted


class Tuning:
    """A model trained on the code.

    Args:
        model: Its parameters that require gradients are trained.
        rate: The learning rate of Adam.
        by_gramian: Whether UPGrad weighs the losses of a batch; otherwise all weigh the same.
    """

    def __init__(self, model: nn.Module, rate: float, *, by_gramian: bool) -> None:
        self.model = model
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.trainable, lr=rate)
        self.engine = Engine(model, batch_dim=0) if by_gramian else None
        self.weighting = UPGrad()
        self.code = Text(source_code())

    def step(self) -> None:
        """Takes one training step."""
        losses = losses_of(self.model, self.code.draw(BATCH))
        if self.engine is None:
            losses.mean().backward()
        else:
            self.engine.backward(losses, self.weighting)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> list[float]:
        """Trains, and returns the bits per letter of unseen code at several moments."""
        torch.manual_seed(1)
        course = [validate(self.model, self.code)]
        for step in range(1, steps + 1):
            self.step()
            if step % max(1, steps // 10) == 0:
                course.append(validate(self.model, self.code))
        return course


def main(*, before: int, steps: int, width: int) -> None:
    """Compares trained parameters and weightings."""
    model, other = pretrained(before, width), Text(reference())
    rows, figure = [], Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for what, make, rate in (
        ("all parameters", copy.deepcopy, 1e-3),
        ("adapters", with_adapters, 5e-3),
    ):
        pair = {x: Tuning(make(model), rate, by_gramian=x == "UPGrad") for x in ("mean", "UPGrad")}
        courses = {how: tuning.train(steps) for how, tuning in pair.items()}
        forgotten = {how: validate(tuning.model, other) for how, tuning in pair.items()}
        times = milliseconds({how: tuning.step for how, tuning in pair.items()}, rounds=10)
        for how, tuning in pair.items():
            course = courses[how]
            bits = f"{course[0]:.2f}", f"{course[-1]:.2f}", f"{forgotten[how]:.2f}"
            cost = f"{times[how]:.1f}", f"{times[how] / times['mean']:.2f}"
            count = sum(p.numel() for p in tuning.trainable)
            rows.append((what, count, how, *bits, *cost))
            axes.plot(range(len(course)), course, label=f"{what}, {how}")
    head = ("trained", "parameters", "weights", "code before", "after", "reference after")
    print_table((*head, "ms a step", "to mean"), rows)
    print(f"Bits per letter; before, the reference was at {validate(model, other):.2f}.")
    axes.set(xlabel="tenths of the training", ylabel="bits per letter of unseen code")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, "lora")


if __name__ == "__main__":
    is_brief = is_short(__doc__)
    main(before=5 if is_brief else 400, steps=5 if is_brief else 120, width=16 if is_brief else 96)
