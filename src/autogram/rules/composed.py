"""Recurrent layers composed of other calls, as in PyTorch where no kernel computes all of them.

The step of a cell calls two linear layers, which have a rule, so that no rule has to replay the
step. Several layers with dropout become calls of one layer each, which can be replayed, with
dropout between them; the result of a call for all layers would not show its random mask. The
operations have PyTorch's order, and are in place where PyTorch's are. Results, and the state of the
random numbers, are therefore the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    """Contributions of the inputs and the hidden states to the gates.

    Inputs and states each have weights and a bias. Calls may name them.
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


def in_layers(function: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
    """Several recurrent layers, one by one, with dropout between them.

    Args:
        function: `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`.
        args: Arguments of a call for all layers, of padded or packed sequences.

    Returns:
        The output, and the final states of all layers: bit for bit the result of the call.
    """
    given, hx, params, options = parts_of_call(args)
    has_biases, count, dropout, train, is_bidirectional, *rest = options
    (input, *sizes), is_single = given, isinstance(hx, Tensor)
    is_batch_first = rest == [True]  # packed sequences have no such option
    if is_batch_first:
        input = input.transpose(0, 1)
    directions, each = 1 + is_bidirectional, len(params) // count
    finals = []
    for layer in range(count):
        states = [x.narrow(0, layer * directions, directions) for x in ((hx,) if is_single else hx)]
        weights = params[layer * each : (layer + 1) * each]
        known = (states[0] if is_single else states), weights, has_biases, 1, 0.0, train
        input, *final = function(input, *sizes, *known, is_bidirectional, *[False for _ in rest])
        finals.append(final)
        if layer < count - 1:
            input = torch.dropout(input, dropout, True)
    output = input.transpose(0, 1) if is_batch_first else input
    return output, *[torch.cat(of_layers) for of_layers in zip(*finals, strict=True)]


def parts_of_call(args: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """The input, with batch sizes if it is packed; initial states; weights; and options."""
    inputs = 2 if isinstance(args[3], (list, tuple)) else 1
    return args[:inputs], args[inputs], args[inputs + 1], args[inputs + 2 :]


def of_step(body: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | None:
    """The step of a cell, or ``None`` if there is a kernel, or autocast rounds arguments."""
    is_rounded = torch._C._is_any_autocast_enabled()
    return body if args and args[0].device.type == "cpu" and not is_rounded else None


def of_layers(function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | None:
    """The layers, or ``None`` if no dropout is between them, or one kernel computes all."""
    if len(args) != 9:
        return None
    _, count, dropout, train, *_ = parts_of_call(args)[3]
    has_dropout = count > 1 and bool(dropout) and train
    return partial(in_layers, function) if has_dropout and not _has_kernel(args[0]) else None


def _has_kernel(input: Tensor) -> bool:
    """Whether one kernel computes all layers, with its own random numbers."""
    if input.is_cuda:
        return torch.version.hip is not None or torch.cudnn_is_acceptable(input)
    return input.device.type != "cpu"


COMPOSED: dict[Callable[..., Any], Callable[[Sequence[Any]], Callable[..., Any] | None]] = {}
"""For some functions with rules: returns a composed form of a call, or ``None``."""
