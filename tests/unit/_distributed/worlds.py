"""Models, data and references for engines of several ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, in_real

SIZES = [3, 5, 2, 4]
"""Samples of each rank."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    """Patches are views that repeat elements."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(5 * 2 * 2, 3),
    )


class Tied(nn.Module):
    """An embedding tied to the output layer, positions, normalisation, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.norm, self.middle = nn.LayerNorm(6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        x = x + torch.tanh(self.middle(self.norm(x))) * self.scale
        return (x @ self.embedding.weight.T).logsumexp(2).sum(1, keepdim=True)


class TiedByColumns(nn.Module):
    """Tables of which each column belongs to a token: read alone, or tied, or read by row, too."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.tied, self.both = (nn.Parameter(torch.randn(6, 11)) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.alone.T) + self.tied.T[ids].sin() * self.both.T[ids]
        return torch.cat([x.tanh() @ self.tied, self.both[ids % 6].sin()], 2).sum(1)


class Gappy(nn.Module):
    """Parameters that are views with holes, transposed, and of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(8, 9)[:, 1:7])
        self.turned = nn.Parameter(torch.randn(3, 8).T)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.wide.T * self.scale) @ self.turned


class Waves(nn.Module):
    """Complex parameters beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.phases = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return ((torch.fft.rfft(x * x.sin()) * self.phases * self.scale) @ self.turned).abs()


class Routed(nn.Module):
    """A part for even ranks, and one for odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.odd = (nn.Linear(6, 6) for _ in range(3))
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        part = self.odd if distributed.get_rank() % 2 else self.even
        return part(torch.tanh(self.first(x)))


class Products(nn.Module):
    """Parameters that are multiplied by each other, and not only by samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.scales, self.last = nn.Parameter(torch.randn(6)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bi,ij,j->bj", x, self.first, self.scales).tanh()
        return self.last(x @ (self.first * self.second).cumsum(0))


class Slices(nn.Module):
    """A slice that is changed in place hides a use from those who count the uses beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        product = self.first * self.second
        x[:, :3] *= product[0, :3]
        return x @ product.cumsum(0)


class Parts(nn.Module):
    """Parameters that are read whole, and of which other calls read a row, a corner or the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh() * self.first.weight[1] + self.second(x[:, None]).sin().sum(1)
        return x[:, :2] @ self.second.weight[:3, :2].T + x[:, :3] * self.second.weight[3:, 2].cos()


class Members(nn.Module):
    """Parameters expanded over the samples, and over as many members as one rank has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.members = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(6, 6))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x * self.token.expand(len(x), 6)))
        members = (self.members.expand(SIZES[0], 6, 6) * 2).tanh()
        return self.last(x @ members.sum(0))


def images(size: int) -> Tensor:
    return torch.randn(size, 2, 6, 6)


def tokens(size: int) -> Tensor:
    return torch.randint(11, (size, 5))


def vectors(size: int) -> Tensor:
    return torch.randn(size, 6)


def of_each(output: Tensor) -> Tensor:
    """One loss for each sample."""
    return output.square().flatten(1).sum(1)


def two_of_each(output: Tensor) -> Tensor:
    """Two losses for each sample, ``(B, 2)``."""
    return torch.stack([output.square().sum(1), output.sin().sum(1)], 1)


@dataclass
class World:
    """A model, what each rank computes of it in a step, and what autograd says of all of them."""

    make: Callable[[], nn.Module] = mlp
    draw: Callable[[int], Any] = vectors
    losses: Callable[[Tensor], Tensor] = of_each
    sizes: Sequence[int] = field(default_factory=lambda: SIZES)

    def model(self) -> nn.Module:
        """The same on all ranks."""
        torch.manual_seed(1)
        return self.make()

    def batch(self, rank: int, step: int) -> Any:
        """What one rank draws."""
        torch.manual_seed(100 * step + rank)
        return self.draw(self.sizes[(rank + step) % len(self.sizes)])

    def expected(self, model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
        """J of all ranks, ``(M, n)``, and how many objectives each rank has."""
        rows, counts = [], []
        own, size = distributed.get_rank(), distributed.get_world_size()
        x = self.batch(own, step)
        losses = self.losses(model(x))
        parameters = list(model.parameters())
        row = torch.zeros(0, sum(p.numel() for p in parameters))
        if losses.numel():
            row = reference_jacobian(losses, parameters)
        found: list[Any] = [None] * size
        distributed.all_gather_object(found, row.numpy().tolist())
        for each in found:
            rows.append(torch.tensor(each).view(len(each), row.shape[1]))
            counts.append(len(each))
        return torch.cat(rows), torch.tensor(counts)


def weighting(gramian: Tensor) -> Tensor:
    return gramian.diagonal().rsqrt()


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients, with zeros where there is none."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([in_real(x).flatten() for x in found])


def assert_same_on_all(x: Tensor) -> None:
    """Bit by bit."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, x.tolist())
    assert all(each == found[0] for each in found)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Also where there is nothing to compare, as on ranks without objectives."""
    if expected.numel() and expected.abs().max() > 0:
        assert_close_to_reference(found, expected)
    else:
        assert torch.equal(found, expected)


def assert_step(
    engine: Engine,
    world: World,
    wrapped: nn.Module,
    twin: nn.Module,
    step: int,
    gradient: Callable[[nn.Module], Tensor] = flat_gradient,
) -> None:
    """A Gramian, weights and gradients of one step, compared with those of autograd."""
    jacobian, counts = world.expected(twin, step)
    rank = distributed.get_rank()
    x = world.batch(rank, step)
    expected = jacobian @ jacobian.T
    weights = weighting(expected)
    own = weights.split(counts.tolist())[rank]

    gramian = engine.compute_gramian(world.losses(wrapped(x)))
    assert_close(gramian, expected)
    assert_same_on_all(gramian)
    assert_close(engine.own(weighting(gramian)).flatten(), own)

    wrapped.zero_grad()
    losses = world.losses(wrapped(x))
    found, gramian = engine.backward(losses, weighting, return_gramian=True)
    assert found.shape == losses.shape
    assert_close(found.flatten(), own)
    assert_close(gramian, expected)
    total = gradient(wrapped)
    assert_close(total, jacobian.T @ weights)
    assert_same_on_all(total)
