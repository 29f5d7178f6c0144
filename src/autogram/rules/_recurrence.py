"""Replays recurrent layers step by step, with a separate graph.

One direction of one layer maps inputs x_t and a state (h, c), of which only an LSTM has c, by

    u_t = W_ih x_t + b_ih  v_t = W_hh h_{t-1} + b_hh  (m_t, c_t) = cell(u_t, v_t, h_{t-1}, c_{t-1})

and h_t = W_hr m_t, or m_t itself. Autograd goes back through the replay to the cotangents of u, v
and h, and computes no gradient of a weight (Werbos, Backpropagation Through Time: What It Does and
How to Do It, 1990, doi:10.1109/5.58337).

Steps are stored as *rows*: first the rows of one step, one for each sequence that is not over, then
the rows of the next step. Sequences are sorted by length, the longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

# From (u, v, h) to (m,), or from (u, v, h, c) to (m, c).
Cell = Callable[..., tuple[Tensor, ...]]


def tanh_cell(u: Tensor, v: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.RNN``."""
    return (torch.tanh(u + v),)


def relu_cell(u: Tensor, v: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.RNN`` with ``nonlinearity="relu"``."""
    return (torch.relu(u + v),)


def lstm_cell(u: Tensor, v: Tensor, _: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.LSTM``, before its projection."""
    i, f, g, o = (u + v).chunk(4, -1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def gru_cell(u: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.GRU``, whose reset gate multiplies a part of ``v`` alone."""
    units = h.shape[1]
    (u_rz, u_n), (v_rz, v_n) = u.split((2 * units, units), 1), v.split((2 * units, units), 1)
    r, z = (u_rz + v_rz).sigmoid().chunk(2, 1)
    n = torch.addcmul(u_n, r, v_n).tanh()
    return (torch.addcmul(n, z, h - n),)


class LayerDirection:
    """One direction of one layer, after its forward pass. Its steps are in the order of the rows.

    Args:
        cell: The function of one step.
        weights: In the order of a call's list: W_ih and W_hh, perhaps two biases, perhaps W_hr.
        input: In rows.
        initial: The initial states, ``(sequences, *)`` each.
        sizes: The number of rows of each step.
        is_reversed: Whether the last step comes first.
    """

    def __init__(
        self,
        cell: Cell,
        weights: Sequence[Tensor],
        input: Tensor,
        initial: Sequence[Tensor],
        sizes: tuple[int, ...],
        is_reversed: bool,
    ) -> None:
        self.has_biases, has_projection = len(weights) > 3, len(weights) % 2 == 1
        input_bias, hidden_bias = weights[2:4] if self.has_biases else (None, None)
        self.input = input
        self.u = F.linear(input, weights[0], input_bias).requires_grad_()
        self.final = initial
        order = slice(None, None, -1 if is_reversed else 1)
        steps = []
        for u in self.u.split(sizes)[order]:
            count = len(u)
            state = [x if count == len(x) else x[:count] for x in self.final]
            v = F.linear(state[0], weights[1], hidden_bias)
            m, *rest = cell(u, v, *state)
            h = F.linear(m, weights[-1]) if has_projection else m
            steps.append((state[0], v, m, h))
            self.final = [_renewed(*x) for x in zip(self.final, (h, *rest), strict=True)]
        self.before, v_steps, self.unprojected, self.output = zip(*steps[order], strict=True)
        self.v = v_steps if cell is gru_cell else ()  # other cells read u + v, so that du = dv
        self.projected = self.output if has_projection else ()


def _renewed(state: Tensor, values: Tensor) -> Tensor:
    """A state with new values for the first sequences. The others are over, or have not begun."""
    count = len(values)
    return values if count == len(state) else torch.cat([values, state[count:]])


def cotangents(result: Tensor, given: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    """The cotangents ``(k, *tensor)`` of some tensors, from those of a result ``(k, *result)``."""
    differentiate = partial(torch.autograd.grad, result, wanted, materialize_grads=True)
    if len(given) == 1:
        return [d.unsqueeze(0) for d in differentiate(given[0])]
    if torch.is_anomaly_enabled():  # anomaly mode reads values, which a batched pass does not allow
        each = [differentiate(g, retain_graph=True) for g in given]
        return [torch.stack(gradients) for gradients in zip(*each, strict=True)]
    gradients = differentiate(given, is_grads_batched=True)
    return [d.expand(len(given), *x.shape) for x, d in zip(wanted, gradients, strict=True)]
