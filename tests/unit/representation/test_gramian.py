"""The Gramian with respect to tensors of the forward pass, against autograd loss by loss."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import (
    CoupledObjectivesWarning,
    Engine,
    FreedGraphError,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidOperandError,
    MixedSamplesError,
    NotConnectedError,
    UnsupportedError,
    representation,
)
from autogram.testing import reference_jacobian
from tests.unit.checks import EVERY_KIND, Objectives, assert_close_to_reference, irregular
from tests.unit.engines import batch, counted_passes


def assert_is_exact(losses: Any, *tensors: Tensor, batch_dim: int | None = None) -> None:
    """Assert that a Gramian is that of plain autograd, row by row."""
    parts = losses if isinstance(losses, list) else [losses]
    expected = torch.cat([reference_jacobian(part, tensors) for part in parts])
    given = list(tensors) if len(tensors) > 1 else tensors[0]
    found = representation.compute_gramian(losses, given, batch_dim=batch_dim)
    assert not found.requires_grad
    assert_close_to_reference(found, expected @ expected.T)


class Heads(nn.Module):
    """Three heads of one hidden tensor."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, n)) for n in (1, 2, 3)
        )

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [(head(hidden).square() + head(hidden)).flatten(1).sum(1) for head in self.heads]


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "stack": torch.stack,
    "cat": lambda losses: torch.cat([loss.view(1) for loss in losses]),
    "list": lambda losses: losses,
    "scaled stack": lambda losses: 2 * torch.stack(losses),
}


@pytest.mark.parametrize("form", FORMS)
def test_losses_of_the_whole_batch(form: str) -> None:
    """One for each task, over a series of batches of several sizes."""
    trunk, heads = nn.Linear(3, 5), Heads()
    for size in (6, 1, 6, 9):
        hidden = trunk(batch(size, 3)).tanh()
        assert_is_exact(FORMS[form]([loss.mean() for loss in heads(hidden)]), hidden)


@pytest.mark.parametrize("form", ["stack", "list"])
def test_a_pass_goes_through_one_head_alone(form: str) -> None:
    """Not even zeros go through the others, unless a hook looks at the losses together."""
    heads, hidden = Heads(), batch(4, 5).requires_grad_()
    calls = []
    for head in heads.heads:
        head[0].register_full_backward_hook(lambda *_: calls.append(None))
    losses = FORMS[form]([head(hidden).mean() for head in heads.heads])
    representation.compute_gramian(losses, hidden)
    assert len(calls) == 3
    if form == "stack":
        with counted_passes(losses) as passes:
            representation.compute_gramian(losses, hidden)
        assert (len(passes), len(calls)) == (3, 12)


def test_the_trunk_is_not_visited() -> None:
    trunk, heads, calls = nn.Linear(3, 5), Heads(), []
    trunk.register_full_backward_hook(lambda *_: calls.append(None))
    hidden = trunk(batch(4, 3))
    representation.compute_gramian([loss.mean() for loss in heads(hidden)], hidden)
    assert not calls


@pytest.mark.parametrize("objectives", EVERY_KIND, ids=repr)
@pytest.mark.parametrize("batch_dim", [None, "own"])
def test_every_kind_of_losses(objectives: Objectives, batch_dim: Any) -> None:
    """Pass by pass, and with all samples side by side."""
    trunk, head = nn.Linear(3, 5), nn.Linear(5, 4)
    if batch_dim is not None:
        batch_dim = 0 if objectives.batch_dim == "auto" else objectives.batch_dim
    for size in (4, 7, 4):
        hidden = trunk(batch(size, 3)).tanh()
        assert_is_exact(objectives.of(head(hidden)), hidden, batch_dim=batch_dim)


def attention(hidden: Tensor) -> Tensor:
    """Tokens of each sample, ``(B, T, D)``, look at each other."""
    scores = (hidden @ hidden.mT / 2).softmax(-1)
    return (scores @ hidden).square().flatten(1).sum(1)


def convolution(hidden: Tensor) -> Tensor:
    filters = irregular(2, hidden.shape[1], 2, 2)
    return nn.functional.conv2d(hidden, filters).relu().square().sum((1, 2, 3))


def sequence_first(hidden: Tensor) -> Tensor:
    """Samples along the second dimension, ``(T, B, D)``."""
    return hidden.cumsum(0).square().sum((0, 2))


def folded(hidden: Tensor) -> Tensor:
    """Samples and tokens in one dimension, ``(4 T, D)``."""
    return (hidden @ irregular(hidden.shape[1], 3)).sin().view(4, -1).sum(1)


