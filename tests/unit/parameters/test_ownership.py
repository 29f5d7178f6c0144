"""Gradients are ordinary tensors: each owns its memory, as autograd's do."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autogram import Engine
from tests.unit.engines import batch, per_sample
from tests.unit.environment import DEVICE
from tests.unit.jacobians import assert_gradients_are_close


class Deep(nn.Sequential):
    """Equal layers, whose gradients are computed as a stack."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)) for _ in range(4)]
        super().__init__(*layers)


class Twins(nn.Module):
    """Parameters whose gradients are equal, and one that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shift, self.shifts = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.other(x) + self.shift + self.shifts).tanh() * self.scale


class Wide(nn.Module):
    """A layer too large for a bundle, one that several positions read, and one in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 200), nn.Linear(200, 3)
        self.table = nn.Parameter(batch(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(F.linear(x, self.table[:4]).tanh(), self.table[2:]).tanh()
        return self.last(self.first(x).tanh())


class Laid(nn.Module):
    """Parameters that are not contiguous: transposed, with gaps, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(batch(4, 4).T)
        self.gapped = nn.Parameter(batch(4, 8)[:, ::2])
        self.offset = nn.Parameter(batch(9)[5:])
        self.expanded = nn.Parameter(batch(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.transposed + self.offset).tanh()
        return (x @ self.gapped * self.expanded).tanh()


def convolutions() -> nn.Module:
    """Channels last, and grouped."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
    )
    return model.to(memory_format=torch.channels_last)


class Language(nn.Module):
    """A table that is looked up, and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        indices = (x > 0).long() + 1
        return self.layer(self.table(indices).mean(1) * x).tanh() @ self.table.weight.T


class Half(nn.Module):
    """Layers in bfloat16 and float16, whose gradients are computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).half()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype)).tanh()
        return self.last(x.to(self.last.weight.dtype)).to(torch.float32)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "deep": Deep,
    "twins": Twins,
    "wide": Wide,
    "laid": Laid,
    "convolutions": convolutions,
    "language": Language,
    "half": Half,
}
EXACT = [name for name in MODELS if name != "half"]

Step = Callable[[Engine, Tensor], None]


def fused(engine: Engine, losses: Tensor) -> None:
    engine.backward(losses, lambda gramian: gramian.new_ones(len(gramian)))


def accumulated(engine: Engine, losses: Tensor) -> None:
    engine.jacobian(losses).accumulate_grad(torch.ones(losses.shape))


STEPS: dict[str, Step] = {"backward": fused, "accumulate_grad": accumulated}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
every_model = pytest.mark.parametrize("name", MODELS)
exact_models = pytest.mark.parametrize("name", EXACT)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_each_owns_its_memory(tensors: Iterable[Tensor]) -> None:
    """Assert that none is a view, shares storage or versions, or has more storage than it needs."""
    found = list(tensors)
    assert found
    assert all(x._base is None and x.grad_fn is None and not x.requires_grad for x in found)
    assert all(x.is_leaf and not x.is_inference() for x in found)
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found)
    for x in found:
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
        assert x.storage_offset() == 0
    before = [(x._version, x.clone()) for x in found]
    for i, x in enumerate(found):
        x.mul_(2)
        for j, (other, (version, value)) in enumerate(zip(found, before, strict=True)):
            assert other._version == version + (j <= i)
            assert torch.equal(other, value * 2 if j <= i else value)


@every_step
@every_model
@pytest.mark.parametrize("steps", [1, 3])
def test_each_gradient_owns_its_memory(name: str, step: Step, steps: int) -> None:
    """Fresh, and after several steps that add to them."""
    model = MODELS[name]()
    engine = Engine(model)
    for _ in range(steps):
        step(engine, per_sample(model(batch(3, 4))))
    assert gradients(model).keys() == dict(model.named_parameters()).keys()
    assert_each_owns_its_memory(gradients(model).values())


@every_step
@every_model
def test_gradients_lie_in_memory_as_those_of_autograd(name: str, step: Step) -> None:
    """The strides of the parameter where it fills its memory, else contiguous."""
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    for _ in range(3):
        x = batch(3, 4)
        step(engine, per_sample(model(x)))
        per_sample(twin(x)).sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad.shape == theirs.grad.shape
            assert ours.grad.dtype == theirs.grad.dtype
            real = [d for d, n in enumerate(ours.shape) if n > 1]
            assert [ours.grad.stride(d) for d in real] == [theirs.grad.stride(d) for d in real]
        model.zero_grad()
        twin.zero_grad()


@every_model
def test_products_own_their_memory(name: str) -> None:
    """What `vjp` returns, for one vector and for several, and `rows`."""
    model = MODELS[name]()
    jacobian = Engine(model).jacobian(per_sample(model(batch(3, 4))))
    one, several = jacobian.vjp(torch.ones(3)), jacobian.vjp(torch.ones(2, 3))
    assert_each_owns_its_memory([*one.values(), *several.values()])
    assert_each_owns_its_memory(jacobian.rows([0, 2]).values())


def test_products_with_nothing_own_their_memory() -> None:
    """Of parameters that the losses do not reach."""
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2)})
    engine = Engine(model["used"], model["unused"])
    losses = per_sample(model["used"](batch(3, 4)) + 0 * model["unused"](batch(3, 4)).detach())
    assert_each_owns_its_memory(engine.jacobian(losses).vjp(torch.ones(3)).values())


