"""Fine-tuning by low-rank adapters, where Gramians of samples cost little.

A small language model learns the reference of Python, and then the code of a module of its library:
once all of its parameters, and once adapters of rank 4 on its linear layers, by peft. J has columns
for trainable parameters, and frozen layers only pass cotangents on, as in any backward pass. So a
Gramian of the samples, with UPGrad's weights, adds less to a step the fewer parameters are trained.
Printed: bits a letter before and after, what is forgotten, and what steps cost.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, arXiv:2106.09685.
"""

import copy
import time
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from autogram import Engine
from autogram.weightings import UPGrad
from examples.problem import is_short
from examples.showing import print_table, save
from examples.text import LanguageModel, Text, losses_of, reference, source_code, validate

BATCH = 16

Step = Callable[[], float]
"""Takes a step, and returns the loss before it."""


def pretrained(steps: int) -> nn.Module:
    """A model that has read the reference."""
    torch.manual_seed(0)
    text, model = Text(reference()), LanguageModel()
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


def fine_tune(
    model: nn.Module, text: Text, steps: int, *, by_gramian: bool, rate: float
) -> tuple[list[float], float]:
    """Trains on the code: bits a letter on the way, and milliseconds of a step."""
    torch.manual_seed(1)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=rate)
    engine = Engine(model, batch_dim=0) if by_gramian else None
    weighting, times, course = UPGrad(), [], [validate(model, text)]
    for step in range(1, steps + 1):
        start = time.perf_counter()
        losses = losses_of(model, text.draw(BATCH))
        if engine is None:
            losses.mean().backward()
        else:
            engine.backward(losses, weighting)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if step % max(1, steps // 10) == 0:
            course.append(validate(model, text))
    if engine is not None:
        engine.remove()
    return course, 1e3 * float(torch.tensor(times).median())


def main(*, before: int, steps: int) -> None:
    """Compares what is trained, and how."""
    model, code, other = pretrained(before), Text(source_code()), Text(reference())
    rows, courses, plain = [], {}, 0.0
    for what, make, rate in (
        ("all parameters", copy.deepcopy, 1e-3),
        ("adapters", with_adapters, 5e-3),
    ):
        for how in ("mean", "UPGrad"):
            tuned = make(model)
            course, milliseconds = fine_tune(
                tuned, code, steps, by_gramian=how == "UPGrad", rate=rate
            )
            courses[f"{what}, {how}"] = course
            plain = milliseconds if how == "mean" else plain
            count = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
            bits = f"{course[0]:.2f}", f"{course[-1]:.2f}", f"{validate(tuned, other):.2f}"
            cost = f"{milliseconds:.1f}", f"{milliseconds / plain:.2f}"
            rows.append((what, count, how, *bits, *cost))
    head = (
        "trained",
        "parameters",
        "weights",
        "code before",
        "after",
        "reference after",
        "ms a step",
    )
    print_table((*head, "to mean"), rows)
    print(f"Bits a letter; the reference had {validate(model, other):.2f} before.")
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, course in courses.items():
        axes.plot(torch.linspace(0, steps, len(course)).tolist(), course, label=name)
    axes.set(xlabel="step", ylabel="bits a letter of unseen code")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, "lora")


if __name__ == "__main__":
    is_brief = is_short(__doc__)
    main(before=10 if is_brief else 500, steps=10 if is_brief else 150)