def routed(hidden: Tensor) -> Tensor:
    """Rows go to samples by values of an index, and one goes to none."""
    index = torch.tensor([3, 0, 0, 2, 1])
    return torch.zeros(4).index_add(0, index, hidden[:5].sin().sum(1))


PER_SAMPLE: list[tuple[Callable[[Tensor], Tensor], Sequence[int]]] = [
    (attention, (4, 3, 5)),
    (convolution, (4, 2, 5, 4)),
    (sequence_first, (3, 4, 5)),
    (folded, (12, 5)),
    (routed, (6, 5)),
    (lambda hidden: hidden.square().exp(), (4,)),
]


@pytest.mark.parametrize(("losses_of", "shape"), PER_SAMPLE)
@pytest.mark.parametrize("batch_dim", [None, 0])
def test_where_the_samples_are(
    losses_of: Callable[[Tensor], Tensor], shape: Sequence[int], batch_dim: int | None
) -> None:
    """One or two losses for each sample, one pass for each in place of one for each sample."""
    for _ in range(3):
        hidden = batch(*shape).requires_grad_()
        losses = losses_of(hidden.sin())
        assert_is_exact(losses, hidden, batch_dim=batch_dim)
        both = torch.stack([losses, losses_of(2 * hidden)], 1)
        assert_is_exact(both, hidden, batch_dim=batch_dim)
        with counted_passes(both) as passes:
            representation.compute_gramian(both, hidden, batch_dim=batch_dim)
        assert len(passes) == (2 if batch_dim == 0 else both.numel())


@pytest.mark.parametrize("batch_dim", [None, 0])
def test_several_tensors(batch_dim: int | None) -> None:
    """Of other dtypes and sizes, and two results of one node."""
    trunk, first, second = nn.Linear(3, 6), nn.Linear(2, 2), nn.Linear(4, 2)
    for size in (5, 3):
        one, other = trunk(batch(size, 3)).split([2, 4], 1)
        extra = batch(size, 2, 2).requires_grad_()
        losses = torch.stack([first(one).sin().sum(1), second(other).square().sum(1)], 1)
        losses = losses + one.sum(1, keepdim=True) * extra.square().sum((1, 2)).unsqueeze(1)
        assert_is_exact(losses, one, other, extra, batch_dim=batch_dim)
        assert_is_exact(losses, other, batch_dim=batch_dim)


def test_a_tensor_given_twice_counts_once() -> None:
    hidden = batch(3, 2).requires_grad_()
    losses = hidden.square().sum(1)
    found = representation.compute_gramian(losses, [hidden, hidden])
    assert torch.equal(found, representation.compute_gramian(losses, hidden))


def test_a_tensor_that_all_samples_share() -> None:
    """Refused with a dimension of samples, and exact without."""
    prototype = batch(5).requires_grad_()
    losses = (batch(4, 5) * prototype).sin().sum(1)
    assert_is_exact(losses, prototype)
    with pytest.raises(MixedSamplesError, match=r"Backward0`.*Pass `batch_dim=None`"):
        representation.compute_gramian(losses, prototype, batch_dim=0)


def test_losses_that_compare_samples() -> None:
    hidden = batch(4, 5).requires_grad_()
    losses = (hidden @ hidden.T).log_softmax(1).diagonal()
    assert_is_exact(losses, hidden)
    with pytest.raises(MixedSamplesError, match="The samples meet between the representation"):
        representation.compute_gramian(losses, hidden, batch_dim=0)


@pytest.mark.filterwarnings("ignore:.*prototype")  # of nested tensors
def test_nested_tensors() -> None:
    hidden = batch(2, 3).requires_grad_()
    nested = torch.nested.as_nested_tensor([hidden[0], hidden[1]])
    losses = torch.stack([x.square().sum() for x in nested.sin().unbind()])
    assert_is_exact(losses, hidden)
    with pytest.raises(UnsupportedError, match="contains a nested tensor"):
        representation.compute_gramian(losses, hidden, batch_dim=0)