@every_step
@exact_models
def test_gradients_stay_what_they_are(name: str, step: Step) -> None:
    """Those of earlier steps, kept by the user in whatever form, are not touched by later ones."""
    model = MODELS[name]()
    engine = Engine(model)
    kept: list[tuple[Tensor, Tensor]] = []
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        Tensor.detach,
        lambda x: x.view_as(x),
        lambda x: x.requires_grad_().sin(),
    ]
    if DEVICE == "cpu":
        forms += [
            lambda x: torch.from_numpy(x.detach().numpy()),
            lambda x: torch.from_dlpack(x.detach()),
        ]
    for form in [*forms, *forms]:
        step(engine, per_sample(model(batch(3, 4))))
        copies = [x.clone() for x in gradients(model).values()]
        kept += [
            (held, form(copied))
            for held, copied in zip(map(form, gradients(model).values()), copies, strict=True)
        ]
        model.zero_grad()
        assert all(torch.equal(held, copied) for held, copied in kept)


@every_step
@exact_models
def test_a_change_breaks_no_other_graph(name: str, step: Step) -> None:
    """Each gradient is in a graph of its own, and they are clipped one after the other."""
    model = MODELS[name]()
    engine = Engine(model)
    for _ in range(3):
        model.zero_grad()
        step(engine, per_sample(model(batch(3, 4))))
        scales = [torch.ones((), requires_grad=True) for _ in model.parameters()]
        graphs = [
            (p.grad * s).square().sum() for p, s in zip(model.parameters(), scales, strict=True)
        ]
        pairs = list(zip(model.parameters(), graphs, scales, strict=True))
        for i, (parameter, _, _) in enumerate(pairs):
            expected = [2 * p.grad.square().sum() for p in model.parameters()]
            for (_, graph, scale), value in list(zip(pairs, expected, strict=True))[i:]:
                found = torch.autograd.grad(graph, scale, retain_graph=True)[0]
                torch.testing.assert_close(found, value)
            parameter.grad.clamp_(-0.1, 0.1)


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
}


@every_step
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [name for name in EXACT if name != "laid"])
def test_training(name: str, optimizer: str, set_to_none: bool, step: Step) -> None:
    """Clipping, an optimizer, and zeros or nothing: the parameters are those of plain autograd."""
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    ours, theirs = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, twin))
    for i in range(6):
        x = batch(3, 4)
        step(engine, per_sample(model(x)))
        per_sample(twin(x)).sum().backward()
        if i % 2:
            assert_gradients_are_close(model, twin)
            for m in (model, twin):
                nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=i % 4 == 1)
        assert_gradients_are_close(model, twin)
        for o in (ours, theirs):
            o.step()
            o.zero_grad(set_to_none=set_to_none)
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


@every_step
@every_model
def test_detaching_in_place(name: str, step: Step) -> None:
    """Which PyTorch refuses for views."""
    model = MODELS[name]()
    engine = Engine(model)
    for _ in range(2):
        step(engine, per_sample(model(batch(3, 4))))
        for parameter in model.parameters():
            assert parameter.grad.detach_() is parameter.grad
            parameter.grad.requires_grad_().requires_grad_(False)
            parameter.grad.unsqueeze_(0).squeeze_(0)


@every_step
@every_model
def test_a_pickle_has_the_gradient_alone(name: str, step: Step) -> None:
    """Of a view, it would have the whole storage."""
    model = MODELS[name]()
    step(Engine(model), per_sample(model(batch(3, 4))))
    for gradient in gradients(model).values():
        plain = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype)
        sizes = [len(pickle.dumps(x)) for x in (gradient, plain)]
        saved = [io.BytesIO(), io.BytesIO()]
        for x, file in zip((gradient, plain), saved, strict=True):
            torch.save(x, file)
        assert abs(sizes[0] - sizes[1]) < 32
        assert len(saved[0].getvalue()) == len(saved[1].getvalue())
        assert torch.equal(pickle.loads(pickle.dumps(gradient)), gradient)


@every_step
@exact_models
def test_hooks_get_gradients_of_their_own(name: str, step: Step) -> None:
    """A hook that changes what it is given, or keeps it, touches no other parameter's."""
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    engine = Engine(model)
    kept: list[Tensor] = []
    for m in (model, twin):
        for i, parameter in enumerate(m.parameters()):
            parameter.register_hook(lambda g, i=i: g.mul_(i + 1))
            if m is model:
                parameter.register_hook(lambda g: kept.append(g) or None)
    for _ in range(3):
        x = batch(3, 4)
        kept.clear()
        step(engine, per_sample(model(x)))
        per_sample(twin(x)).sum().backward()
        assert_gradients_are_close(model, twin)
        assert_each_owns_its_memory(kept)


def test_functions_that_are_made_in_each_step() -> None:
    """Their classes, and what they are closed over, are not kept."""
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    engine = Engine(first, last)
    alive: list[weakref.ref[Tensor]] = []

    def step() -> None:
        hidden, mask = first(torch.randn(5, 3)), torch.rand(5, 4)
        alive.append(weakref.ref(mask))

        class Masked(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                del ctx
                return x * mask

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                del ctx
                return g * mask

        losses = last(Masked.apply(hidden)).square().sum(1)  # type: ignore[no-untyped-call]
        engine.backward(losses, lambda gramian: gramian.diagonal())

    for _ in range(8):
        step()
    gc.collect()
    assert sum(mask() is not None for mask in alive) <= 1
