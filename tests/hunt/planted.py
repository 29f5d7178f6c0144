"""Plants errors in the engine and counts which a check finds: ``python -m tests.hunt.planted``.

Each error changes what one function of the engine gives. An engine without checks shows whether a
call is wrong then, beside plain autograd. If it is, an engine that checks each call must raise an
error, or be right.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from autogram._blocks import Block, Columns, Program, bundle, columns, products
from autogram._blocks.kernels.base import Kernels
from autogram._blocks.lookup import Lookup
from autogram._blocks.programs import known
from autogram._capture.backward import assembly
from autogram._capture.backward.assembly import Assembly
from autogram._capture.samples.objectives import Objectives
from autogram._jacobian import accumulating, parts
from autogram.testing import reference_jacobian

# Models


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 4, 2, groups=2)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1))


class Language(nn.Module):
    """A transformer with one layer, whose embedding is also its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(9, 6), nn.Parameter(torch.randn(5, 6))
        self.first, self.last = nn.LayerNorm(6), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.narrow(F.gelu(self.wide(self.last(x))))
        return (x @ self.embedding.weight.T).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Experts(nn.Module):
    """Two experts, each of which reads some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(1)
        chosen, total = scores.argmax(1), torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == i)
            y = expert(tokens[places]).tanh() * scores[places, i, None]
            total = total.index_add(0, places, y)
        return self.head(total.view(x.shape).mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)
        ),
        lambda b: torch.randn(b, 4),
    ),
    "cnn": (Convolutional, lambda b: torch.randn(b, 2, 5, 5)),
    "gpt": (Language, lambda b: torch.randint(9, (b, 5))),
    "lstm": (Recurrent, lambda b: torch.randn(b, 4, 3)),
    "moe": (Experts, lambda b: torch.randn(b, 3, 4)),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "(B,)": lambda y: (y + 0.3 * y.sin()).square().sum(1),
    "(B, K)": lambda y: (y + 0.3 * y.sin())[:, :2],
}

# Calls: what an engine gives for some losses, as one vector, and the same from J.

Call = Callable[[Engine, nn.Module, Callable[[], Tensor], Tensor], Tensor]


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([(p if p.grad is None else p.grad).flatten() for p in model.parameters()])


def _fused(engine: Engine, model: nn.Module, losses_of: Callable[[], Tensor], w: Tensor) -> Tensor:
    model.zero_grad()
    losses = losses_of()
    _, gramian = engine.backward(losses, lambda _: w, return_gramian=True)
    return torch.cat([gramian.flatten(), _gradient(model)])


def _accumulated(
    engine: Engine, model: nn.Module, losses_of: Callable[[], Tensor], w: Tensor
) -> Tensor:
    model.zero_grad()
    with engine.accumulate(lambda _: w) as batch:
        losses = losses_of()
        for part in losses.split([2, len(losses) - 2]):
            batch.add(part, retain_graph=True)
    return torch.cat([batch.gramian.flatten(), _gradient(model)])


def _of_jacobian(product: Callable[[Any, Tensor], Tensor]) -> Call:
    return lambda engine, _, losses_of, w: product(engine.jacobian(losses_of()), w).flatten()


def _direction(n: int) -> Tensor:
    return torch.arange(1, n + 1).double().square().sin()


def _jvp(found: Any, w: Tensor) -> Tensor:
    sizes = {name: x.shape for name, x in found.vjp(w).items()}
    flat = _direction(found.shape[1]).to(w).split([shape.numel() for shape in sizes.values()])
    return found.jvp({n: x.view(s) for (n, s), x in zip(sizes.items(), flat, strict=True)})


def _step(j: Tensor, w: Tensor) -> Tensor:
    return torch.cat([(j @ j.T).flatten(), w @ j])


CALLS: dict[str, tuple[Call, Callable[[Tensor, Tensor], Tensor]]] = {
    "compute_gramian": (lambda e, _, f, __: e.compute_gramian(f()).flatten(), lambda j, _: j @ j.T),
    "backward": (_fused, _step),
    "accumulate": (_accumulated, _step),
    "jacobian.gramian": (_of_jacobian(lambda j, _: j.gramian()), lambda j, _: j @ j.T),
    "jacobian.vjp": (
        _of_jacobian(lambda j, w: torch.cat([x.flatten() for x in j.vjp(w).values()])),
        lambda j, w: w @ j,
    ),
    "jacobian.jvp": (_of_jacobian(_jvp), lambda j, _: j @ _direction(j.shape[1]).to(j)),
    "jacobian.dense": (_of_jacobian(lambda j, _: j.dense()), lambda j, _: j),
}

# Errors: the place of a function, and what becomes of its result.

Change = Callable[[Tensor], Tensor]


def _scaled(x: Tensor) -> Tensor:
    return x * 1.01


def _one_sign(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1)[y.abs().argmax()] *= -1
    return y


def _rolled(dim: int) -> Change:
    return lambda x: x.roll(1, dim) if x.dim() else x


def _flipped(*dims: int) -> Change:
    return lambda x: x.flip([d for d in dims if d < x.dim()])


def _entries_transposed(x: Tensor) -> Tensor:
    """Weighted sums ``(s, *parameter)``, transposed if square, or else in another order."""
    if x.dim() == 3 and x.shape[1] == x.shape[2]:
        return x.mT
    return x.flip(-1)


def _samples_swapped(x: Tensor) -> Tensor:
    """Two samples of a Gramian ``(k, b, k, b)`` change places."""
    order = [1, 0, *range(2, x.shape[1])]
    return x[:, order][:, :, :, order] if x.shape[1] > 1 else x


def _function(module: Any, name: str, change: Change, *, nth: int = 1) -> Callable[..., None]:
    """Changes each ``nth`` result of a function, or of a method."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(module, name), Counter[str]()

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            calls["all"] += 1
            if calls["all"] % nth or not isinstance(found, Tensor) or not found.numel():
                return found
            return change(found)

        patch.setattr(module, name, wrong)

    return plant


