"""Cells of recurrent layers, composed of other calls, as PyTorch does it where it has no kernel.

Two of these calls are linear layers, which have a rule. So no rule has to replay the step. The
operations are in PyTorch's order, and in place where PyTorch's are, so that the results are the
same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _gates(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the inputs and the hidden states contribute to the gates.

    There are weights for inputs and for states, and a bias for each. Calls may name them.
    """
    v = F.linear(hx, w_hh, b_hh)
    return F.linear(input, w_ih, b_ih), v


def tanh_step(input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
    """One step of ``nn.RNNCell``."""
    u, v = _gates(input, hx, *weights, **named)
    return v.add_(u).tanh()


def relu_step(input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
    """One step of ``nn.RNNCell`` with ``nonlinearity="relu"``."""
    u, v = _gates(input, hx, *weights, **named)
    return v.add_(u).relu()


def lstm_step(
    input: Tensor, hx: Sequence[Tensor], *weights: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """One step of ``nn.LSTMCell``."""
    h, c = hx
    u, v = _gates(input, h, *weights, **named)
    i, f, g, o = torch.unsafe_chunk(v.add_(u), 4, 1)
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    c = (f * c).add_(i * g)
    return o * c.tanh(), c


def gru_step(input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
    """One step of ``nn.GRUCell``."""
    u, v = _gates(input, hx, *weights, **named)
    u_r, u_z, u_n = torch.unsafe_chunk(u, 3, 1)
    v_r, v_z, v_n = torch.unsafe_chunk(v, 3, 1)
    r, z = v_r.add_(u_r).sigmoid_(), v_z.add_(u_z).sigmoid_()
    n = u_n.add(v_n.mul_(r)).tanh_()
    return (hx - n).mul_(z).add_(n)


COMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For the rules of some functions, what makes the calls of which PyTorch may compose these."""


def composed(rule: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | None:
    """What makes the calls of which PyTorch composes the function of a rule.

    ``None`` if PyTorch has a kernel for all of it, or autocast rounds its arguments.
    """
    is_rounded = torch._C._is_any_autocast_enabled()
    is_composed = bool(args) and args[0].device.type == "cpu" and not is_rounded
    return COMPOSED[rule] if is_composed else None
