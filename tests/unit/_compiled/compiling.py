"""Compiled models, and steps of theirs that are compared with plain autograd, row by row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autogram import Engine
from autogram._compiled import autogram
from autogram._compiled.call import CompiledPart
from autogram.testing import reference_jacobian
from tests.unit.checks import assert_close_to_reference, trainable

INNER = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def compiled(model: Any, inner: str = "aot_eager", **options: Any) -> Any:
    """A model or a function, compiled by the backend."""
    own = {"autogram.inner": inner, **options.pop("options", {})}
    return torch.compile(model, backend=autogram, options=own, **options)


def compile_inside(module: nn.Module, inner: str = "aot_eager", **options: Any) -> None:
    """Compiles a module in place."""
    module.compile(backend=autogram, options={"autogram.inner": inner}, **options)


@contextmanager
def counted_parts() -> Iterator[list[CompiledPart]]:
    """Collects the parts that are compiled inside of a block."""
    found: list[CompiledPart] = []
    make = CompiledPart.__init__

    def noted(self: CompiledPart, *args: Any) -> None:
        make(self, *args)
        found.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledPart, "__init__", noted)
        yield found


def assert_step(
    engine: Engine,
    losses: Tensor,
    expected: Tensor,
    parameters: Sequence[Tensor],
    reference: Sequence[Tensor] | None = None,
) -> None:
    """Assert that Gramian, ordinary gradients and a fused step are those of other losses.

    Args:
        engine: The engine.
        losses: Those of the compiled model.
        expected: The same losses, or the graph of them that autograd is to differentiate.
        parameters: Those of J.
        reference: The parameters that the expected losses are computed from.
    """
    jacobian = reference_jacobian(expected, list(reference or parameters))
    assert_close_to_reference(losses.detach(), expected.detach())
    assert_close_to_reference(engine.compute_gramian(losses), jacobian @ jacobian.T)
    weights = torch.linspace(0.5, 2.0, losses.numel()).to(losses)
    flat = jacobian.T @ weights
    for differentiate in (
        lambda: losses.backward(weights.view(losses.shape), retain_graph=True),
        lambda: engine.backward(losses, lambda _: weights),
    ):
        for parameter in parameters:
            parameter.grad = None
        differentiate()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        assert_close_to_reference(torch.cat([x.flatten() for x in found]), flat)
    for parameter in parameters:
        parameter.grad = None


def assert_steps(
    model: nn.Module,
    run: Callable[..., Tensor],
    engine: Engine,
    batches: Sequence[tuple[Any, ...]],
    losses_of: Callable[..., Tensor],
) -> None:
    """Assert that steps of a compiled model, on one batch after the other, are those in eager."""
    parameters = trainable(model)
    for batch in batches:
        torch.manual_seed(1)
        with engine.paused():
            expected = losses_of(model(*batch), *batch)
        torch.manual_seed(1)
        assert_step(engine, losses_of(run(*batch), *batch), expected, parameters)


class Block(nn.Module):
    """A layer of a language model, which may be checkpointed."""

    def __init__(self, width: int, dropout: float = 0.0, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def body(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            found: Tensor = checkpoint(self.body, x, use_reentrant=False)
            return found
        return self.body(x)


class Decoder(nn.Module):
    """A small language model, whose embedding is tied to its head."""

    vocabulary = 11

    def __init__(
        self,
        layers: int = 2,
        dropout: float = 0.0,
        *,
        has_break: bool = False,
        is_tied: bool = True,
        is_checkpointed: bool = False,
    ) -> None:
        super().__init__()
        width = 8
        self.tokens, self.places = nn.Embedding(self.vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(
            Block(width, dropout, is_checkpointed=is_checkpointed) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight
        self.has_break = has_break

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for number, block in enumerate(self.blocks):
            if self.has_break and number == 1:
                torch._dynamo.graph_break()
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def language_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """A loss for each sequence."""
    return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)


def sequences(count: int, length: int) -> tuple[Tensor]:
    """A batch of a language model."""
    return (torch.randint(Decoder.vocabulary, (count, length)),)


class Images(nn.Module):
    """A convolutional network, with normalisation in groups or over the batch."""

    def __init__(self, channels: int = 4, *, over_batch: bool = False) -> None:
        super().__init__()

        def norm(count: int) -> nn.Module:
            return nn.BatchNorm2d(count) if over_batch else nn.GroupNorm(2, count)

        self.layers = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            norm(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, groups=2),
            norm(2 * channels),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * channels, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def class_losses(logits: Tensor, x: Tensor) -> Tensor:
    """A loss for each image."""
    return F.cross_entropy(logits, torch.arange(len(x)) % logits.shape[1], reduction="none")
