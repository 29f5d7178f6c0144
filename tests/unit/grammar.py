"""A grammar of small networks: layers, sharing, freezing, layouts and losses, drawn at random.

Series of steps are drawn, too, in which shapes, arguments, masks, modes, frozen parts and losses
change and return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit.checks import features, irregular
from tests.unit.networks import Call

# Layers that add positions would grow without end where they are called again and again.
MOST_POSITIONS = 6

Order = Literal["first", "second", "folded", "folded second"]


@dataclass(frozen=True)
class Stream:
    """An activation of ``positions`` for each sample, and in which order it holds them."""

    x: Tensor
    samples: int
    order: Order = "first"

    @property
    def first(self) -> Tensor:
        """As ``(samples, positions, features)``."""
        if self.order == "folded":
            return self.x.unflatten(0, (self.samples, -1))
        if self.order == "folded second":
            return self.x.unflatten(0, (-1, self.samples)).transpose(0, 1)
        return self.x.transpose(0, 1) if self.order == "second" else self.x

    def arranged(self, order: Order) -> Stream:
        """The same in another order."""
        x = self.first.transpose(0, 1) if "second" in order else self.first
        return Stream(x.flatten(0, 1) if "folded" in order else x, self.samples, order)


@dataclass(frozen=True)
class Step:
    """What may be another in each step of a series. A shift of zero leaves samples in place."""

    samples: int = 1
    positions: int = 1
    shift: int = 0
    masked: int = 0
    is_training: bool = True
    frozen: int = 0
    losses: str = "(B,)"
    call: str = "gramian"

    def order(self, count: int) -> list[int]:
        """An order of samples or positions."""
        return [(i + self.shift) % count for i in range(count)]

    def rising(self, x: Tensor) -> Tensor:
        """Numbers that put the samples into this order, ``(samples, 1, 1)``."""
        return torch.tensor(self.order(len(x))).to(x).view(-1, 1, 1)

    def mask(self, x: Tensor) -> Tensor:
        """What is masked, ``(samples, positions, 1)``: never the first position."""
        bits = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[0], -1, 1)
        return (self.masked >> bits % 12 & 1).bool() & (bits % x.shape[1] > 0)


class Pointwise(nn.Module):
    """A module of the features, in whatever order the samples are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, stream: Stream) -> Stream:
        return replace(stream, x=self.module(stream.x))


class Positional(nn.Module):
    """A module of ``(samples, positions, features)``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, stream: Stream) -> Stream:
        x = self.module(stream.first[:, :MOST_POSITIONS])
        return Stream(x, stream.samples).arranged(stream.order)


class Channels(nn.Module):
    """A module of ``(samples, features, positions)``, as convolutions are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention that takes sequences first as they are."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(d, d, batch_first=True)
        self.second = nn.MultiheadAttention(d, 1, dropout=0.2)

    def forward(self, stream: Stream) -> Stream:
        if stream.order == "second":
            return replace(stream, x=self.second(*[stream.x] * 3)[0])
        x = stream.first
        return Stream(self.first(x, x, x)[0], stream.samples).arranged(stream.order)


