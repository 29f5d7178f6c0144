"""The rule of sums and means of rows of a table."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autogram import Engine, UnsupportedError
from tests.unit.checks import EVERY_KIND, ModelFactory, Objectives, assert_gramian_is_exact
from tests.unit.engines import assert_exact, per_sample
from tests.unit.environment import DEVICE
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact

TOKENS = 7
MODES = ("sum", "mean", "max")


class Bags(nn.Module):
    """A table whose rows are added up in bags of different sizes, one of them empty."""

    sizes = (2, 0, 5, 1)

    def __init__(self, *, weighted: bool = False, folded: bool = False, **arguments) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(TOKENS, 4, **arguments)
        self.weights = nn.Embedding(TOKENS, 1) if weighted else None
        self.folded = folded

    def forward(self, samples):
        """Bag i has the first ``sizes[i]`` tokens of sample i, or of the samples' i-th quarter."""
        bags = samples.view(-1, 5)
        sizes = torch.tensor(self.sizes).repeat(len(bags) // len(self.sizes))
        tokens = bags[torch.arange(5) < sizes.unsqueeze(1)]
        offsets = F.pad(sizes.cumsum(0), (1, 0))
        if not self.bag.include_last_offset:
            offsets = offsets[:-1]
        weights = self.weights(tokens).squeeze(1) if self.weights else None
        output = self.bag(tokens, offsets, weights)
        return output.unflatten(0, (len(samples), -1)) if self.folded else output


class Tied(nn.Module):
    """A table that is also the weight of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(TOKENS, 4)

    def forward(self, tokens):
        return F.linear(self.bag(tokens).tanh(), self.bag.weight)


def weighted(tokens, table):
    return F.embedding_bag(tokens, table, mode="sum", per_sample_weights=tokens.cos())


def weighted_by_parameter(tokens, table, weights):
    rows = weights.expand(tokens.shape)
    return F.embedding_bag(tokens, table, mode="sum", per_sample_weights=rows)


def sequence_first(tokens, table):
    """Bags of one token, the tokens of all samples one after the other."""
    bags = F.embedding_bag(tokens.T.reshape(-1, 1), table)
    return bags.unflatten(0, tokens.T.shape).transpose(0, 1)


CASES = [
    *(
        pytest.param(lambda mode=mode: nn.EmbeddingBag(TOKENS, 4, mode=mode), (3, 5), id=mode)
        for mode in MODES
    ),
    *(
        pytest.param(
            lambda mode=mode: nn.EmbeddingBag(TOKENS, 4, mode=mode, padding_idx=2),
            (3, 20),
            id=f"{mode}, padding",
        )
        for mode in MODES
    ),
    pytest.param(
        lambda: nn.EmbeddingBag(TOKENS, 4, padding_idx=-1), (3, 5), id="padding from the end"
    ),
    pytest.param(
        call(
            lambda x, w: F.embedding_bag(torch.where(x[:, :1] > 3, 2, x), w, padding_idx=2),
            (TOKENS, 4),
        ),
        (3, 5),
        id="a sample of padding alone",
    ),
    pytest.param(
        lambda: nn.EmbeddingBag(TOKENS, 4, mode="sum", sparse=True), (3, 5), id="sparse gradients"
    ),
    *(
        pytest.param(lambda mode=mode: Bags(mode=mode), (4, 5), id=f"{mode}, offsets")
        for mode in MODES
    ),
    pytest.param(lambda: Bags(mode="mean", padding_idx=2), (4, 5), id="mean, offsets, padding"),
    pytest.param(
        lambda: Bags(mode="mean", include_last_offset=True), (4, 5), id="mean, last offset"
    ),
    pytest.param(
        lambda: Bags(mode="mean", folded=True), (2, 10), id="mean, offsets, bags behind samples"
    ),
    pytest.param(call(weighted, (TOKENS, 4)), (3, 5), id="weights"),
    pytest.param(
        call(weighted_by_parameter, (TOKENS, 4), (5,)), (3, 5), id="weights that are learned"
    ),
    pytest.param(
        call(lambda x, w, q: weighted_by_parameter(x, w.detach(), q), (TOKENS, 4), (5,)),
        (3, 5),
        id="weights alone are learned",
    ),
    pytest.param(call(sequence_first, (TOKENS, 4)), (3, 5), id="sequence first"),
    pytest.param(
        call(
            lambda x, w: torch.embedding_bag(w, x.flatten(), torch.arange(0, x.numel(), 5))[0],
            (TOKENS, 4),
        ),
        (3, 5),
        id="torch.embedding_bag",
    ),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    tokens = torch.randint(0, TOKENS, shape, device="cpu").to(DEVICE)  # else others on a GPU
    assert_rule_is_exact(make_model, tokens, wrap, objectives)


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("limit", [1, 2**29])
def test_table_tied_to_the_output_layer(limit: int, objectives: Objectives) -> None:
    tokens = torch.randint(0, TOKENS, (3, 5))
    assert_gramian_is_exact(Tied, tokens, objectives=objectives, memory_limit_bytes=limit)


@pytest.mark.parametrize(
    "arguments", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=lambda x: next(iter(x))
)
def test_what_has_no_jacobian_is_refused(arguments: dict) -> None:
    model = nn.EmbeddingBag(TOKENS, 4, **arguments)
    before = model.weight.detach().clone()
    engine = Engine(model)
    with pytest.raises(UnsupportedError, match=next(iter(arguments))):
        model(torch.tensor([[1, 2]]))
    assert torch.equal(model.weight, before)
    del engine


def test_offsets_that_move_weights_between_samples() -> None:
    """Where weights are computed by samples, other offsets are other places of the samples."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(TOKENS, 4, mode="sum")
            self.scale = nn.Linear(1, 1)

        def forward(self, x, tokens, offsets):
            return self.bag(tokens, offsets, self.scale(x).squeeze(1))

    model = Weighted()
    engine = Engine(model, batch_dim="auto")
    tokens, x = torch.randint(0, TOKENS, (4,)), torch.randn(4, 1)
    for _ in range(2):
        assert_exact(engine, per_sample(model(x, tokens, torch.tensor([0, 2]))), model)
    assert_exact(engine, per_sample(model(x, tokens, torch.tensor([0, 1]))), model)


def test_bags_that_are_all_empty() -> None:
    """Beside another use of the table, they add nothing."""

    def empty(tokens, table):
        bags = F.embedding_bag(tokens[:0, 0], table, torch.zeros(len(tokens), dtype=torch.long))
        return bags + F.embedding_bag(tokens, table)

    assert_gramian_is_exact(call(empty, (TOKENS, 4)), torch.randint(0, TOKENS, (3, 5)))


def test_errors_of_torch_stay_its_own() -> None:
    """A rule is asked before the call, and must not fail in its place."""
    model = nn.EmbeddingBag(TOKENS, 4)
    engine = Engine(model)
    with pytest.raises(ValueError, match="offsets has to be a 1D Tensor"):
        model(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="offsets has to be None"):
        model(torch.tensor([[1, 2]]), torch.tensor([0]))
    del engine