def _each(*plants: Callable[..., None]) -> Callable[..., None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant


def _weighted(change: Change) -> Callable[..., None]:
    return _each(*[_function(module, "weighted_sum", change) for module in (columns, bundle)])


def _grams(change: Change) -> Callable[..., None]:
    """Gramians and norms."""
    return _each(*[_function(module, "products", change) for module in (columns, bundle)])


def _dropped_parts(patch: pytest.MonkeyPatch) -> None:
    add, calls = Assembly._sum, Counter[str]()

    def wrong(self: Assembly, part: Tensor | None) -> None:
        calls["all"] += 1
        if calls["all"] % 3 != 2:
            add(self, part)

    patch.setattr(Assembly, "_sum", wrong)


def _blocks(change: Callable[[Block], Block | None]) -> Callable[..., None]:
    """Changes or drops each third block that columns are given."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        add, calls = Columns.add, Counter[str]()

        def wrong(self: Columns, region: Any, block: Any, subset: Any = None) -> None:
            calls["all"] += 1
            if calls["all"] % 3 == 2 and isinstance(block, Block):
                block = change(block)
            if block is not None:
                add(self, region, block, subset)

        patch.setattr(Columns, "add", wrong)

    return plant


def _operand(change: Callable[[Tensor, int], Tensor]) -> Callable[[Block], Block]:
    """A block whose first operand has its samples changed."""

    def made(block: Block) -> Block:
        inputs = block.equation.split("->")[0].split(",")
        first = change(block.operands[0], inputs[0].index("b"))
        return Block(block.equation, (first, *block.operands[1:]))

    return made


def _lookups(patch: pytest.MonkeyPatch) -> None:
    """Weighted sums of rows of tables are those of the next row."""
    original = Lookup.weighted_sum
    patch.setattr(Lookup, "weighted_sum", lambda self, *a: original(self, *a).roll(1, 1))


def _programs(change: Change) -> Callable[..., None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        call = Program.__call__

        def wrong(self: Program, *args: Any) -> Any:
            first, *others = call(self, *args)
            return (change(first), *others)

        patch.setattr(Program, "__call__", wrong)

    return plant


def _gradients(patch: pytest.MonkeyPatch) -> None:
    """Gradients of two parameters of one shape are exchanged, or else one is lost."""
    original = accumulating.as_gradients

    def wrong(sums: Any) -> Any:
        found = original(sums)
        names = list(found)
        for a, b in itertools.pairwise(names):
            if a.shape == b.shape:
                found[a], found[b] = found[b], found[a]
                return found
        found[names[0]] = torch.zeros_like(found[names[0]])
        return found

    patch.setattr(accumulating, "as_gradients", wrong)


def _in_order(change: Change) -> Callable[..., None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Objectives.in_order

        def wrong(self: Objectives, values: Tensor, *dims: int) -> Tensor:
            return change(original(self, values, *dims))

        patch.setattr(Objectives, "in_order", wrong)

    return plant


ERRORS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "weighted sums scaled": _weighted(_scaled),
    "weighted sums with one sign changed": _weighted(_one_sign),
    "weighted sums rolled": _weighted(_rolled(-1)),
    "weighted sums transposed": _weighted(_entries_transposed),
    "products scaled": _grams(_scaled),
    "products with one sign changed": _grams(_one_sign),
    "two samples of products swapped": _grams(_samples_swapped),
    "a Gramian of a bundle with rows rolled": _function(
        assembly, "gram_of_bundle", _rolled(1), nth=2
    ),
    "a Gramian of parts with rows rolled": _function(parts, "gram_of_bundle", _rolled(1), nth=2),
    "Gramians with samples backwards": _each(
        *[_function(of, "gram_of_bundle", _flipped(1, 3)) for of in (assembly, parts)]
    ),
    "a part of the Gramian dropped": _dropped_parts,
    "results rolled": _in_order(_rolled(0)),
    "results backwards": _in_order(lambda x: x.flip([*range(x.dim())])),
    "results in the order (k, b)": lambda patch: patch.setattr(
        Objectives, "in_order", lambda _, values, *__: values
    ),
    "vectors rolled": _function(Objectives, "by_sample", _rolled(-1)),
    "objectives of parts numbered otherwise": _function(
        parts.MergedParts, "numbers", lambda x: x.flip(0)
    ),
    "a block dropped": _blocks(lambda _: None),
    "a block with its sign changed": _blocks(_operand(lambda x, _: -x)),
    "a block scaled": _blocks(_operand(lambda x, _: x * 1.01)),
    "a block of another sample": _blocks(_operand(lambda x, d: x.roll(1, d))),
    "a block of one sample alone": _blocks(
        _operand(lambda x, d: x.narrow(d, 0, 1).expand_as(x) if x.shape[d] > 1 else 2 * x)
    ),
    "contractions scaled": _function(Kernels, "einsum", _scaled, nth=5),
    "rows with entries rolled": _each(
        _function(columns, "rows", _rolled(-1)), _function(products, "rows", _rolled(-1))
    ),
    "rows of tables in other places": _lookups,
    "products with a direction scaled": _function(columns, "directional", _scaled),
    "sums put at other places": _function(columns, "put", _rolled(-1)),
    "programs scaled": _programs(_scaled),
    "programs with entries rolled": _programs(_rolled(-1)),
    "gradients exchanged": _gradients,
    "rows of parts of the next sample": _function(parts.JacobianPart, "rows", _rolled(0)),
}


@dataclass
class Tally:
    """How many calls were wrong and which of these were found, by call and by error."""

    wrong: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)


Parts = tuple[str, str, str, str, int]
"""The error, the model, the losses, the call, and how many steps come before."""


def run_case(case: Parts, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether an error makes a call wrong, and if it does, whether a check finds it."""
    if not _is_wrong(case, dtype, "never"):
        return False, False
    return True, not _is_wrong(case, dtype, "always")


def _is_wrong(case: Parts, dtype: torch.dtype, verify: Any) -> bool:
    """Whether a call gives a wrong result, and no error.

    The error is planted after some steps, in which programs are written.
    """
    error, name, losses, call, before = case
    (make, batch), (product, expected) = MODELS[name], CALLS[call]
    torch.manual_seed(3)
    model = make().to(dtype)
    with (
        Engine(model, verify=verify) as engine,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        # Programs are written in the third step.
        patch.setattr(known, "_WORTH_WRITING", 3)
        patch.setattr(known, "_WORTH_WRITING_TOGETHER", 3)
        for step in range(before + 1):
            torch.manual_seed(step)
            x = batch(5)
            x = x.to(dtype) if x.is_floating_point() else x
            losses_of = partial(_losses, model, x, LOSSES[losses])
            jacobian = reference_jacobian(losses_of(), model.parameters())
            w = torch.linspace(-0.7, 1, len(jacobian), dtype=dtype)
            if step == before:
                ERRORS[error](patch)
            try:
                given = product(engine, model, losses_of, w)
            except Exception:
                if step < before:
                    raise
                return False  # of any kind: the user sees it
    return _differs(given, expected(jacobian, w).flatten(), call, len(jacobian))


def _losses(model: nn.Module, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    return of(model(x))


def _differs(given: Tensor, expected: Tensor, call: str, m: int) -> bool:
    """Whether a result is wrong by more than a check allows: a Gramian and a gradient apart."""
    tolerance = 10 * torch.finfo(expected.dtype).eps ** 0.5
    pairs = [(given, expected)]
    if call in ("backward", "accumulate"):
        sizes = [m * m, len(expected) - m * m]
        pairs = list(zip(given.split(sizes), expected.split(sizes), strict=True))
    return any(bool((a - b).norm() > tolerance * b.norm()) for a, b in pairs)


def cases(error: str) -> Iterator[Parts]:
    """Each case of an error: with and without programs, then of all calls."""
    for losses, model, call, before in itertools.product(LOSSES, MODELS, CALLS, (5, 1)):
        yield error, model, losses, call, before


def run(dtype: torch.dtype, share: int = 1, only: str = "") -> Tally:
    """Plants every error in every call of every model, or in one case of so many."""
    tally = Tally()
    chosen = list(itertools.chain(*map(cases, ERRORS)))[::share]
    for case in [case for case in chosen if only in " | ".join(map(str, case))]:
        is_wrong, is_found = run_case(case, dtype)
        for key in (case[0], case[3], "all") if is_wrong else ():
            tally.wrong[key] += 1
            tally.found[key] += is_found
        if is_wrong and not is_found:
            tally.missed.append(" | ".join(map(str, case)))
    return tally


def main() -> int:
    """Runs what the command line asks for, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt.planted")
    parser.add_argument("--share", type=int, default=1, help="run one of so many cases")
    parser.add_argument("--only", default="", help="run cases whose description has this text")
    parser.add_argument("--dtype", default="float64")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    tally = run(dtype, arguments.share, arguments.only)
    for key in tally.wrong:
        print(f"{tally.found[key]:5} of {tally.wrong[key]:5} wrong results found: {key}")
    for case in tally.missed:
        print(f"  missed: {case}")
    return bool(tally.wrong["all"] and tally.found["all"] < 0.95 * tally.wrong["all"])


if __name__ == "__main__":
    sys.exit(main())
