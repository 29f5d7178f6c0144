"""The empirical neural tangent kernel, and kernel regression with it.

K(x, z) = <df(x)/dp, df(z)/dp> is the Gramian of the outputs. Near its initial parameters, a wide
network trains like its linearisation. After infinitely long gradient descent, the linearisation
predicts what kernel regression does:

    f(z) + K(z, X) (K(X, X) + ridge)^-1 (y - f(X))

Jacot, Gabriel and Hongler, Neural Tangent Kernel, 2018, arXiv:1806.07572; Novak, Sohl-Dickstein
and Schoenholz, Fast Finite Width Neural Tangent Kernel, 2022, arXiv:2206.08720.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from autogram import Engine
from autogram.plot import plot_cosines
from examples.problem import draw, is_short, make_model
from examples.showing import print_table, save


def kernels(engine: Engine, training: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """K of the training points, and K between test and training points.

    Args:
        engine: The engine of the model.
        training: The model's outputs for the training points, ``(B,)``.
        test: The same for the test points, ``(C,)``.

    Returns:
        ``(B, B)`` and ``(C, B)``.
    """
    jacobian = engine.jacobian(training)
    return jacobian.gramian(), engine.jacobian(test).cross_gramian(jacobian)


def predict(model: nn.Module, x: Tensor, y: Tensor, z: Tensor, ridge: float = 1e-3) -> Tensor:
    """Values at the points ``z``, by kernel regression on the values ``y`` at ``x``."""
    engine = Engine(model)
    f_x, f_z = (_score(model(points)) for points in (x, z))
    k_xx, k_zx = kernels(engine, f_x, f_z)
    scale = k_xx.diagonal().mean()
    coefficients = torch.linalg.solve(k_xx + ridge * scale * torch.eye(len(x)), y - f_x.detach())
    values: Tensor = f_z.detach() + k_zx @ coefficients
    return values


def _score(logits: Tensor) -> Tensor:
    """One number for each point: how much more likely the second class is than the first."""
    return logits[:, 1] - logits[:, 0]


def accuracy(size: int, width: int) -> float:
    """The share of test points that kernel regression puts into the right class."""
    training, test = draw(size), draw(200)
    signs = 2.0 * training.y - 1
    scores = predict(make_model(width), training.x, signs, test.x)
    return float(((scores > 0) == (test.y == 1)).float().mean())


def accuracy_of_training(size: int, width: int, steps: int) -> float:
    """The accuracy of the network itself, trained on the points."""
    training, test = draw(size), draw(200)
    model = make_model(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        training.losses(model).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = model(test.x).argmax(1) == test.y
    return float(right.float().mean())


def draw_kernel(size: int, width: int) -> None:
    """Saves a picture of the kernel of some points, by class and by angle."""
    model, points = make_model(width), draw(size, noise=0.02)
    order = (points.y * 10 + points.x.norm(dim=1)).argsort()
    gramian = Engine(model).compute_gramian(_score(model(points.x[order])))
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    plot_cosines(gramian, sort=points.y[order], axes=figure.subplots())
    save(figure, "kernel")


def main(*, sizes: tuple[int, ...], steps: int) -> None:
    """Compares the kernel with the network, for several numbers of points, over three draws."""
    rows = []
    for size in sizes:
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            of_kernels = [accuracy(size, width) for width in (16, 128)]
            found.append([*of_kernels, accuracy_of_training(size, 128, steps)])
        means = torch.tensor(found).mean(0).tolist()
        rows.append((size, *(f"{x:.1%}" for x in means)))
    print_table(("points", "kernel, width 16", "kernel, width 128", "network, width 128"), rows)
    draw_kernel(60, 128)


if __name__ == "__main__":
    if is_short(__doc__):
        main(sizes=(20, 80), steps=20)
    else:
        main(sizes=(20, 80, 320, 640), steps=1000)
