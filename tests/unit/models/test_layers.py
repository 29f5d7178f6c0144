"""Layers with free parameters, as they are found in papers: with rules, or left to the fallback."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.nn.utils import parametrize

from autogram import Engine
from tests.unit.checks import COUPLED, SEVERAL, ModelFactory, Objectives, assert_gramian_is_exact
from tests.unit.engines import assert_exact
from tests.unit.networks import AmongOthers, call

B, T, D = 3, 4, 6


def fourier_filter(x: Tensor, weight: Tensor) -> Tensor:
    """Learned complex factors of the spectrum along the tokens, as in a global filter network."""
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(weight), n=T, dim=1)


def fourier_filter_2d(x: Tensor, weight: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(weight)
    return torch.fft.irfft2(spectrum, s=(T, D), norm="ortho")


def fourier_mixing(x: Tensor, weight: Tensor) -> Tensor:
    """Complex matrices for a few frequencies, as in a Fourier neural operator."""
    spectrum = torch.fft.rfft(x, dim=1)[:, :2]
    mixed = torch.einsum("bfi,fio->bfo", spectrum, torch.view_as_complex(weight))
    return torch.fft.irfft(F.pad(mixed, (0, 0, 0, 1)), n=T, dim=1)


def real_filter(x: Tensor, weight: Tensor) -> Tensor:
    """Real factors of the spectrum."""
    return torch.fft.irfft(torch.fft.rfft(x) * weight, n=D)


def circulant(x: Tensor, weight: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(weight), n=D)


def long_convolution(x: Tensor, weight: Tensor, decay: Tensor) -> Tensor:
    """A filter as long as the sequence, with a learned decay, by Fourier transforms."""
    window = torch.exp(-decay.exp() * torch.arange(T)[:, None])
    spectra = torch.fft.rfft(x, 2 * T, 1) * torch.fft.rfft(weight * window, 2 * T, 0)
    return torch.fft.irfft(spectra, dim=1)[:, :T]


def radial(x: Tensor, centres: Tensor, widths: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(x, centres).square() * widths.exp())


def radial_of_samples(x: Tensor, centres: Tensor) -> Tensor:
    """Distances of whole samples, which are the rows of one matrix."""
    return torch.cdist(x.flatten(1), centres, p=1.5)


def radial_by_hand(x: Tensor, centres: Tensor) -> Tensor:
    return (x.unsqueeze(2) - centres).square().sum(-1).neg().exp()


def cosine_classifier(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(F.normalize(x, dim=-1), F.normalize(weight, dim=-1)) * scale


def cosine_similarities(x: Tensor, weight: Tensor) -> Tensor:
    return F.cosine_similarity(x.unsqueeze(2), weight, dim=-1)


def soft_codebook(x: Tensor, codes: Tensor) -> Tensor:
    """Codes in the proportions of their nearness."""
    return torch.softmax(-torch.cdist(x, codes), -1) @ codes


def straight_through(x: Tensor, codes: Tensor) -> Tensor:
    """The nearest code, with a gradient to the input and to the code."""
    nearest = F.embedding(torch.cdist(x, codes).argmin(-1), codes)
    return x + (nearest - x).detach() + 0.5 * (nearest - x.detach()).square()


def tucker(x: Tensor, core: Tensor, first: Tensor, second: Tensor) -> Tensor:
    weight = torch.einsum("pq,ip,oq->io", core, first, second)
    return torch.einsum("bti,io->bto", x, weight)


def tensor_train(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    x = x.unflatten(2, (2, 3))
    return torch.einsum("btij,ikr,rjl->btkl", x, first, second).flatten(2)


def kronecker(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return x @ torch.kron(first, second)


def splines(x: Tensor, weight: Tensor, knots: Tensor) -> Tensor:
    """Learned functions of single features, as in a Kolmogorov-Arnold network."""
    basis = (1 - (x.unsqueeze(-1) - knots).abs()).relu()
    return torch.einsum("btin,oin->bto", basis, weight)


def polynomial(x: Tensor, linear: Tensor, quadratic: Tensor) -> Tensor:
    return x @ linear + torch.einsum("bti,ijo,btj->bto", x, quadratic, x)


def dense_mixture(x: Tensor, gate: Tensor, experts: Tensor) -> Tensor:
    return torch.einsum("bte,eio,bti->bto", (x @ gate).softmax(-1), experts, x)


def memory(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (x @ keys.mT / D**0.5).softmax(-1) @ values


def decision_tree(x: Tensor, splits: Tensor, thresholds: Tensor, leaves: Tensor) -> Tensor:
    right = torch.sigmoid(x @ splits - thresholds)  # (b, t, 2)
    branches = torch.stack([1 - right, right], -1)
    return torch.einsum("btm,btn,mno->bto", branches[:, :, 0], branches[:, :, 1], leaves)


def recurrence(x: Tensor, decay: Tensor, weight: Tensor) -> Tensor:
    """A linear recurrence with a learned decay for each channel."""
    state, states = x.new_zeros(len(x), D), []
    for step in range(T):
        state = torch.sigmoid(decay) * state + x[:, step] @ weight
        states.append(state)
    return torch.stack(states, 1)


def scan(x: Tensor, decay: Tensor) -> Tensor:
    """The same in closed form, by cumulative sums."""
    powers = torch.sigmoid(decay) ** torch.arange(T)[:, None]
    return torch.cumsum(x / powers, 1) * powers


def cayley(x: Tensor, weight: Tensor) -> Tensor:
    """An orthogonal matrix."""
    skew = weight - weight.mT
    return x @ torch.linalg.solve(torch.eye(D) + skew, torch.eye(D) - skew)


def exponential(x: Tensor, weight: Tensor) -> Tensor:
    return x @ torch.linalg.matrix_exp(weight / 4)


def learned_grid(x: Tensor, image: Tensor) -> Tensor:
    """A learned image, read where the samples say."""
    places = x.unflatten(2, (3, 2)).tanh()
    image = image.expand(len(x), -1, -1, -1)
    return F.grid_sample(image, places, align_corners=False).flatten(1)


def feature_planes(x: Tensor, planes: Tensor) -> Tensor:
    """Two planes of a radiance field, each read in one call at the points of all samples."""
    points = x.unflatten(2, (2, 3)).flatten(0, 1)[..., :2].tanh()
    read = F.grid_sample(planes, torch.stack([points, points.flip(2)]), align_corners=True)
    return read.prod(0).view(-1, B, T, 2).permute(1, 2, 3, 0)


def transformed_planes(x: Tensor, plane: Tensor) -> Tensor:
    """One plane behind a call, in place of two; and such a plane for each sample."""
    grid = x.unflatten(2, (3, 2)).tanh()  # (B, T, 3, 2)
    both = F.grid_sample(
        plane.tanh().expand(2, -1, -1, -1),
        torch.stack([grid.flatten(0, 1), grid.flatten(0, 1).flip(2)]),
        align_corners=True,
    )
    own = F.grid_sample(plane.sin().repeat(len(x), 1, 1, 1), grid, align_corners=False)
    return both.prod(0).view(-1, len(x), T, 3).permute(1, 2, 3, 0) + own.movedim(1, 3)


def voxels(x: Tensor, values: Tensor) -> Tensor:
    places = x.unflatten(2, (2, 3)).tanh().unsqueeze(0)
    return F.grid_sample(values, places, padding_mode="border", align_corners=False)[0].movedim(
        0, 3
    )


def learned_upsampling(x: Tensor, weight: Tensor) -> Tensor:
    patches = x.mT.unsqueeze(-1) * weight  # (b, d, t, taps)
    return F.fold(patches.permute(0, 1, 3, 2).flatten(1, 2), (1, T + 1), (1, 2)).squeeze(2)


def random_features(x: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([(x * scale.exp()).cos(), (x * scale.exp()).sin()], -1)


def learned_quantiles(x: Tensor, offsets: Tensor) -> Tensor:
    return x.sort(1).values + F.softplus(offsets).cumsum(0)


LAYERS: dict[str, ModelFactory] = {
    "Fourier filter": call(fourier_filter, (T // 2 + 1, D, 2)),
    "Fourier filter in two dimensions": call(fourier_filter_2d, (T, D // 2 + 1, 2)),
    "Fourier mixing": call(fourier_mixing, (2, D, D, 2)),
    "real filter": call(real_filter, (D // 2 + 1,)),
    "circulant matrix": call(circulant, (D,)),
    "long convolution": call(long_convolution, (T, D), (D,)),
    "radial basis": call(radial, (5, D), (5,)),
    "radial basis of samples": call(radial_of_samples, (5, T * D)),
    "radial basis by hand": call(radial_by_hand, (5, D)),
    "cosine classifier": call(cosine_classifier, (5, D), ()),
    "cosine similarities": call(cosine_similarities, (5, D)),
    "soft codebook": call(soft_codebook, (5, D)),
    "straight-through codebook": call(straight_through, (5, D)),
    "Tucker": call(tucker, (2, 3), (D, 2), (5, 3)),
    "tensor train": call(tensor_train, (2, 3, 2), (2, 3, 2)),
    "Kronecker": call(kronecker, (2, 3), (3, 2)),
    "splines": call(splines, (5, D, 4), (4,)),
    "polynomial": call(polynomial, (D, 2), (D, D, 2)),
    "dense mixture of experts": call(dense_mixture, (D, 3), (3, D, 2)),
    "memory": call(memory, (5, D), (5, 2)),
    "decision tree": call(decision_tree, (D, 2), (2,), (2, 2, 3)),
    "recurrence": call(recurrence, (D,), (D, D)),
    "scan": call(scan, (D,)),
    "Cayley": call(cayley, (D, D)),
    "matrix exponential": call(exponential, (D, D)),
    "learned grid": call(learned_grid, (1, 2, 3, 3)),
    "feature planes": call(feature_planes, (2, 3, 4, 5)),
    "transformed planes": call(transformed_planes, (1, 3, 4, 5)),
    "voxels": call(voxels, (1, 2, 3, 4, 2)),
    "learned upsampling": call(learned_upsampling, (2,)),
    "random features": call(random_features, (D,)),
    "quantiles": call(learned_quantiles, (T, D)),
}


@pytest.mark.parametrize(
    ("wrap", "objectives"),
    [
        pytest.param(AmongOthers, SEVERAL, id="among others (B, K)"),
        pytest.param(lambda module: module, COUPLED, id="alone coupled"),
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str, wrap: Callable[[nn.Module], nn.Module], objectives: Objectives) -> None:
    x = torch.randn(B, T, D)
    assert_gramian_is_exact(lambda: wrap(LAYERS[name]()), x, objectives=objectives)


class Adaptive(nn.Module):
    """A language model with an adaptive softmax, whose clusters take tokens of all samples."""

    def __init__(self, *, head_bias: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(D, 8)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(
            8, 10, [3, 6], div_value=2.0, head_bias=head_bias
        )

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.hidden(x).tanh()
        output = self.softmax(hidden.flatten(0, -2), targets.flatten()).output
        return output.view(targets.shape)


@pytest.mark.parametrize("head_bias", [False, True], ids=["", "head bias"])
@pytest.mark.parametrize("shape", [(6,), (6, 3)], ids=["one target", "several targets"])
def test_adaptive_softmax(shape: tuple[int, ...], head_bias: bool) -> None:
    """Other targets in each batch: also none of a cluster, or of one cluster alone."""
    model = Adaptive(head_bias=head_bias)
    engine = Engine(model)
    for low, high in [(0, 10), (0, 10), (0, 3), (0, 10), (6, 10), (0, 10)]:
        x, targets = torch.randn(*shape, D), torch.randint(low, high, shape)
        losses = model(x, targets).flatten(1).sum(1) if len(shape) > 1 else model(x, targets)
        assert_exact(engine, losses, model)
        everything = model.softmax.log_prob(model.hidden(x).flatten(0, -2)).cos()
        assert_exact(engine, everything.view(6, -1).sum(1), model)


class Called(nn.Module):
    """A module that is called with weights computed from its own."""

    def __init__(self, weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.inner.named_parameters())
        return functional_call(self.inner, self.weights(parameters), (x,))


WEIGHTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "the same": lambda weights: weights,
    "cosines": lambda weights: {name: weight.cos() for name, weight in weights.items()},
    "one of them": lambda weights: {"0.weight": weights["0.weight"] * 2},
    "of each other": lambda weights: {"0.bias": weights["2.weight"].sum(0)},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_functional_call(name: str) -> None:
    x = torch.randn(B, T, D)
    assert_gramian_is_exact(lambda: Called(WEIGHTS[name]), x, objectives=SEVERAL)


class Ensemble(nn.Module):
    """Several modules as one batched call of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(D, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parameters, buffers = stack_module_state(list(self.members))
        stacked = {
            name: torch.stack([dict(m.named_parameters())[name] for m in self.members])
            for name in parameters
        }

        def member(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(self.members[0], (weights, buffers), (x,))

        return torch.vmap(member)(stacked).movedim(0, 1)


def test_ensemble_by_a_batched_functional_call() -> None:
    assert_gramian_is_exact(Ensemble, torch.randn(B, T, D), objectives=SEVERAL)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def _parametrized(kind: str) -> nn.Module:
    layer = nn.Linear(D, D)
    if kind == "symmetric":
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer
    return getattr(nn.utils.parametrizations, kind)(layer)


@pytest.mark.parametrize("kind", ["symmetric", "weight_norm", "spectral_norm", "orthogonal"])
def test_parametrization(kind: str) -> None:
    """In evaluation mode, in which a spectral norm keeps its estimate."""
    x = torch.randn(B, T, D)
    assert_gramian_is_exact(lambda: _parametrized(kind).eval(), x, objectives=SEVERAL)
