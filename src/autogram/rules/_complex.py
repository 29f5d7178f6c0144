"""Complex numbers as pairs of real ones.

Parameters are real. To them, a complex tensor is a real one with a last dimension of two. With g
the cotangent of y = x w, in PyTorch's convention of complex gradients,

    dw = g conj(x) = (g_r x_r + g_i x_i) + i (g_i x_r - g_r x_i)

which multiplies the vector g by a real matrix of size two. An einsum of complex tensors is
therefore one of real tensors, with indices for these two dimensions.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from autogram._blocks import as_real
from autogram._blocks.kernels.paths import unused_labels


def in_real_numbers(
    equation: str, cotangent: Tensor, *factors: Tensor, is_complex: bool
) -> tuple[str, tuple[Tensor, ...]]:
    """An einsum of a complex cotangent and real or complex factors, in real tensors.

    Args:
        equation: Indices of the cotangent and the factors, and of the operand's dimensions.
        cotangent: Complex, ``(k, *result)``.
        factors: Factors of the operand. Complex ones will be conjugated.
        is_complex: Whether the operand is complex. For a real operand, only the real part of the
            gradient is used.

    Returns:
        The new equation and its tensors. If the operand is complex, it has a last dimension of two.
    """
    are_complex = tuple([x.is_complex() for x in factors])
    if not is_complex and True not in are_complex:
        return equation, (cotangent.real, *factors)
    real = [as_real(cotangent)]
    places = [i for i, is_so in enumerate(are_complex) if is_so]
    for i, factor in enumerate(factors):
        if not are_complex[i]:
            real.append(factor)
        elif i == places[-1] and not is_complex:
            real.append(as_real(factor))
        else:
            real.append(torch.stack((as_real(factor), as_real(1j * factor)), -1))
    return _with_pairs(equation, are_complex, is_complex), tuple(real)


@lru_cache(maxsize=4096)
def _with_pairs(equation: str, are_complex: tuple[bool, ...], is_operand: bool) -> str:
    """The equation with indices added to complex tensors, from one tensor to the next."""
    inputs, output = equation.split("->")
    first, *others = inputs.split(",")
    chain = list(islice(unused_labels(equation), 1 + sum(are_complex)))
    positions, place = [first + chain[0]], 0
    for indices, is_complex in zip(others, are_complex, strict=True):
        positions.append(indices + "".join(chain[place : place + 2] if is_complex else ()))
        place += is_complex
    text = f"{','.join(positions)}->{output}{chain[-1]}"
    return text if is_operand else text.replace(chain[-1], "")
