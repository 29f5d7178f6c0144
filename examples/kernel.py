"""The empirical neural tangent kernel, and kernel regression with it.

K(x, z) = <df(x)/dp, df(z)/dp>, the Gramian of the outputs themselves. Near its parameters a wide
network trains like its linearisation, whose predictions after infinitely long gradient descent are
those of kernel regression:

    f(z) + K(z, X) (K(X, X) + ridge)^-1 (y - f(X))

Jacot, Gabriel and Hongler, Neural Tangent Kernel, 2018, arXiv:1806.07572; Novak, Sohl-Dickstein
and Schoenholz, Fast Finite Width Neural Tangent Kernel, 2022, arXiv:2206.08720.
"""

import torch
from torch import Tensor, nn

from autogram import Engine
from examples.problem import draw, is_short, make_model


def kernels(engine: Engine, training: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """K of the training points, and of test points with them.

    Args:
        engine: The engine of the model.
        training: The model's outputs for the training points, ``(B,)``.
        test: For the test points, ``(C,)``.

    Returns:
        ``(B, B)`` and ``(C, B)``.
    """
    jacobian = engine.jacobian(training)
    return jacobian.gramian(), engine.jacobian(test).cross_gramian(jacobian)


def predict(model: nn.Module, x: Tensor, y: Tensor, z: Tensor, ridge: float = 1e-3) -> Tensor:
    """Values at the points ``z``, by kernel regression of the values ``y`` at ``x``."""
    engine = Engine(model)
    f_x, f_z = (_score(model(points)) for points in (x, z))
    k_xx, k_zx = kernels(engine, f_x, f_z)
    scale = k_xx.diagonal().mean()
    coefficients = torch.linalg.solve(k_xx + ridge * scale * torch.eye(len(x)), y - f_x.detach())
    values: Tensor = f_z.detach() + k_zx @ coefficients
    return values


def _score(logits: Tensor) -> Tensor:
    """One number for each point: how much more likely the second class is."""
    return logits[:, 1] - logits[:, 0]


def accuracy(size: int, width: int) -> float:
    """The share of test points that kernel regression puts into the right class."""
    training, test = draw(size), draw(200)
    signs = 2.0 * training.y - 1
    scores = predict(make_model(width), training.x, signs, test.x)
    return float(((scores > 0) == (test.y == 1)).float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = (20, 80) if is_short(__doc__) else (20, 80, 320, 640)
    for size in sizes:
        print(f"{size:4} training points: {accuracy(size, width=128):.1%} of the test points right")
