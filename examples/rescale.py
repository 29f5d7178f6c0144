"""DeepLIFT's rescale rule for a network that calls one ReLU twice, with two shapes.

An input contributes its difference times a multiplier to a difference of outputs, f(x) - f(x0).
Multipliers go backwards like gradients. That of a nonlinearity, however, is the difference of its
output divided by that of its input, so that the contributions add up to f(x) - f(x0) exactly.

Shrikumar, Greenside and Kundaje, Learning Important Features Through Propagating Activation
Differences, 2017, arXiv:1704.02685.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autogram.hooks import HookManager, capture
from examples.problem import is_short


class Twice(nn.Module):
    """A network with one ReLU for two layers, whose outputs are ``(b, 8)`` and ``(b, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """One number for each input, ``(b,)``."""
        hidden = self.relu(self.first(x))
        out: Tensor = (hidden.sum(1, keepdim=True) + 2 * self.relu(self.second(hidden))).squeeze(1)
        return out


def multiplier(given: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
    """The difference of outputs divided by that of inputs, times a gradient.

    The second half of the batch is the reference. Where inputs are equal, it uses the derivative.
    """
    (x, x0), (y, y0) = given.chunk(2), output.chunk(2)
    difference = x - x0
    is_equal = difference.abs() < 1e-9
    slope = torch.where(is_equal, (x > 0).to(x), (y - y0) / torch.where(is_equal, 1, difference))
    return slope.repeat(2, *(1,) * (slope.dim() - 1)) * gradient


class Rescaled(torch.autograd.Function):
    """A nonlinearity whose backward pass uses multipliers. Each call keeps its own tensors."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, output: Tensor) -> Tensor:
        """Returns the output unchanged."""
        ctx.save_for_backward(given, output)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient times the multiplier of this call."""
        given, output = ctx.saved_tensors
        return multiplier(given, output, gradient), None


def contributions(model: nn.Module, x: Tensor, reference: Tensor) -> Tensor:
    """Each input's contribution to f(x) - f(x0), ``(b, inputs)``, with storage for each call."""

    def rescale(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Any:
        return Rescaled.apply(args[0], output.detach())  # type: ignore[no-untyped-call]  # as typed in torch

    with HookManager() as manager:
        manager.register(rescale, model, where=nn.ReLU)
        return _contributions(model, x, reference)


def contributions_by_module(model: nn.Module, x: Tensor, reference: Tensor) -> Tensor:
    """The same with storage for each module, as many hooks have it: the last call wins."""
    last: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def store(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        last[module] = args[0].detach(), output.detach()

    def rescale(module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor]:
        del grad_input
        return (multiplier(*last[module], grad_output[0]),)

    with HookManager() as manager:
        manager.register(store, model, where=nn.ReLU)
        manager.register(rescale, model, where=nn.ReLU, kind="backward")
        return _contributions(model, x, reference)


def _contributions(model: nn.Module, x: Tensor, reference: Tensor) -> Tensor:
    """Multipliers, from one pass over inputs and reference, times differences of inputs."""
    both = torch.cat([x, reference]).requires_grad_()
    (multipliers,) = torch.autograd.grad(model(both)[: len(x)].sum(), both)
    return multipliers[: len(x)] * (x - reference)


def save_picture(path: Path, difference: Tensor, sums: dict[str, Tensor]) -> None:
    """Draws sums of contributions against differences of outputs; on the diagonal, they agree."""
    from matplotlib.figure import Figure  # only for the picture

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    for axes, (name, total) in zip(figure.subplots(1, 2, sharey=True), sums.items(), strict=True):
        axes.axline((0, 0), slope=1, color="0.7", linewidth=1)
        axes.scatter(difference.numpy(), total.numpy(), s=9, color="#d95f02")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("f(x) - f(x0)")
    figure.axes[0].set_ylabel("sum of contributions")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(*, short: bool, picture: Path) -> None:
    """Compares sums of contributions with differences of outputs."""
    torch.manual_seed(0)
    size = 20 if short else 200
    model = Twice().double()
    x, reference = torch.randn(size, 5).double(), torch.zeros(size, 5).double()
    with torch.no_grad(), capture(model, where="relu", gradients=False) as calls:
        difference = model(x) - model(reference)
    shapes = [tuple(call.output.shape) for call in calls["relu"][:2]]
    print(f"The ReLU is called with the shapes {shapes[0]} and {shapes[1]}.")
    ways = {"by call": contributions, "by module": contributions_by_module}
    sums = {name: way(model, x, reference).sum(1) for name, way in ways.items()}
    for name, total in sums.items():
        gap = float((total - difference).abs().max() / difference.abs().max())
        print(f"Storage {name}: the sums are off by {gap:.1e} of the largest difference.")
    save_picture(picture, difference, {f"storage {name}": x for name, x in sums.items()})
    print(f"Picture saved to {picture}.")


if __name__ == "__main__":
    is_quick = is_short(__doc__)
    main(short=is_quick, picture=Path("build/examples/rescale.png"))
