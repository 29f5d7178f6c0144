"""Which training samples help, and which hurt, on a validation batch.

To first order, a step along the negative gradient of training sample b changes the validation loss
by -lr <J_b, mean of the validation gradients>. One cross-Gramian, or one Jacobian-vector product,
gives the value of all samples of a step. Some of the labels here are wrong, and come out last.

Pruthi, Liu, Sundararajan and Kale, Estimating Training Data Influence by Tracing Gradient Descent,
2020, arXiv:2002.08484; Wang et al., Data Shapley in One Training Run, 2024, arXiv:2406.11011.
"""

import torch
from torch import Tensor

from autogram import Engine
from examples.problem import Batch, draw, is_short, make_model


def values(engine: Engine, training: Tensor, validation: Tensor) -> Tensor:
    """How much each training loss, made smaller, makes the mean validation loss smaller: ``(B,)``.

    Args:
        engine: The engine of the model.
        training: Losses of training samples, ``(B,)``.
        validation: Losses of validation samples, ``(C,)``.
    """
    of_training, of_validation = engine.jacobian(training), engine.jacobian(validation)
    return of_training.cross_gramian(of_validation).mean(1)


def find_wrong_labels(steps: int, *, size: int = 60, wrong: int = 12) -> float:
    """Trains on labels of which some are wrong, and adds up each sample's value on the way.

    Returns:
        The share of wrong labels among as many samples with the least value.
    """
    training, validation = draw(size, noise=0.02), draw(200, noise=0.02)
    training = Batch(training.x, training.y.clone())
    training.y[:wrong] = 1 - training.y[:wrong]
    model = make_model()
    engine = Engine(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    total = torch.zeros(size)
    for step in range(steps):
        if step % 10 == 0:
            total += values(engine, training.losses(model), validation.losses(model))
        training.losses(model).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    least = total.argsort()[:wrong]
    return float((least < wrong).float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    found = find_wrong_labels(steps=100 if is_short(__doc__) else 400)
    print(f"{found:.0%} of the samples of least value have a wrong label; by chance it were 20%")
