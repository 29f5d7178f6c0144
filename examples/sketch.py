"""Gramians of many samples, estimated from random projections of the rows.

Prints the cost of a sketch and of the Gramian, and the error of the sketch's cosines. With
thousands of samples, a sketch in some hundreds of dimensions is much cheaper; see
`docs/sketches.md`.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from autogram import Engine
from examples.problem import draw, is_short, make_model


def error_of_cosines(estimate: Tensor, exact: Tensor) -> float:
    """The root of the mean squared error of the cosines between different gradients."""
    norms = exact.diagonal().sqrt()
    cosines = (estimate - exact) / torch.outer(norms, norms)
    different = ~torch.eye(len(exact), dtype=torch.bool)
    return float(cosines[different].square().mean().sqrt())


def seconds(function: Callable[[], object]) -> float:
    """The time of the fastest of three runs."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(size: int, width: int, dimensions: int) -> None:
    """Prints a line for one batch."""
    model, batch = make_model(width), draw(size)
    engine = Engine(model)
    losses = batch.losses(model)
    exact, sketch = engine.compute_gramian(losses), engine.sketch(losses, dimensions)
    of_gramian = seconds(lambda: engine.compute_gramian(losses))
    of_sketch = seconds(lambda: engine.sketch(losses, dimensions))
    found = f"cosines off by {error_of_cosines(sketch.gramian(), exact):.4f}"
    print(
        f"{size:5} samples, {dimensions:5} dimensions: {found}, Gramian {of_gramian * 1e3:7.1f} ms,"
        f" sketch {of_sketch * 1e3:7.1f} ms"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    is_brief = is_short(__doc__)
    for dimensions in (256, 1024) if is_brief else (256, 1024, 4096):
        compare(128 if is_brief else 4096, 64 if is_brief else 512, dimensions)
