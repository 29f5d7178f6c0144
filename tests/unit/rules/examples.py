"""Example calls of every function that has a rule: its inputs and its parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
TOKENS = 7


def of(*args: Any, **kwargs: Any) -> Arguments:
    """The arguments of a call."""
    return args, kwargs


def x(*shape: int) -> Tensor:
    """An input, away from zero, where quotients have no derivative."""
    values = torch.randn(shape)
    return values + values.sign()


def p(*shape: int) -> Tensor:
    """A parameter."""
    return x(*shape).requires_grad_()


def _matrix(*shape: int) -> Tensor:
    """A parameter: square matrices far from singular ones."""
    return (x(*shape, shape[-1]) + 4 * torch.eye(shape[-1])).requires_grad_()


def _partly_equal() -> Arguments:
    """Points of which some have no distance, where the gradient is zero."""
    points = x(6, 3)
    return of(points, torch.cat([points[:2], x(3, 3)]).requires_grad_())


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, TOKENS, shape)


def _products() -> list[Arguments]:
    """Of two broadcast tensors, of which the first may be changed in place."""
    return [of(x(4, 6, 3), p(3)), of(x(4, 6, 3), p(6, 1)), of(x(4, 6, 3), p(4, 1, 3))]


def _on_both_sides() -> list[Arguments]:
    return [*_products(), of(p(3), x(4, 6, 3))]


def _convolution(n: int) -> list[Arguments]:
    space, kernel = (5, 4, 3)[:n], (2, 3, 2)[:n]
    return [
        of(x(4, 2, *space), p(3, 2, *kernel), p(3), padding=1, stride=2),
        of(x(6, 4, *space), p(6, 2, *kernel), groups=2, dilation=(1, 1, 2)[:n], padding=1),
        of(x(2, *space), p(3, 2, *kernel), p(3)),
    ]


def _transposed_convolution(n: int) -> list[Arguments]:
    space, kernel = (2, 3, 2)[:n], (2, 3, 2)[:n]
    return [
        of(x(4, 2, *space), p(2, 3, *kernel), p(3), stride=2, padding=1, output_padding=1),
        of(x(6, 4, *space), p(4, 3, *kernel), groups=2, dilation=(1, 2, 1)[:n]),
        of(x(2, *space), p(2, 3, *kernel), p(3)),
    ]


def _statistics(training: bool) -> Arguments:
    statistics = x(3), x(3).square()
    return of(x(4, 3, 5), p(3), p(3), *statistics, training, 0.1, 1e-5, False)


def _grouped() -> list[Arguments]:
    rows, weight = torch.randn(6, 8).float(), torch.randn(3, 8, 4).float()
    return [of(rows, weight.requires_grad_(), offs=torch.tensor([1, 4, 6], dtype=torch.int32))]


def _cell(gates: int, *more: int) -> list[Arguments]:
    """A cell, whose state is one tensor, or two for an LSTM."""
    state = [x(4, 3) for _ in (1, *more)]
    weights = p(gates * 3, 2), p(gates * 3, 3), p(gates * 3), p(gates * 3)
    return [of(x(4, 2), state if more else state[0], *weights)]


def _layers(gates: int, *more: int) -> list[Arguments]:
    """One layer over a sequence, time first and batch first."""
    state = [x(1, 4, 3) for _ in (1, *more)]
    found = []
    for batch_first in (False, True):
        weights = [p(gates * 3, 2), p(gates * 3, 3), p(gates * 3), p(gates * 3)]
        inputs = x(4, 5, 2) if batch_first else x(5, 4, 2)
        settings = True, 1, 0.0, True, False, batch_first
        found.append(of(inputs, state if more else state[0], weights, *settings))
    return found


def _changed_in_place(name: str) -> Callable[[], list[Arguments]]:
    """The same calls on the first argument, as far as it is no parameter."""
    return lambda: [
        (args, kwargs) for args, kwargs in EXAMPLES[name]() if not args[0].requires_grad
    ]


EXAMPLES: dict[str, Callable[[], list[Arguments]]] = {
    "linear": lambda: [
        of(x(4, 6, 3), p(5, 3), p(5)),
        of(x(4, 3), weight=p(5, 3)),
        of(x(3), p(5, 3)),
    ],
    "matmul": lambda: [
        of(x(4, 6, 3), p(3, 5)),
        of(p(5, 6), x(4, 6, 3)),
        of(x(4, 2, 6, 3), p(2, 3, 5)),
        of(x(6, 3), p(3)),
    ],
    "mv": lambda: [of(x(6, 3), p(3)), of(p(6, 3), x(3))],
    "addmv": lambda: [of(p(6), x(6, 3), p(3), beta=0.5, alpha=2.0), of(x(6), x(6, 3), p(3))],
    "addmv_": _changed_in_place("addmv"),
    "outer": lambda: [of(x(6), p(3)), of(p(6), x(3))],
    "inner": lambda: [of(x(4, 6, 3), p(5, 3)), of(p(3), x(4, 6, 3))],
    "dot": lambda: [of(x(3), p(3))],
    "linalg_vecdot": lambda: [of(x(4, 6, 3), p(6, 3)), of(p(6, 1), x(4, 6, 3), dim=1)],
    "tensordot": lambda: [
        of(x(4, 6, 3), p(3, 5), dims=1),
        of(x(4, 6, 3), p(5, 3, 6), dims=([1, -1], [2, 1])),
        of(p(2), x(4, 3), dims=0),
    ],
    "linalg_solve": lambda: [
        of(_matrix(3), x(3, 6)),
        of(_matrix(1, 3), x(4, 3, 6)),
        of(_matrix(3), x(4, 6, 3), left=False),
    ],
    "linalg_solve_triangular": lambda: [
        of(_matrix(3), x(4, 3, 6), upper=True),
        of(_matrix(1, 3), x(3, 6), upper=False),
        of(_matrix(3), x(4, 6, 3), upper=False, left=False, unitriangular=True),
    ],
    "grid_sample": lambda: [
        of(p(1, 3, 5, 4), x(1, 6, 4, 2).tanh(), align_corners=True),
        of(
            p(2, 3, 5, 4),
            x(2, 6, 3, 2).tanh(),
            mode="nearest",
            padding_mode="border",
            align_corners=True,
        ),
        of(p(1, 3, 5, 4), x(1, 6, 1, 2).tanh(), "bicubic", "reflection", align_corners=False),
        of(p(1, 3, 3, 4, 2), x(1, 4, 1, 3, 3).tanh(), align_corners=False),
        of(p(1, 3, 5, 4).expand(6, 3, 5, 4), x(6, 2, 3, 2).tanh(), align_corners=False),
        of(p(6, 3, 5, 4), x(6, 2, 3, 2).tanh(), align_corners=False),
        of(p(6, 2, 3, 4, 2), x(6, 4, 1, 3, 3).tanh(), align_corners=False),
    ],
    "grid_sampler": lambda: [of(p(1, 3, 5, 4), x(1, 6, 4, 2).tanh(), 0, 0, False)],
    "grid_sampler_2d": lambda: [of(p(2, 3, 5, 4), x(2, 6, 4, 2).tanh(), 0, 1, True)],
    "grid_sampler_3d": lambda: [of(p(2, 3, 3, 4, 2), x(2, 4, 1, 3, 3).tanh(), 0, 2, False)],
    "cdist": lambda: [
        of(x(4, 6, 3), p(5, 3)),
        of(p(1, 5, 3), x(4, 6, 3)),
        of(x(6, 3), p(5, 3), compute_mode="use_mm_for_euclid_dist"),
        _partly_equal(),
    ],
    "mm": lambda: [of(x(6, 3), p(3, 5)), of(p(6, 3), x(3, 5))],
    "bmm": lambda: [of(x(4, 6, 3), p(4, 3, 5)), of(p(4, 6, 3), x(4, 3, 5))],
    "__rmatmul__": lambda: [of(p(3, 5), x(4, 6, 3)), of(x(4, 6, 3), p(5, 6))],
    "addmm": lambda: [
        of(p(5), x(6, 3), p(3, 5), beta=0.5, alpha=2.0),
        of(x(6, 5), x(6, 3), p(3, 5)),
    ],
    "addmm_": _changed_in_place("addmm"),
    "baddbmm": lambda: [
        of(p(5), x(4, 6, 3), p(4, 3, 5), beta=0.5, alpha=2.0),
        of(x(4, 6, 5), x(4, 6, 3), p(4, 3, 5)),
    ],
    "baddbmm_": _changed_in_place("baddbmm"),
    "einsum": lambda: [
        of("bti,oi->bto", x(4, 6, 3), p(5, 3)),
        of("...i,io", x(4, 6, 3), p(3, 5)),
        of("bi,ijo,bj->bo", x(4, 3), p(3, 2, 5), x(4, 2)),
        of("bi,rio,sr->bo", x(4, 3), p(1, 3, 5), p(1, 1)),
    ],
    "_grouped_mm": _grouped,
    "rnn_tanh": lambda: _layers(1),
    "rnn_relu": lambda: _layers(1),
    "gru": lambda: _layers(3),
    "lstm": lambda: _layers(4, 2),
    "rnn_tanh_cell": lambda: _cell(1),
    "rnn_relu_cell": lambda: _cell(1),
    "gru_cell": lambda: _cell(3),
    "lstm_cell": lambda: _cell(4, 2),
    "bilinear": lambda: [of(x(4, 6, 3), x(4, 6, 2), p(5, 3, 2), p(5))],
    "conv1d": lambda: _convolution(1),
    "conv2d": lambda: _convolution(2),
    "conv3d": lambda: _convolution(3),
    "conv_transpose1d": lambda: _transposed_convolution(1),
    "conv_transpose2d": lambda: _transposed_convolution(2),
    "conv_transpose3d": lambda: _transposed_convolution(3),
    "add": lambda: [*_on_both_sides(), of(x(4, 3), p(3), alpha=-0.5)],
    "sub": lambda: [*_on_both_sides(), of(x(4, 3), p(3), alpha=-0.5)],
    "rsub": lambda: [*_on_both_sides(), of(x(4, 3), p(3), alpha=-0.5)],
    "mul": _on_both_sides,
    "div": _on_both_sides,
    "where": lambda: [
        of(x(4, 6, 3) > 0, p(3), x(4, 6, 3)),
        of(x(4, 6, 3) > 0, x(6, 1), p(4, 1, 1)),
    ],
    "masked_fill": lambda: [
        of(p(3), x(4, 6, 3) > 0, 2.0),
        of(x(4, 6, 3), x(6, 1) > 0, torch.tensor(0.5, requires_grad=True)),
    ],
    "__setitem__": lambda: [
        of(x(4, 6, 3), x(4, 6) > 0, p(3)),
        of(x(4, 6, 3), torch.arange(4) > 1, p(6, 1)),
        of(x(4, 6), x(4, 6) > 0, torch.tensor(0.5, requires_grad=True)),
    ],
    "prelu": lambda: [of(x(4, 3, 6), p(3)), of(x(4, 3, 6), p(1))],
    "embedding": lambda: [of(tokens(4, 6), p(TOKENS, 3))],
    "embedding_bag": lambda: [
        of(tokens(4, 6), p(TOKENS, 3), padding_idx=2),
        of(tokens(9), p(TOKENS, 3), torch.tensor([0, 2, 2, 8]), mode="sum"),
        of(tokens(4, 3), p(TOKENS, 3), mode="sum", per_sample_weights=x(4, 3)),
    ],
    "__getitem__": lambda: [of(p(TOKENS, 3), tokens(4, 6)), of(p(TOKENS), tokens(4, 6))],
    "index_select": lambda: [of(p(TOKENS, 3), 0, tokens(6))],
    "cat": lambda: [of([p(4, 2, 3), x(4, 6, 3), p(4, 1, 3)], 1), of([x(4, 6), p(4, 3)], dim=-1)],
    "stack": lambda: [of([x(4, 6), p(4, 6)], 1), of([x(4, 6), p(4, 6)], dim=-1)],
    "layer_norm": lambda: [of(x(4, 6, 3), (3,), p(3), p(3)), of(x(4, 6, 3), (6, 3), p(6, 3))],
    "rms_norm": lambda: [of(x(4, 6, 3), (3,), p(3)), of(x(4, 6, 3), (6, 3), p(6, 3))],
    "group_norm": lambda: [of(x(4, 6, 3), 2, p(6), p(6))],
    "instance_norm": lambda: [
        of(x(4, 3, 6), p(3), p(3), None, None, True, 0.1, 1e-5, False),
        of(x(4, 3, 6), p(3), p(3), x(3), x(3).square(), False, 0.1, 1e-5, False),
    ],
    "batch_norm": lambda: [_statistics(training=False), _statistics(training=True)],
}
EXAMPLES |= {
    "ger": EXAMPLES["outer"],
    "concat": EXAMPLES["cat"],
    "concatenate": EXAMPLES["cat"],
    "subtract": EXAMPLES["sub"],
    "multiply": EXAMPLES["mul"],
    "true_divide": EXAMPLES["div"],
    "divide": EXAMPLES["div"],
}
EXAMPLES |= {
    f"{name}_": _changed_in_place(name)
    for name in (
        *("add", "sub", "subtract", "mul", "multiply", "div", "true_divide", "divide"),
        "masked_fill",
    )
}
# Functions of one name whose arguments have another order.
BY_FUNCTION: dict[Callable[..., Any], Callable[[], list[Arguments]]] = {
    torch.embedding: lambda: [of(p(TOKENS, 3), tokens(4, 6)), of(p(TOKENS, 3), tokens(4, 6), 2)],
    torch.Tensor.where: lambda: [
        of(p(3), x(4, 6, 3) > 0, x(4, 6, 3)),
        of(x(6, 1), x(4, 6, 3) > 0, p(4, 1, 1)),
    ],
}


def examples_of(function: Callable[..., Any]) -> list[Arguments]:
    """The example calls of a function, fresh ones each time."""
    return BY_FUNCTION.get(function, EXAMPLES.get(function.__name__, list))()
