"""Dead units of a convolutional network: channels that are zero for every image of an epoch.

After a ReLU, a unit that is zero for all inputs gets no gradient, and stays zero. Too long steps
make such units (Lu, Shin, Su and Karniadakis, Dying ReLU and Initialization, 2019,
arXiv:1903.06733).
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram.hooks import Call, capture
from demo.digits import Images, load_images, make_classifier
from examples.problem import is_short


def is_alive(call: Call) -> Tensor:
    """Whether each channel is positive anywhere, for any image: ``(channels,)``."""
    alive: Tensor = (call.output > 0).transpose(0, 1).flatten(1).any(1)
    return alive


def train_epoch(model: nn.Module, images: Images, rate: float) -> dict[str, Tensor]:
    """Trains for an epoch, and returns which channels were dead all the time, layer by layer.

    Each call keeps only one truth value per channel.
    """
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with capture(model, where=nn.ReLU, inputs=False, gradients=False, keep=is_alive) as calls:
        for some in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(images.pixels[some]), images.labels[some]).backward()
            optimizer.step()
    return {name: ~torch.stack(found).any(0) for name, found in calls.items()}


def shares(rate: float, images: Images, epochs: int) -> dict[str, list[float]]:
    """The share of dead units in each epoch, layer by layer, at some learning rate."""
    model = make_classifier(seed=0)
    torch.manual_seed(0)
    by_layer: dict[str, list[float]] = {}
    for _ in range(epochs):
        for name, dead in train_epoch(model, images, rate).items():
            by_layer.setdefault(name, []).append(float(dead.float().mean()))
    return by_layer


def save_picture(path: Path, found: dict[float, dict[str, list[float]]]) -> None:
    """Draws the shares over the epochs, one part for each learning rate."""
    from matplotlib.figure import Figure  # only for the picture

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    parts = figure.subplots(1, len(found), sharey=True)
    for axes, (rate, by_layer) in zip(parts, found.items(), strict=True):
        for name, values in by_layer.items():
            axes.plot(range(1, len(values) + 1), values, marker="o", label=f"ReLU `{name}`")
        axes.set_title(f"learning rate {rate}", fontsize=10)
        axes.set_xlabel("epoch")
        axes.set_ylim(-0.02, 1.02)
    parts[0].set_ylabel("share of dead units")
    parts[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(*, short: bool, picture: Path) -> None:
    """Compares learning rates."""
    images, _ = load_images(seed=0)
    images = images.select(torch.arange(256 if short else len(images)))
    found = {rate: shares(rate, images, epochs=2 if short else 8) for rate in (0.05, 0.5, 1.0)}
    for rate, by_layer in found.items():
        last = ", ".join(f"{values[-1]:.0%} after `{name}`" for name, values in by_layer.items())
        print(f"Learning rate {rate}: in the last epoch, these units are dead: {last}.")
    save_picture(picture, found)
    print(f"Picture saved to {picture}.")


if __name__ == "__main__":
    is_quick = is_short(__doc__)
    main(short=is_quick, picture=Path("build/examples/dead_units.png"))