class Doubled(torch.autograd.Function):
    """A node that no table knows, carried out to see what it does."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_custom_functions() -> None:
    hidden = batch(4, 5).requires_grad_()
    losses = Doubled.apply(hidden).sin().sum(1)
    assert_is_exact(losses, hidden, batch_dim=0)


@pytest.mark.parametrize("batch_dim", [None, 0])
def test_complex_numbers(batch_dim: int | None) -> None:
    """Each counts as two real ones."""
    hidden = batch(4, 6).requires_grad_()
    spectrum = torch.fft.fft(hidden, dim=1)
    losses = (spectrum * (1 + 2j)).sin().abs().sum(1)
    assert_is_exact(losses, spectrum, batch_dim=batch_dim)


def test_in_low_precision() -> None:
    """The products are at least in float32."""
    hidden = batch(4, 5).bfloat16().requires_grad_()
    losses = hidden.float().sin().sum(1)
    found = representation.compute_gramian(losses, hidden, batch_dim=0)
    assert found.dtype == torch.float32
    rows = hidden.detach().float().cos().bfloat16().float()
    expected = (rows * rows).sum(1).diag()
    torch.testing.assert_close(found, expected)


def test_with_an_engine_on_the_model() -> None:
    """Its taps are seen as what they are, and its own results stay right."""
    trunk, heads = nn.Linear(3, 5), Heads()
    engine = Engine(trunk, heads)
    for _ in range(3):
        hidden = trunk(batch(4, 3)).tanh()
        losses = torch.stack(heads(hidden), 1)
        assert_is_exact(losses, hidden, batch_dim=0)
        expected = reference_jacobian(losses, [*trunk.parameters(), *heads.parameters()])
        assert_close_to_reference(engine.compute_gramian(losses), expected @ expected.T)


def test_a_loss_without_the_representation() -> None:
    """Its row is zero, also if it is a constant."""
    hidden, other = batch(4, 5).requires_grad_(), batch(3).requires_grad_()
    losses = [hidden.square().sum(), other.sum(), torch.tensor(2.0)]
    found = representation.compute_gramian(losses, hidden)
    expected = torch.zeros(3, 3)
    expected[0, 0] = 4 * hidden.detach().square().sum()
    assert_close_to_reference(found, expected)


def test_without_losses() -> None:
    hidden = batch(0, 5).requires_grad_()
    for batch_dim in (None, 0):
        found = representation.compute_gramian(hidden.sum(1), hidden, batch_dim=batch_dim)
        assert found.shape == (0, 0)


def test_nothing_is_changed() -> None:
    """No gradient is left anywhere, and the graph serves again."""
    hidden = nn.Linear(3, 5)(batch(4, 3))
    hidden.retain_grad()
    heads = Heads()
    losses = [loss.mean() for loss in heads(hidden)]
    first = representation.compute_gramian(losses, hidden)
    assert hidden.grad is None
    assert all(p.grad is None for p in heads.parameters())
    assert torch.equal(first, representation.compute_gramian(losses, hidden))
    sum(losses).backward()
    with pytest.raises(FreedGraphError, match="The graph of the losses"):
        representation.compute_gramian(losses, hidden)


def test_not_connected() -> None:
    hidden = batch(4, 5).requires_grad_()
    losses = hidden.square().sum(1)
    for tensor in (hidden.flatten(), hidden.clone(), batch(2).requires_grad_()):
        for batch_dim in (None, 0):
            with pytest.raises(
                NotConnectedError, match="Pass the tensor itself that the heads read"
            ):
                representation.compute_gramian(losses, tensor, batch_dim=batch_dim)
    with pytest.raises(NotConnectedError, match=r"of shape \(2,\)"):
        representation.compute_gramian(losses, [hidden, batch(2).requires_grad_()])


def test_mistakes() -> None:
    hidden = batch(4, 5).requires_grad_()
    inner = hidden.sin()
    losses = inner.sum(1)
    compute = representation.compute_gramian
    with pytest.raises(InvalidOperandError, match=r"\(4, 5\) requires no gradient.*requires_grad_"):
        compute(losses, hidden.detach())
    with pytest.raises(InvalidOperandError, match=r"is a str.*the tensor that the heads read, or"):
        compute(losses, "hidden")  # type: ignore[arg-type]
    with pytest.raises(InvalidOperandError, match=r"is empty.*the tensor that the heads read, or"):
        compute(losses, [])
    with pytest.raises(InvalidOperandError, match=r"contains a str.*Pass only tensors"):
        compute(losses, [hidden, "inner"])  # type: ignore[list-item]
    with pytest.raises(InvalidOperandError, match="is computed from another"):
        compute(losses, [hidden, inner])
    with pytest.raises(InvalidLossesError, match="do not require a gradient"):
        compute(losses.detach(), hidden)
    with pytest.raises(InvalidBatchDimError, match="`batch_dim` is 1, but the losses have shape"):
        compute(losses, hidden, batch_dim=1)
    with pytest.raises(InvalidBatchDimError, match="is 'auto', which works only with an engine"):
        compute(losses, hidden, batch_dim="auto")  # type: ignore[arg-type]
    with pytest.warns(CoupledObjectivesWarning, match="the losses are one number"):
        compute(losses.sum(), hidden, batch_dim=0)