class Recurrent(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = nn.GRU(d, d, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Ordered(nn.Module):
    """Another order from here on."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def forward(self, stream: Stream) -> Stream:
        return stream.arranged(self.order)


class Body(nn.Sequential):
    """Layers that keep the width, in one of several constructions."""

    def __init__(self, construction: str, layers: list[nn.Module]) -> None:
        super().__init__(*layers)
        self.construction = construction

    def forward(self, stream: Stream) -> Stream:
        if self.construction == "residual":
            return replace(stream, x=stream.x + self._beside(stream).x)
        if self.construction == "twice":
            once = super().forward(stream)
            return super().forward(replace(once, x=once.x.sin()))
        if self.construction == "checkpoint":
            return checkpoint(super().forward, stream, use_reentrant=False)
        return replace(stream, x=stream.x * self._beside(stream).x.sigmoid())  # "gated"

    def _beside(self, stream: Stream) -> Stream:
        """What the layers give, for as many positions as they were given."""
        x = super().forward(stream).first
        positions = stream.first.shape[1]
        if x.shape[1] != positions:
            x = x.mean(1, keepdim=True).expand(-1, positions, -1)
        return Stream(x, stream.samples).arranged(stream.order)


class Tied(nn.Module):
    """A linear map with the transposed weight of another layer."""

    def __init__(self, layer: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        return F.linear(x, weight if x.shape[-1] == weight.shape[1] else weight.T)


# Layers that keep the width d, by what they act on.
POINTWISE: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda d: nn.Linear(d, d),
    "layer norm": nn.LayerNorm,
    "layer norm without bias": lambda d: nn.LayerNorm(d, bias=False),
    "rms norm": nn.RMSNorm,
    "scale": lambda d: Call(lambda x, w: x * w, (d,)),
    "shift": lambda d: Call(lambda x, w: x + w, (d,)),
    "scalar": lambda _: Call(lambda x, w: w * x - w, ()),
    "prelu": lambda d: nn.PReLU(d) if d == 1 else nn.PReLU(),
    "dropout": lambda _: nn.Dropout(0.3),
    "tanh": lambda _: nn.Tanh(),
    "relu in place": lambda d: nn.Sequential(nn.Linear(d, d), nn.LeakyReLU(0.2, inplace=True)),
    "matmul": lambda d: Call(lambda x, w, c: (x @ w) + c, (d, d), (d,)),
    "einsum": lambda d: Call(lambda x, w: torch.einsum("...i,oi->...o", x, w), (d, d)),
    "slices": lambda d: Call(
        lambda x, w: F.linear(x, w[:d]) * F.linear(x, w[d:]).cos(), (2 * d, d)
    ),
    "low rank": lambda d: Call(lambda x, a, b: F.linear(x, a @ b), (d, 1), (1, d)),
    "weight norm": lambda d: nn.utils.parametrizations.weight_norm(nn.Linear(d, d)),
    "softmax of a weight": lambda d: Call(lambda x, w: x @ w.softmax(0), (d, d)),
    "bilinear": lambda d: Call(lambda x, w: F.bilinear(x, x.cos(), w), (d, d, d)),
    "distances": lambda d: Call(lambda x, w: -(x.unsqueeze(-2) - w).square().sum(-1), (d, d)),
    "wider": lambda d: nn.Sequential(nn.Linear(d, d + 2), nn.GELU(), nn.Linear(d + 2, d)),
}
POSITIONAL: dict[str, Callable[[int], nn.Module]] = {
    "convolution": lambda d: Channels(nn.Conv1d(d, d, 2, padding=1)),
    "depthwise": lambda d: Channels(nn.Conv1d(d, d, 3, padding=1, groups=d, bias=False)),
    "transposed": lambda d: Channels(nn.ConvTranspose1d(d, d, 2)),
    "group norm": lambda d: Channels(  # the module refuses a single sample of a single number
        Call(lambda x, w, c: torch.group_norm(x, 1, w, c), (d,), (d,))
    ),
    "batch norm of averages": lambda d: Channels(nn.BatchNorm1d(d).eval()),
    "recurrent": Recurrent,
    "token": lambda d: Call(lambda x, w: torch.cat([w.expand(len(x), 1, -1), x], 1), (d,)),
    "place": lambda d: Call(lambda x, w: x + w[: x.shape[1]], (MOST_POSITIONS, d)),
    "embedding of places": lambda d: _Places(d),
    "mixed positions": lambda _: Call(
        lambda x, w: torch.einsum("bti,ts->bsi", x, w[: x.shape[1], : x.shape[1]]),
        (MOST_POSITIONS, MOST_POSITIONS),
    ),
    "attention by hand": lambda d: Call(
        lambda x, q: F.scaled_dot_product_attention(x @ q, x, x.sin()), (d, d)
    ),
    "mean": lambda _: Call(lambda x: x.mean(1, keepdim=True)),
    "rolled": lambda _: Call(lambda x: x.roll(1, 1)),
}
# Layers that read what a step sets, ``(samples, positions, features)`` as they are.
CHANGING: dict[str, Callable[[Tensor, Step], Tensor]] = {
    "positions shifted": lambda x, step: x.roll((step.shift,), (1,)),
    "samples shifted": lambda x, step: x.roll((step.shift,), (0,)),
    "positions flipped": lambda x, step: x.flip([1] if step.shift else [2]),
    "samples flipped": lambda x, step: x.flip([0] if step.shift else []),
    "samples in order": lambda x, step: x[step.order(len(x))],
    "samples by an index": lambda x, step: x.index_select(0, torch.tensor(step.order(len(x)))),
    "samples stacked": lambda x, step: torch.stack([x[i] for i in step.order(len(x))]),
    "samples joined": lambda x, step: torch.cat(
        [x[step.shift % len(x) :], x[: step.shift % len(x)]]
    ),
    "samples by a matrix": lambda x, step: torch.einsum(
        "bc,ctd->btd", torch.eye(len(x))[step.order(len(x))], x
    ),
    "samples sorted": lambda x, step: (x + x.shape[0] * step.rising(x)).sort(0)[0],
    "other positions": lambda x, step: x[:, step.order(x.shape[1])],
    "masked": lambda x, step: x.masked_fill(step.mask(x), 0),
    "mean of what is kept": lambda x, step: (
        x + torch.where(step.mask(x), 0, x).sum(1, keepdim=True)
    ),
    "masked attention": lambda x, step: F.scaled_dot_product_attention(
        x, x.sin(), x, attn_mask=(step.mask(x)[:, None, :, 0].logical_not())
    ),
    "attention of documents": lambda x, step: _attend_documents(x, step),
    "mixed in": lambda x, step: x + step.shift * x.mean(0),
    "masked mixing": lambda x, step: torch.where(step.mask(x)[:, :1], x.roll(1, 0), x),
    "wired otherwise": lambda x, step: (x, x.roll(1, 0))[step.shift % 2].cos(),
    "written": lambda x, step: _written(x, step),
    "transposed": lambda x, step: x.mT.contiguous().mT if step.shift else x,
    "skipped": lambda x, step: x.tanh() if step.shift else x,
    "mean or sum": lambda x, step: x - (x.mean([1], True) if step.shift else x.sum([1], True)),
}


def _attend_documents(x: Tensor, step: Step) -> Tensor:
    """Attention among all positions of all samples, each sample's own at first."""
    tokens = x.reshape(-1, x.shape[-1])
    document = torch.arange(len(x)).repeat_interleave(x.shape[1])
    mask = document[:, None] == document.roll(step.shift)
    return F.scaled_dot_product_attention(
        tokens[None], tokens.sin()[None], tokens[None], attn_mask=mask
    ).view(x.shape)


def _written(x: Tensor, step: Step) -> Tensor:
    """One sample has another's values written over it."""
    y = x.clone()
    y[step.shift % len(x)] = x[0].cos()
    return y


CONSTRUCTIONS = ["residual", "twice", "gated", "checkpoint"]
ORDERS: list[Order] = ["first", "second", "folded", "folded second"]


class _Places(nn.Module):
    """An embedding of positions, looked up in every forward pass."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.table = nn.Embedding(MOST_POSITIONS, d)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(torch.arange(x.shape[1]))


class Changing(nn.Module):
    """A layer of ``(samples, positions, features)`` that reads what the step sets."""

    def __init__(self, function: Callable[[Tensor, Step], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.step)


@dataclass(frozen=True)
class Layer:
    """A layer by its name, with the layers inside of it, or the number of an earlier one."""

    name: str
    inside: tuple[Layer, ...] = ()
    earlier: int = 0


@dataclass(frozen=True)
class Case:
    """One network with its data, its losses and the arguments of its engine."""

    layers: tuple[Layer, ...]
    reads_ids: bool
    is_tied: bool
    width: int
    samples: int
    positions: int
    frozen: int
    losses: str
    batch_dim: int | Literal["auto"] | None
    memory_limit_bytes: int
    seed: int

    def model(self) -> Network:
        """The network, the same at each call."""
        torch.manual_seed(self.seed)
        model = Network(self)
        parameters = list(model.parameters())
        for i, parameter in enumerate(parameters):
            parameter.requires_grad_(not self.frozen >> i & 1 or len(parameters) == 1)
        return model

    def inputs(self, step: Step | None = None) -> Tensor:
        """What it is called with, in this step of a series."""
        samples, positions = self.samples, self.positions
        if step is not None:
            samples, positions = step.samples, step.positions
        if self.reads_ids:
            return torch.arange(samples * positions).view(samples, -1) % 5
        return irregular(samples, positions, self.width)


class Network(nn.Module):
    """The network of a case: ``(samples, features)`` from its inputs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.samples = case.samples
        self.start = nn.Embedding(5, case.width) if case.reads_ids else nn.Linear(*[case.width] * 2)
        self._made: list[nn.Module] = []
        self.layers = nn.Sequential(*(self._make(layer, case.width) for layer in case.layers))
        self.end = Tied(self.start) if case.is_tied else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        stream = self.layers(Stream(self.start(x), self.samples))
        return self.end(stream.first).flatten(1)

    def begin(self, step: Step) -> None:
        """Sets what another step changes: the mode, frozen parts, and what layers read."""
        self.samples = step.samples
        self.train(step.is_training)
        parameters = list(self.parameters())
        for i, parameter in enumerate(parameters):
            parameter.requires_grad_(not step.frozen >> i & 1 or len(parameters) == 1)
        for module in self.modules():
            if isinstance(module, Changing):
                module.step = step
            if isinstance(module, nn.BatchNorm1d):
                module.eval()

    def _make(self, layer: Layer, d: int) -> nn.Module:
        """A layer, or an earlier one once more."""
        if layer.name == "again":
            return self._made[layer.earlier % len(self._made)] if self._made else nn.Identity()
        if layer.name in CONSTRUCTIONS:
            return Body(layer.name, [self._make(inside, d) for inside in layer.inside])
        if layer.name in ORDERS:
            return Ordered(layer.name)  # type: ignore[arg-type]
        if layer.name == "attention":
            module: nn.Module = Attention(d)
        elif layer.name in POINTWISE:
            module = Pointwise(POINTWISE[layer.name](d))
        elif layer.name in CHANGING:
            module = Positional(Changing(CHANGING[layer.name]))
        else:
            module = Positional(POSITIONAL[layer.name](d))
        self._made.append(module)
        return module


def _penalized(model: nn.Module, output: Tensor) -> Tensor:
    largest = max((p for p in model.parameters()), key=lambda p: p.numel())
    return features(output, 1).squeeze(1) + 0.1 * largest.square().sum()


LOSSES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Any]]] = {
    "(B,)": (lambda _, y: features(y, 1).squeeze(1), ["auto", 0, -1, None]),
    "(B, K)": (lambda _, y: features(y, 3), ["auto", 0, -2, None]),
    "(K, B)": (lambda _, y: features(y, 2).T, [1, -1, None]),
    "(2, B, 2)": (lambda _, y: features(y, 4).unflatten(1, (2, 2)).transpose(0, 1), [1, None]),
    "()": (lambda _, y: features(y, 1).sum(), [None]),
    "coupled": (lambda _, y: (irregular(3, len(y)) @ features(y, 1)).squeeze(1), [None]),
    "picked": (lambda _, y: -y.log_softmax(1)[torch.arange(len(y)), 0].exp(), ["auto", 0]),
    "penalized": (_penalized, ["auto", 0, None]),
}


