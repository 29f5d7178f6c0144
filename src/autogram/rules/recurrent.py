"""Rules of recurrent layers and of their cells.

A call reads the weights of all its layers at all steps. Let u be the inputs' contribution to the
gates, and v that of the hidden states. Then the blocks of the weights are those of linear
layers with positions t:

    u[t, o] = sum_i W_ih[o, i] x[t, i] + b_ih[o]        dW_ih[o, i] = sum_t du[t, o] x[t, i]
    v[t, o] = sum_j W_hh[o, j] h[t-1, j] + b_hh[o]      dW_hh[o, j] = sum_t dv[t, o] h[t-1, j]

The call returns neither u nor v. It is therefore replayed from its input, its initial states and
its weights, once for each result that the losses depend on, and autograd gives du and dv.
The single step of a cell has a rule where PyTorch has a kernel for it. Elsewhere, it is
:mod:`composed <autogram.rules.composed>` of linear layers. Layers with dropout between them are
likewise composed of single layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from autogram._blocks import Block, Layout, Routed, block_of_equation
from autogram.errors import MixedSamplesError
from autogram.rules import _recurrence as recurrence
from autogram.rules import composed
from autogram.rules._recipe import Formula, Recipe, promoted
from autogram.rules._recurrence import Cell, LayerDirection, cotangents
from autogram.rules._registry import register_rule

States = Tensor | Sequence[Tensor]


def _register(
    cell: Cell,
    of_layers: Callable[..., Any],
    of_cell: Callable[..., Any],
    by_calls: Callable[..., Any],
) -> None:
    """Registers the rules of the layers and of the single step of one kind of cell."""

    @register_rule(of_layers)
    def layers(*args: Any) -> list[Recipe] | None:
        return _layers(cell, *args)

    @register_rule(of_cell)
    def one_step(input: Tensor, hx: States, *params: Tensor | None) -> list[Recipe]:
        return _one_step(cell, input, hx, params)

    composed.COMPOSED[one_step] = partial(composed.of_step, by_calls)
    composed.COMPOSED[layers] = partial(composed.of_layers, of_layers)
    # Reports show rules by these names.
    layers.__qualname__, one_step.__qualname__ = of_layers.__name__, of_cell.__name__


_register(recurrence.tanh_cell, torch.rnn_tanh, torch.rnn_tanh_cell, composed.tanh_step)
_register(recurrence.relu_cell, torch.rnn_relu, torch.rnn_relu_cell, composed.relu_step)
_register(recurrence.lstm_cell, torch.lstm, torch.lstm_cell, composed.lstm_step)
_register(recurrence.gru_cell, torch.gru, torch.gru_cell, composed.gru_step)


def _layers(cell: Cell, *args: Any) -> list[Recipe] | None:
    """All layers at all steps, for sequences of one length or packed ones."""
    (input, *packed), hx, params, options = composed.parts_of_call(args)
    _, layers, dropout, train, is_bidirectional, *batch_first = options
    if packed:
        dims, sizes = "S-", tuple(packed[0].tolist())
    else:
        dims = "S--" if batch_first[0] else "-S-"
        input = input.transpose(0, 1) if batch_first[0] else input
        sizes = (input.shape[1],) * input.shape[0]
    if dropout and train and layers > 1:
        return None  # no replay knows the random mask, which only the kernel's node saves
    states = _states(hx)
    replay = partial(Replay, cell, len(states), sizes, 1 + is_bidirectional)
    replays = [replay(dims, None), *(replay("-S-", i) for i in range(len(states)))]
    return _recipes(replays, input, (*states, *params))


def _one_step(
    cell: Cell, input: Tensor, hx: States, params: Sequence[Tensor | None]
) -> list[Recipe]:
    """One layer at one step, which returns only the final states."""
    states = _states(hx)
    replays = [Replay(cell, len(states), (len(input),), 1, "S-", i) for i in range(len(states))]
    return _recipes(replays, input, (*states, *(x for x in params if x is not None)))


def _states(hx: States) -> tuple[Tensor, ...]:
    """The initial states of a call; an LSTM has two."""
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _recipes(
    replays: Sequence[Replay], input: Tensor, operands: tuple[Tensor, ...]
) -> list[Recipe]:
    formulas = [Formula(replay.dims, replay.blocks) for replay in replays]
    return [Recipe(operands, of, (input, *operands), i) for i, of in enumerate(formulas)]


@dataclass(frozen=True)
class Replay:
    """The blocks of a call's initial states and weights, from one of the call's results."""

    cell: Cell
    n_states: int
    sizes: tuple[int, ...]
    """The number of sequences at each step."""
    directions: int
    dims: str
    final: int | None
    """Number of the final state that is the result, or ``None`` for the output at all steps."""
    is_reversed: bool = False
    """Whether the first direction begins with the last step."""

    def blocks(self, layout: Layout | None, *tensors: Tensor) -> Iterator[Block]:
        """The blocks of the initial states, then of the weights, layer by layer."""
        cotangent, input, *operands = promoted(*tensors)
        is_cell = operands[0].dim() == 2
        if layout is not None and cotangent.dim() == 3 and not is_cell:
            layout = self._by_sequence(layout, cotangent)
        with torch.enable_grad():
            states = [x.detach().requires_grad_() for x in operands[: self.n_states]]
            initial = [x.unsqueeze(0) if is_cell else x for x in states]
            params = operands[self.n_states :]
            directions, result = self._forward(input.flatten(0, -2), initial, params)
        if self.final is None and self.dims == "S--":
            cotangent = cotangent.transpose(1, 2)
        given = cotangent.reshape(len(cotangent), *result.shape)
        wanted = [x for of in directions for x in (of.u, *of.v, *of.projected)]
        gradients = iter(cotangents(result, given, [*states, *wanted]))

        def block(equation: str, *factors: Tensor) -> Block:
            return block_of_equation(equation, self.dims, layout, *factors)

        for _ in states:
            yield block("So->So" if is_cell else "RSo->RSo", next(gradients))
        for of in directions:
            u = self._by_step([next(gradients)], 1)
            v = self._by_step(list(islice(gradients, len(of.v))), 1) if of.v else u
            yield block("TSo,TSi->oi", u, self._by_step([of.input], 0))
            yield block("TSo,TSi->oi", v, self._by_step(of.before, 0))
            if of.has_biases:
                yield block("TSo->o", u)
                yield block("TSo->o", v)
            if of.projected:
                h = self._by_step(list(islice(gradients, len(of.projected))), 1)
                yield block("TSo,TSi->oi", h, self._by_step(of.unprojected, 0))

    def _forward(
        self, input: Tensor, states: Sequence[Tensor], params: Sequence[Tensor]
    ) -> tuple[list[LayerDirection], Tensor]:
        """The directions of all layers after their forward pass, and the result of the call."""
        each = len(params) // len(states[0])
        layers: list[LayerDirection] = []
        for i in range(0, len(states[0]), self.directions):
            for j in range(i, i + self.directions):
                weights, initial = params[j * each : (j + 1) * each], [x[j] for x in states]
                is_reversed = j > i or self.is_reversed
                own = self.cell, weights, input, initial, self.sizes, is_reversed
                layers.append(LayerDirection(*own))
            input = torch.cat([torch.cat(of.output) for of in layers[i:]], 1)
        if self.final is None:
            return layers, input
        return layers, torch.stack([of.final[self.final] for of in layers])

    def _by_step(self, steps: Sequence[Tensor], dim: int) -> Tensor:
        """Rows as steps and sequences, with zeros after the end of a sequence."""
        rows = (steps[0] if len(steps) == 1 else torch.cat(list(steps), dim)).detach()
        if self.sizes[0] == self.sizes[-1]:
            by_step: Tensor = rows.unflatten(dim, (len(self.sizes), -1))
            return by_step
        numbers = [step for step, size in enumerate(self.sizes) for _ in range(size)]
        layout = Routed(0, len(self.sizes), torch.tensor(numbers, device="cpu"))
        return layout.split(rows, dim)

    def _by_sequence(self, layout: Layout, cotangent: Tensor) -> Layout:
        """Converts the samples' places among rows to places among packed sequences.

        A row may have no cotangent, and no known owner, where other steps of its sequence have.
        """
        has_cotangent = (cotangent != 0).any(0).any(1)
        owners = torch.where(has_cotangent, layout.owners(cotangent[0]).view(-1), -1).cpu()
        owners = self._by_step([owners + 1], 0) - 1
        samples = owners.amax(0)
        if bool(((owners >= 0) & (owners != samples)).any()):
            raise MixedSamplesError(
                "Samples follow each other within one packed sequence, and a recurrent layer "
                "passes its state from one to the next. Pack each sample as a separate sequence, "
                "or pass `batch_dim=None` to `Engine` (exact for any losses, slower)."
            )
        return Routed(0, layout.batch, samples if has_cotangent.any() else samples.clamp(min=0))
