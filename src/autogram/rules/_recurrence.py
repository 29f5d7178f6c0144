"""Recurrent layers replayed step by step, and the backward pass through their time.

One direction of one layer maps inputs x_t and a state (h, c), of which only an LSTM has c, by

    u_t = W_ih x_t + b_ih  v_t = W_hh h_{t-1} + b_hh  (m_t, c_t) = cell(u_t, v_t, h_{t-1}, c_{t-1})

and h_t = W_hr m_t, or m_t itself. It acts on each hidden unit alone, so that its derivatives
are factors, which autograd finds for all steps at once. What is left of the backward pass is

    dm_t = W_hr^T dh_t       du_t = dm_t dm/du + dc_t dc/du       dv_t = dm_t dm/dv + dc_t dc/dv

    dh_{t-1} = W_hh^T dv_t + dm_t dm/dh + dc_t dc/dh       dc_{t-1} = dm_t dm/dc + dc_t dc/dc

Steps lie in *rows*: first those of one step, one for each sequence that is not over, then those of
the next. Sequences are sorted by length, so that those that go on come first.

References:
    Werbos, Backpropagation Through Time: What It Does and How to Do It, 1990, doi:10.1109/5.58337.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# From (u, v, h) to (m,), or from (u, v, h, c) to (m, c).
Cell = Callable[..., tuple[Tensor, ...]]


def tanh_cell(u: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.RNN``."""
    del h
    return (torch.tanh(u + v),)


def relu_cell(u: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.RNN`` with ``nonlinearity="relu"``."""
    del h
    return (torch.relu(u + v),)


def lstm_cell(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.LSTM``, before its projection."""
    del h
    i, f, g, o = (u + v).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(u: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """One step of ``nn.GRU``, whose reset gate multiplies a part of ``v`` alone."""
    (u_r, u_z, u_n), (v_r, v_z, v_n) = u.chunk(3, -1), v.chunk(3, -1)
    z = (u_z + v_z).sigmoid()
    n = (u_n + (u_r + v_r).sigmoid() * v_n).tanh()
    return (n + z * (h - n),)


class Weights(NamedTuple):
    """Those of one direction of one layer."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None

    @classmethod
    def of(cls, params: Sequence[Tensor]) -> Weights:
        """From a call's list, which has two to five for each direction of each layer."""
        has_biases, has_projection = len(params) > 3, len(params) % 2 == 1
        return cls(
            input=params[0],
            hidden=params[1],
            input_bias=params[2] if has_biases else None,
            hidden_bias=params[3] if has_biases else None,
            projection=params[-1] if has_projection else None,
        )


class Cotangents(NamedTuple):
    """What the backward pass of one direction gives, each with a leading dimension ``k``."""

    u: Tensor
    v: Tensor
    h: Tensor
    """Of the output: what was given, and what comes back from the steps that follow."""
    initial: list[Tensor]
    """Of the initial states."""


class Direction:
    """One direction of one layer, after its forward pass.

    Args:
        cell: What is done at each step.
        weights: Its weights.
        input: In rows.
        initial: The initial states, ``(sequences, *)`` each.
        steps: The rows of each step, in the order of this direction.
    """

    def __init__(
        self,
        cell: Cell,
        weights: Weights,
        input: Tensor,
        initial: Sequence[Tensor],
        steps: Sequence[slice],
    ) -> None:
        self.weights, self.input, self._steps = weights, input, steps
        u = F.linear(input, weights.input, weights.input_bias)
        before, after = [], []
        state = list(initial)
        for rows in steps:
            now = [x[: rows.stop - rows.start] for x in state]
            v = F.linear(now[0], weights.hidden, weights.hidden_bias)
            m, *rest = cell(u[rows], v, *now)
            h = m if weights.projection is None else F.linear(m, weights.projection)
            before.append((v, *now))
            after.append((h,) if h is m else (h, m))
            state = _renewed(state, (h, *rest), 0)
        v, *states = self._in_rows(before, 0)
        found = self._in_rows(after, 0)
        self.before, self.output, self.unprojected = states[0], found[0], found[-1]
        self._slopes = _slopes(cell, (u, v, *states), self.unprojected.shape[1])
        self._is_sum = cell is not gru_cell  # whether the cell reads u + v alone

    def backward(self, d_output: Tensor, d_final: Sequence[Tensor]) -> Cotangents:
        """The cotangents, from those of the output ``(k, rows, *)`` and of the final states.

        Only what a step hands to the one before it is computed step by step.
        """
        hidden, projection = self.weights.hidden, self.weights.projection
        by_u, by_v, *by_state = self._slopes
        found = []
        d_state = list(d_final)
        for rows in reversed(self._steps):
            now = [x[:, : rows.stop - rows.start] for x in d_state]
            d_h = d_output[:, rows] + now[0]
            d_after = [d_h if projection is None else d_h @ projection, *now[1:]]
            d_v = _weighted(d_after, by_v, rows)
            through = [_weighted(d_after, slopes, rows) for slopes in by_state]
            found.append((d_h, d_v))
            d_state = _renewed(d_state, (d_v @ hidden + through[0], *through[1:]), 1)
        d_h, d_v = self._in_rows(found[::-1], 1)
        d_u = d_v if self._is_sum else _weighted([d_h], by_u, slice(None))  # m = h in a GRU
        return Cotangents(d_u, d_v, d_h, d_state)

    def _in_rows(self, found: Sequence[tuple[Tensor, ...]], dim: int) -> list[Tensor]:
        """Some tensors of each step, in the order of this direction, as one of all rows each."""
        order = sorted(range(len(found)), key=lambda i: self._steps[i].start)
        return [torch.cat([found[i][j] for i in order], dim) for j in range(len(found[0]))]


def _slopes(cell: Cell, inputs: Sequence[Tensor], units: int) -> list[list[Tensor | None]]:
    """For each input of a cell, the derivatives of the outputs, ``(rows, gates, units)``.

    ``None`` where an output does not depend on an input.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        by_output = [
            torch.autograd.grad(y.sum(), leaves, retain_graph=True, allow_unused=True)
            for y in cell(*leaves)
        ]
    return [
        [None if x is None else x.unflatten(1, (-1, units)) for x in by_input]
        for by_input in zip(*by_output, strict=True)
    ]


def _weighted(cotangents: Sequence[Tensor], slopes: Sequence[Tensor | None], rows: slice) -> Tensor:
    """The cotangent of an input of a cell, from those of its outputs ``(k, rows, units)``."""
    total: Tensor | None = None
    for d, slope in zip(cotangents, slopes, strict=True):
        if slope is not None:
            part = d.unsqueeze(2) * slope[rows]
            total = part if total is None else total + part
    return cotangents[0].new_zeros(()) if total is None else total.flatten(2)


def _renewed(states: Sequence[Tensor], values: Sequence[Tensor], dim: int) -> list[Tensor]:
    """States with new values of the first sequences; the others are over, or have not begun."""
    return [
        new if new.shape == old.shape else torch.cat([new, old.tensor_split([n], dim)[1]], dim)
        for old, new in zip(states, values, strict=True)
        for n in (new.shape[dim],)
    ]