def _layers(depth: int, *, changing: bool = False) -> st.SearchStrategy[Layer]:
    """One layer, with others inside down to a depth."""
    names = [*POINTWISE, *POSITIONAL, "attention", *ORDERS, *ORDERS]
    simple = st.sampled_from(names).map(Layer)
    if changing:
        simple = simple | st.sampled_from(list(CHANGING)).map(Layer)
    again = st.integers(0, 5).map(lambda i: Layer("again", earlier=i))
    if depth == 0:
        return simple | again
    inside = _layers(depth - 1, changing=changing)
    several = st.lists(inside, min_size=1, max_size=3).map(tuple)
    return simple | simple | again | st.builds(Layer, st.sampled_from(CONSTRUCTIONS), several)


@st.composite
def cases(draw: st.DrawFn, *, changing: bool = False) -> Case:
    """Any case."""
    losses = draw(st.sampled_from(sorted(LOSSES)))
    return Case(
        layers=tuple(draw(st.lists(_layers(2, changing=changing), min_size=1, max_size=4))),
        reads_ids=draw(st.booleans()),
        is_tied=draw(st.booleans()),
        width=draw(st.integers(2, 4)),  # a norm of one number has no gradient but rounding errors
        samples=draw(st.integers(2 if changing else 1, 4)),
        positions=draw(st.integers(1, 3)),
        frozen=draw(st.just(0) | st.integers(0, 2**12)),
        losses=losses,
        batch_dim=draw(st.sampled_from(LOSSES[losses][1])),
        memory_limit_bytes=draw(st.sampled_from([2**29, 2**10, 1])),
        seed=draw(st.integers(0, 3)),
    )


