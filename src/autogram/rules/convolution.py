"""Rules of convolutions, as matrix products with unfolded patches.

With x^[n, i, q, l] the value that tap q of the kernel sees in channel i at output position l,

    dW[o, i, q] = sum_l g[n, o, l] x^[n, i, q, l]        dc[o] = sum_l g[n, o, l]

for each sample n, within each group of channels (Rochette et al. 2019, arXiv:1912.06015).

A transposed convolution is the derivative of a convolution by its input, so input and cotangent
change places: with g^[n, o, q, l] the patches of the cotangent,

    dW[i, o, q] = sum_l x[n, i, l] g^[n, o, q, l]        dc[o] = sum_l g[n, o, l]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from autogram.rules._recipe import Recipe, positions, product
from autogram.rules._registry import register_rule

Sizes = int | Sequence[int]


@register_rule(torch.conv1d, torch.conv2d, torch.conv3d)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> list[Recipe]:
    """Kernel and bias of a convolution with any stride, padding, dilation and groups."""
    n = weight.dim() - 2
    batch = "n" if input.dim() == n + 2 else ""  # an input without batch dimension is one sample
    dims = batch or "-"
    recipes = []
    if weight.requires_grad:
        window = Window.of(tuple(weight.shape[2:]), stride, padding, dilation)
        t, taps = positions(n), "xyz"[:n]
        equation = f"{batch}qo{t},{batch}{t}{taps}qi->qoi{taps}"
        prepare = partial(_unfold, window, groups)
        gradient = partial(_gradient, window, groups, tuple(weight.shape))
        recipes.append(
            product(
                weight,
                equation,
                input,
                prepare=prepare,
                dims=dims,
                groups=groups,
                gradient=gradient if window.is_symmetric else None,
            )
        )
    if bias is not None and bias.requires_grad:
        recipes.append(product(bias, f"{batch}o{positions(n)}->o", dims=dims))
    return recipes


@register_rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,  # noqa: ARG001 - it shows in the shape of the cotangent
    groups: int = 1,
    dilation: Sizes = 1,
) -> list[Recipe]:
    """Kernel and bias of a transposed convolution with any stride, padding, dilation and groups."""
    n = weight.dim() - 2
    batch = "n" if input.dim() == n + 2 else ""
    dims = batch or "-"
    recipes = []
    if weight.requires_grad:
        window = Window.of(tuple(weight.shape[2:]), stride, padding, dilation)
        t, taps = positions(n), "xyz"[:n]
        equation = f"{batch}{t}{taps}qo,{batch}qi{t}->qio{taps}"
        prepare = partial(_unfold_cotangent, window, groups)
        recipes.append(product(weight, equation, input, prepare=prepare, dims=dims, groups=groups))
    if bias is not None and bias.requires_grad:
        recipes.append(product(bias, f"{batch}o{positions(n)}->o", dims=dims))
    return recipes


@dataclass(frozen=True)
class Window:
    """Which inputs each output position sees, per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and behind."""

    @classmethod
    def of(
        cls, kernel: tuple[int, ...], stride: Sizes, padding: Sizes | str, dilation: Sizes
    ) -> Window:
        """The window of a convolution's arguments."""
        n = len(kernel)
        dilations = _per_dimension(dilation, n)
        if padding == "same":
            # As torch does: where the sum is odd, the additional zero comes behind.
            totals = [d * (size - 1) for d, size in zip(dilations, kernel, strict=True)]
            pads = tuple((total // 2, total - total // 2) for total in totals)
        else:
            zeros = 0 if isinstance(padding, str) else padding
            pads = tuple((p, p) for p in _per_dimension(zeros, n))
        return cls(kernel, _per_dimension(stride, n), dilations, pads)

    @property
    def is_symmetric(self) -> bool:
        """Whether there are as many zeros before as behind."""
        return all(before == behind for before, behind in self.padding)

    def patches(self, input: Tensor) -> Tensor:
        """What the kernel sees, ``(n, *positions, *kernel, channels)``.

        A strided view of the input with its channels last. The contraction copies what it needs,
        one part at a time, in runs as long as the channels: on a CPU, half of the time of
        ``F.unfold``, which writes all of it first and reads it with strides.
        """
        input = self._pad(input)
        sizes = zip(self.kernel, self.stride, self.dilation, strict=True)
        for dim, (size, step, hole) in enumerate(sizes, start=1):
            input = input.unfold(dim, hole * (size - 1) + 1, step)[..., ::hole]
        return input.movedim(len(self.kernel) + 1, -1)

    def _pad(self, input: Tensor) -> Tensor:
        """The input ``(n, channels, *space)`` as ``(n, *space, channels)`` among zeros, contiguous.

        ``F.pad`` writes zeros everywhere first, which takes as long as copying the input.
        """
        n, channels, *space = input.shape
        sizes = [size + sum(pad) for size, pad in zip(space, self.padding, strict=True)]
        padded = input.new_empty(n, *sizes, channels)
        inside = padded
        for dim, (size, (before, behind)) in enumerate(zip(space, self.padding, strict=True), 1):
            inside.narrow(dim, 0, before).zero_()
            inside.narrow(dim, before + size, behind).zero_()
            inside = inside.narrow(dim, before, size)
        inside.copy_(input.movedim(1, -1))
        return padded


def _unfold(window: Window, groups: int, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents ``(k, n, q, o, *l)`` and patches ``(n, *l, *kernel, q, i)``, q the groups."""
    has_batch = input.dim() == len(window.kernel) + 2
    patches = window.patches(input if has_batch else input.unsqueeze(0))
    patches = patches.unflatten(-1, (groups, -1))
    return (
        cotangent.unflatten(1 + has_batch, (groups, -1)),
        patches if has_batch else patches.squeeze(0),
    )


def _unfold_cotangent(
    window: Window, groups: int, cotangent: Tensor, input: Tensor
) -> tuple[Tensor, Tensor]:
    """Patches of the cotangents ``(k, n, *l, *kernel, q, o)`` and inputs ``(n, q, i, *l)``."""
    n = len(window.kernel)
    has_batch = input.dim() == n + 2
    together = cotangent.flatten(0, 1) if has_batch else cotangent
    patches = window.patches(together).unflatten(-1, (groups, -1))
    for dim, size in enumerate(input.shape[-n:], start=1):
        # Where the dilation exceeds the stride, additional output may hold another window.
        patches = patches.narrow(dim, 0, size)
    return (
        patches.unflatten(0, cotangent.shape[:2]) if has_batch else patches,
        input.unflatten(int(has_batch), (groups, -1)),
    )


_GRADIENTS: dict[int, Callable[..., Tensor]] = {
    1: conv1d_weight,
    2: conv2d_weight,
    3: conv3d_weight,
}


def _gradient(
    window: Window, groups: int, shape: tuple[int, ...], cotangent: Tensor, input: Tensor
) -> Tensor:
    """The gradient of the weight, ``(q, o, i, *kernel)``, by the kernel of a backward pass."""
    n = len(window.kernel)
    if input.dim() == n + 1:
        cotangent, input = cotangent.unsqueeze(0), input.unsqueeze(0)
    zeros = tuple(before for before, _ in window.padding)
    sizes = window.stride, zeros, window.dilation
    gradient = _GRADIENTS[n](input, shape, cotangent, *sizes, groups)
    by_group: Tensor = gradient.unflatten(0, (groups, -1))
    return by_group


def _per_dimension(sizes: Sizes, n: int) -> tuple[int, ...]:
    """One size for each spatial dimension."""
    values = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return values * n if len(values) == 1 else values
