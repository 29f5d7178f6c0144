"""A differential equation: error maps of Gauss-Newton steps and of Adam."""

from dataclasses import dataclass

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from examples.physics import Network, adam, gauss_newton, solution

SIDE = 60  # points along an edge of a map
SMALLEST = 1e-7  # smallest error that is drawn


@dataclass(frozen=True)
class Solved:
    """Result of one method.

    Attributes:
        course: Pairs of seconds and relative error during training.
        errors: Distances from the solution on a grid, of shape ``(SIDE, SIDE)``.
    """

    course: list[tuple[float, float]]
    errors: Tensor


def errors_of(network: Network) -> Tensor:
    """Distances from the solution on a grid, of shape ``(SIDE, SIDE)``."""
    axis = torch.linspace(0, 1, SIDE)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        found: Tensor = network(grid)[0]
    return (found - solution(grid)).abs().view(SIDE, SIDE)


def solve(steps: int) -> dict[str, Solved]:
    """Train the same network in float64 with both methods; Adam gets twice the time."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        first = Network().state_dict()
        networks = Network(), Network()
        for network in networks:
            network.load_state_dict(first)
        newton = list(gauss_newton(networks[0], steps))
        slow = list(adam(networks[1], 2 * newton[-1][0]))
        return {
            "Adam": Solved(slow, errors_of(networks[1])),
            "Gauss-Newton": Solved(newton, errors_of(networks[0])),
        }
    finally:
        torch.set_default_dtype(before)


def make_note(found: dict[str, Solved]) -> str:
    """Say in words what the picture shows."""
    ends = {name: solved.course[-1] for name, solved in found.items()}
    said = ", ".join(f"{name} {error:.0e} in {s:.1f} s" for name, (s, error) in ends.items())
    return (
        f"Relative error of the solution of Poisson's equation: {said}. Both train the same "
        "network; Adam's rate was tuned and decays to zero. The limit: each Gauss-Newton "
        "step solves a system with one unknown per point, which is slow for thousands of "
        "points."
    )


def draw(found: dict[str, Solved]) -> Figure:
    """One error map per method, on the same scale."""
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    panels = figure.subplots(1, len(found))
    largest = max(float(solved.errors.max()) for solved in found.values())
    scale = LogNorm(SMALLEST, max(largest, 10 * SMALLEST))
    for axes, (name, solved) in zip(panels, found.items(), strict=True):
        errors = solved.errors.clamp(min=SMALLEST).T.tolist()
        image = axes.imshow(errors, origin="lower", extent=(0, 1, 0, 1), norm=scale, cmap="magma")
        seconds, error = solved.course[-1]
        axes.set_title(f"{name}, {seconds:.1f} s\nrelative error {error:.0e}", fontsize=13)
        axes.set(xticks=(), yticks=())
    figure.colorbar(image, ax=panels, label="error of the solution", shrink=0.85)
    return figure