CALLS = ["gramian", "step", "products"]


@dataclass(frozen=True)
class Series:
    """A network, and steps of one engine, some of which are like earlier ones."""

    case: Case
    steps: tuple[Step, ...]
    is_verified: bool


@st.composite
def series(draw: st.DrawFn) -> Series:
    """Any series: a harmless step, which differs from later ones in a part of what may change."""
    case = draw(cases(changing=True))
    changing = Layer(draw(st.sampled_from(list(CHANGING))))
    place = draw(st.integers(0, len(case.layers)))
    case = replace(case, layers=(*case.layers[:place], changing, *case.layers[place:]))
    if draw(st.integers(0, 7)):  # mostly such as have samples, which must be found
        losses = draw(st.sampled_from([name for name in sorted(LOSSES) if 0 in LOSSES[name][1]]))
        case = replace(case, losses=losses, batch_dim=draw(st.sampled_from(["auto", 0])))
    names = [name for name in sorted(LOSSES) if case.batch_dim in LOSSES[name][1]]
    first = Step(case.samples, case.positions, frozen=case.frozen, losses=case.losses)
    often = {"shift": st.integers(1, 3), "masked": st.integers(1, 2**12)}
    seldom = {
        "samples": st.integers(1, 4),
        "positions": st.integers(1, 3),
        "is_training": st.just(False),
        "frozen": st.integers(0, 2**12),
        "losses": st.sampled_from(names),
    }
    steps = [first]
    for _ in range(draw(st.integers(1, 3))):
        chosen = {name: draw(each) for name, each in often.items() if draw(st.booleans())}
        if not chosen or draw(st.booleans()):
            name = draw(st.sampled_from(sorted(seldom)))
            chosen[name] = draw(seldom[name])
        steps.append(replace(first, **chosen))
    count = len(steps)
    order = [0, 0, *range(1, count), *draw(st.lists(st.integers(0, count - 1), max_size=6 - count))]
    taken = tuple(replace(steps[i], call=draw(st.sampled_from(CALLS))) for i in order)
    return Series(case, taken, draw(st.booleans()))
