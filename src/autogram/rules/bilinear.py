"""Rule of ``F.bilinear``: y[t, o] = sum_ij x1[t, i] W[o, i, j] x2[t, j] + c[o]."""

from __future__ import annotations

import torch
from torch import Tensor

from autogram.rules._recipe import Recipe, positions, product
from autogram.rules._registry import register_rule


@register_rule(torch.bilinear)
def bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Recipe]:
    """Weight and bias: dW[o, i, j] = sum_t g[t, o] x1[t, i] x2[t, j]."""
    t = positions(input1.dim() - 1)
    recipes = [product(weight, f"{t}o,{t}i,{t}j->oij", input1, input2)]
    if bias is not None:
        recipes.append(product(bias, f"{t}o->o"))
    return recipes
