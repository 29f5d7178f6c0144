"""Rules of convolutions, as matrix products with unfolded patches.

With x^[n, i, q, l] the value that tap q of the kernel reads from channel i for output position l,

    dW[o, i, q] = sum_l g[n, o, l] x^[n, i, q, l]        dc[o] = sum_l g[n, o, l]

for each sample n, within each group of channels (Rochette et al. 2019, arXiv:1912.06015).

A transposed convolution is the derivative of a convolution by its input; input and cotangent
therefore change places: with g^[n, o, q, l] the patches of the cotangent,

    dW[i, o, q] = sum_l x[n, i, l] g^[n, o, q, l]        dc[o] = sum_l g[n, o, l]

In the equations of the blocks, ``q`` is the group of channels and ``xyz`` are the taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from autogram._blocks import Adjoint, Block, Layout, block_of_equation
from autogram.rules._recipe import Formula, Recipe, positions, product
from autogram.rules._registry import register_rule

PerDimension = int | Sequence[int]


@register_rule(torch.conv1d, torch.conv2d, torch.conv3d)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: PerDimension = 1,
    padding: PerDimension | str = 0,
    dilation: PerDimension = 1,
    groups: int = 1,
) -> list[Recipe]:
    """Kernel and bias of a convolution with any stride, padding, dilation and groups."""
    sizes = Convolution.of(weight, stride, padding, dilation, groups)
    return _recipes(input, weight, bias, sizes.blocks, groups)


@register_rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: PerDimension = 1,
    padding: PerDimension = 0,
    output_padding: PerDimension = 0,  # noqa: ARG001 - it shows in the shape of the cotangent
    groups: int = 1,
    dilation: PerDimension = 1,
) -> list[Recipe]:
    """Kernel and bias of a transposed convolution with any stride, padding, dilation and groups."""
    sizes = Convolution.of(weight, stride, padding, dilation, groups)
    return _recipes(input, weight, bias, sizes.transposed_blocks, groups)


def _recipes(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    blocks: Callable[..., tuple[Block]],
    groups: int,
) -> list[Recipe]:
    """Recipes of a kernel and a bias. An input without batch dimension is one sample."""
    space = weight.dim() - 2
    dims, batch = ("n", "n") if input.dim() == space + 2 else ("-", "")
    recipes = [Recipe((weight,), Formula(dims, blocks, groups), (input,))]
    if bias is not None:
        recipes.append(product(bias, f"{batch}o{positions(space)}->o", dims=dims))
    return recipes


class Convolution(NamedTuple):
    """The sizes of a convolution: the kernel's shape, and sizes for each spatial dimension."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        weight: Tensor,
        stride: PerDimension,
        padding: PerDimension | str,
        dilation: PerDimension,
        groups: int,
    ) -> Convolution:
        """The sizes from a call's arguments."""
        shape = tuple(weight.shape)
        n = len(shape) - 2
        dilations = per_dimension(dilation, n)
        if padding == "same":
            # Like torch: where the sum is odd, the additional zero comes last.
            totals = [d * (size - 1) for d, size in zip(dilations, shape[2:], strict=True)]
        else:
            totals = [2 * p for p in per_dimension(0 if isinstance(padding, str) else padding, n)]
        pads = tuple([(total // 2, total - total // 2) for total in totals])
        return cls(shape, per_dimension(stride, n), pads, dilations, groups)

    def blocks(self, layout: Layout | None, cotangent: Tensor, input: Tensor) -> tuple[Block]:
        """The block of the kernel: cotangents times patches of the input."""
        cotangent, input, t, taps = self._batched(cotangent, input)
        equation = f"nqo{t},n{t}{taps}qi->qoi{taps}"
        block = block_of_equation(
            equation, "n", layout, self._by_group(cotangent, 2), self._patches(input)
        )
        is_symmetric = all(before == behind for before, behind in self.padding)
        if is_symmetric and (layout is None or not (layout.has_before or layout.has_after)):
            of_samples = self._gradients if layout is not None and self._has_patches else None
            given = cotangent, (input,), block.parameter, of_samples
            block = Block(block.equation, block.operands, Adjoint(self._gradient, *given))
        return (block,)

    def transposed_blocks(
        self, layout: Layout | None, cotangent: Tensor, input: Tensor
    ) -> tuple[Block]:
        """The block of a transposed convolution's kernel: patches of cotangents times inputs."""
        cotangent, input, t, taps = self._batched(cotangent, input)
        patches = self._patches(cotangent.flatten(0, 1))
        for dim, size in enumerate(input.shape[2:], start=1):
            # Where the dilation exceeds the stride, `output_padding` may leave space for one more.
            patches = patches.narrow(dim, 0, size)
        patches = patches.unflatten(0, cotangent.shape[:2])
        equation = f"n{t}{taps}qo,nqi{t}->qio{taps}"
        return (block_of_equation(equation, "n", layout, patches, self._by_group(input, 1)),)

    def _batched(self, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor, str, str]:
        """Cotangents ``(k, n, o, *l)`` and inputs ``(n, i, *space)``; indices of ``l`` and taps."""
        space = len(self.stride)
        if input.dim() == space + 1:
            cotangent, input = cotangent.unsqueeze(1), input.unsqueeze(0)
        return cotangent, input, positions(space), "xyz"[:space]

    def _by_group(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor with a dimension of channels split into groups and their channels."""
        if self.groups == 1:
            return tensor.unsqueeze(dim)
        split: Tensor = tensor.unflatten(dim, (self.groups, -1))
        return split

    @property
    def _has_patches(self) -> bool:
        """Whether the kernel sees more than one position at a time."""
        return any(size > 1 for size in self.weight[2:])

    def _patches(self, input: Tensor) -> Tensor:
        """The patches ``(n, *l, *taps, q, i)`` of an input ``(n, channels, *space)``.

        They are a view of the padded input, with channels last in memory. The contraction copies
        the patches one part at a time, and thus reads the channels of a position together.
        """
        zeros = [zeros for both in reversed(self.padding) for zeros in both]
        input = input.movedim(1, -1)
        if any(zeros):
            input = F.pad(input, (0, 0, *zeros))
        elif self._has_patches:  # without patches, products need no copy
            input = input.contiguous()
        sizes = zip(self.weight[2:], self.stride, self.dilation, strict=True)
        for dim, (size, step, hole) in enumerate(sizes, start=1):
            input = input.unfold(dim, hole * (size - 1) + 1, step)
            if hole > 1:
                input = input[..., ::hole]
        return self._by_group(input.movedim(len(self.stride) + 1, -1), input.dim() - 1)

    def _gradient(self, cotangent: Tensor, input: Tensor) -> Tensor:
        """The kernel's gradient ``(q, o, i, *taps)`` by PyTorch, which needs no patches."""
        return self._by_group(self._kernel(cotangent, input, 1), 0)

    def _gradients(self, cotangent: Tensor, input: Tensor) -> Tensor:
        """The gradient for each sample, ``(n, q, o, i, *taps)``, with samples as groups."""
        n = len(input)
        sides = [x.reshape(1, -1, *x.shape[2:]) for x in (cotangent, input)]
        gradients = self._kernel(sides[0], sides[1], n)  # (n * q * o, i, *taps)
        return gradients.view(n, self.groups, -1, *gradients.shape[1:])

    def _kernel(self, cotangent: Tensor, input: Tensor, n: int) -> Tensor:
        """The gradient of a kernel for n times as many groups."""
        function: Any = (conv1d_weight, conv2d_weight, conv3d_weight)[len(self.stride) - 1]
        zeros = tuple(before for before, _ in self.padding)
        sizes = (self.stride, zeros, self.dilation, n * self.groups)
        shape = (n * self.weight[0], *self.weight[1:])
        gradient: Tensor = function(input, shape, cotangent, *sizes)
        return gradient


def per_dimension(sizes: PerDimension, n: int) -> tuple[int, ...]:
    """A size for each of n dimensions, where one may stand for all."""
    values = tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)
    return values * n if len(values) == 1 else values
