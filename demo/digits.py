"""The data and the model of the demo."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

N_CLASSES = 10
N_TEST = 500


@dataclass(frozen=True)
class Images:
    """Images with their labels.

    Attributes:
        pixels: Grey values from 0 to 1, of shape ``(n, 1, 8, 8)``.
        labels: Classes from 0 to 9, of shape ``(n,)``.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> "Images":
        """The images at these positions, in this order."""
        return Images(self.pixels[indices], self.labels[indices])


def load_images(seed: int) -> tuple[Images, Images]:
    """The digits that ship with scikit-learn, shuffled: training images and test images."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / data.images.max()
    images = Images(pixels, torch.tensor(data.target))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.select(order[N_TEST:]), images.select(order[:N_TEST])


def first_of_each_class(images: Images, n_per_class: int) -> Images:
    """The first few images of each class, sorted by class."""
    of_class = [torch.nonzero(images.labels == c).squeeze(1) for c in range(N_CLASSES)]
    return images.select(torch.cat([indices[:n_per_class] for indices in of_class]))


def make_classifier(seed: int) -> nn.Module:
    """A small convolutional network from images to the scores of the classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, N_CLASSES),
        )
