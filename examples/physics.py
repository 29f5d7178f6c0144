"""A physics-informed network for Poisson's equation, with Gauss-Newton steps in sample space.

Find u with -(u_xx + u_yy) = f in the unit square and u = 0 on its edge, for the f whose solution
is sin(pi x) sin(pi y). The residuals at some points are the objectives. A step is the smallest
change d of the parameters with J d = r, damped: Jᵀ (J Jᵀ + λ I)⁻¹ r. The system has one unknown
per point, not one per parameter.

The network carries the derivatives of its hidden values along, as additional positions of a linear
layer. One forward pass thus computes them. Derivatives by a second backward pass
(``create_graph=True``) would cost the engine no more.

For comparison, Adam gets twice the time, with a tuned rate that decays to zero.

Levenberg 1944 and Marquardt 1963 (the damping); Müller and Zeinhofer, Achieving High Accuracy with
PINNs via Energy Natural Gradients, 2023, arXiv:2302.13163; Chen and Heyl, Empowering deep neural
quantum states through efficient optimization, 2024, doi:10.1038/s41567-024-02566-1 (the system of
the samples, minSR).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.optim import GaussNewton
from examples.problem import is_short
from examples.showing import print_table, save

INTERIOR, EDGE = 400, 80
EDGE_WEIGHT = 10.0
ADAM_RATE = 0.03  # best of 0.003, 0.01, 0.03 and 0.06, with three seeds


class Network(nn.Module):
    """A perceptron u(x, y), with its Laplacian."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = (2, width, width, 1)
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(sizes))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Values and Laplacians at points ``(N, 2)``, each ``(N,)``."""
        zeros = torch.zeros_like(points)
        ones = torch.eye(2, dtype=points.dtype).expand(len(points), 2, 2)
        # (N, 5, width): the value, both first derivatives, and both second ones
        state = torch.cat([points.unsqueeze(1), ones, torch.stack([zeros, zeros], 1)], 1)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            state = F.linear(state, layer.weight)
            value = state[:, :1] + layer.bias
            state = torch.cat([value, state[:, 1:]], 1)
            if i + 1 < len(self.layers):
                state = derived(state)
        state = state.squeeze(2)
        return state[:, 0], state[:, 3] + state[:, 4]


def derived(state: Tensor) -> Tensor:
    """The hyperbolic tangent of a value, with its derivatives."""
    value, first, second = state.split([1, 2, 2], 1)
    t = value.tanh()
    slope = 1 - t.square()
    return torch.cat([t, slope * first, slope * (second - 2 * t * first.square())], 1)


def solution(points: Tensor) -> Tensor:
    """The exact solution at some points, ``(N,)``."""
    return (math.pi * points).sin().prod(1)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points in the square and on its edge."""
    inside = torch.rand(INTERIOR, 2, generator=generator)
    along = torch.rand(EDGE, generator=generator)
    side = torch.arange(EDGE) % 4
    across = (side // 2).to(along.dtype)
    swapped = torch.stack([across, along], 1)
    return inside, torch.where((side % 2 == 0).unsqueeze(1), swapped, swapped.flip(1))


def residuals(network: Network, points: tuple[Tensor, Tensor]) -> Tensor:
    """The error in the equation and in the values on the edge, ``(INTERIOR + EDGE,)``."""
    inside, edge = points
    values, laplacians = network(torch.cat([inside, edge]))
    source = 2 * math.pi**2 * solution(inside)
    of_equation = (laplacians[: len(inside)] + source) / len(inside) ** 0.5
    return torch.cat([of_equation, EDGE_WEIGHT * values[len(inside) :] / len(edge) ** 0.5])


def relative_error(network: Network) -> float:
    """The relative error in the mean square, over a grid."""
    axis = torch.linspace(0, 1, 50)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        found, expected = network(grid)[0], solution(grid)
    return float((found - expected).norm() / expected.norm())


def gauss_newton(network: Network, steps: int) -> Iterator[tuple[float, float]]:
    """Takes each step at new points; yields seconds and relative error after each."""
    optimizer = GaussNewton(Engine(network, batch_dim=0))
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step(partial(residuals, network, draw(generator)))
        yield time.perf_counter() - start, relative_error(network)


def adam(network: Network, seconds: float) -> Iterator[tuple[float, float]]:
    """Runs Adam for some seconds; yields seconds and error at each tenth step and the end."""
    optimizer = torch.optim.Adam(network.parameters())
    generator = torch.Generator().manual_seed(1)
    start, count = time.perf_counter(), 0
    while (share := (time.perf_counter() - start) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = ADAM_RATE * (1 - share)
        optimizer.zero_grad()
        residuals(network, draw(generator)).square().sum().backward()
        optimizer.step()
        count += 1
        if count % 10 == 0:
            yield time.perf_counter() - start, relative_error(network)
    yield time.perf_counter() - start, relative_error(network)


def compare(steps: int) -> dict[str, list[tuple[float, float]]]:
    """Trains the same network with both methods; Adam gets twice the time."""
    found: dict[str, list[tuple[float, float]]] = {}
    torch.manual_seed(0)
    first = Network().state_dict()
    for name in ("Gauss-Newton", "Adam"):
        network = Network()
        network.load_state_dict(first)
        if name == "Adam":
            seconds = 2 * found["Gauss-Newton"][-1][0]
            found[name] = list(adam(network, seconds))
        else:
            found[name] = list(gauss_newton(network, steps))
    return found


def main(*, steps: int) -> None:
    """Prints and draws how far both methods get."""
    courses = compare(steps)
    end = courses["Gauss-Newton"][-1][0]
    rows = []
    for name, course in courses.items():
        at_end = [error for seconds, error in course if seconds <= end] or [course[0][1]]
        seconds, error = course[-1]
        rows.append((name, f"{at_end[-1]:.1e}", f"{seconds:.1f}", f"{error:.1e}"))
    print_table(("method", f"error after {end:.1f} s", "seconds in all", "error at the end"), rows)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, course in courses.items():
        axes.semilogy(*zip(*course, strict=True), label=name)
    axes.set(xlabel="seconds", ylabel="relative error of the solution")
    axes.grid(alpha=0.4)
    axes.legend()
    save(figure, "physics")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    main(steps=3 if is_short(__doc__) else 50)
