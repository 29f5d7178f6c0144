"""Rules of convolutions."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autogram import ChangedTensorError, Engine
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SECOND,
    SEVERAL,
    WITHOUT_SAMPLES,
    ModelFactory,
    Objectives,
    assert_close_to_reference,
    assert_gramian_is_exact,
    features,
    irregular,
    trainable,
)
from tests.unit.networks import call
from tests.unit.rules.settings import SETTINGS, Wrap, assert_rule_is_exact


def folded(x, weight):
    """Frames of a video, folded with the samples."""
    b, t = x.shape[:2]
    return F.conv2d(x.flatten(0, 1), weight).unflatten(0, (b, t))


def folded_transposed(x, weight):
    b, t = x.shape[:2]
    return F.conv_transpose2d(x.flatten(0, 1), weight).unflatten(0, (b, t))


def folded_time_first(x, weight):
    b, t = x.shape[:2]
    flat = x.transpose(0, 1).flatten(0, 1)
    return F.conv2d(flat, weight).unflatten(0, (t, b)).transpose(0, 1)


CASES = [
    pytest.param(lambda: nn.Conv1d(2, 5, 3), (3, 2, 7), id="1d"),
    pytest.param(
        lambda: nn.Conv1d(2, 5, 3, stride=2, padding=1), (3, 2, 7), id="1d, stride and padding"
    ),
    pytest.param(
        lambda: nn.Conv1d(2, 5, 4, padding="same"),
        (3, 2, 7),
        id="1d, same, even kernel",
        marks=pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    ),
    pytest.param(lambda: nn.Conv1d(2, 5, 3, dilation=2), (3, 2, 7), id="1d, dilation"),
    pytest.param(lambda: nn.Conv1d(4, 6, 3, groups=2), (3, 4, 7), id="1d, groups"),
    pytest.param(
        lambda: nn.Conv1d(2, 5, 3, padding=2, padding_mode="circular"),
        (3, 2, 7),
        id="1d, circular padding",
    ),
    pytest.param(lambda: nn.Conv2d(2, 5, 3), (3, 2, 5, 6), id="2d"),
    pytest.param(lambda: nn.Conv2d(2, 5, 3, bias=False), (3, 2, 5, 6), id="2d without bias"),
    pytest.param(lambda: nn.Conv2d(2, 5, 1), (3, 2, 4, 4), id="2d, kernel of one"),
    pytest.param(
        lambda: nn.Conv2d(2, 5, (5, 6)), (3, 2, 5, 6), id="2d, kernel as large as the input"
    ),
    pytest.param(
        lambda: nn.Conv2d(2, 3, 2, stride=2), (3, 2, 6, 6), id="2d, patches without overlap"
    ),
    pytest.param(lambda: nn.Conv2d(3, 3, 3, padding=1), (3, 3, 3, 3), id="2d, all sizes equal"),
    pytest.param(lambda: nn.Conv2d(1, 1, 3), (3, 1, 4, 4), id="2d, one channel"),
    pytest.param(
        lambda: nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
        (3, 2, 6, 5),
        id="2d, different in each dimension",
    ),
    pytest.param(
        lambda: nn.Conv2d(2, 5, 2, stride=3), (3, 2, 7, 7), id="2d, stride over the kernel"
    ),
    pytest.param(lambda: nn.Conv2d(2, 5, 3, stride=2), (3, 2, 6, 6), id="2d, unused border"),
    pytest.param(lambda: nn.Conv2d(2, 5, 3, padding="same"), (3, 2, 5, 4), id="2d, same"),
    pytest.param(
        lambda: nn.Conv2d(2, 5, (2, 4), padding="same", dilation=(1, 2)),
        (3, 2, 7, 8),
        id="2d, same, even and dilated kernel",
        marks=pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    ),
    pytest.param(lambda: nn.Conv2d(2, 5, 3, padding="valid"), (3, 2, 5, 4), id="2d, valid"),
    *(
        pytest.param(
            lambda mode=mode: nn.Conv2d(2, 5, 3, padding=(1, 2), padding_mode=mode),
            (3, 2, 5, 5),
            id=f"2d, padding {mode}",
        )
        for mode in ("reflect", "replicate", "circular")
    ),
    pytest.param(
        lambda: nn.Conv2d(2, 5, 3, padding="same", padding_mode="reflect"),
        (3, 2, 5, 5),
        id="2d, same, padding reflect",
    ),
    pytest.param(lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (3, 4, 5, 5), id="2d, groups"),
    pytest.param(lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (3, 4, 4, 4), id="2d, depthwise"),
    pytest.param(
        lambda: nn.Conv2d(4, 8, 3, groups=4), (3, 4, 4, 4), id="2d, depthwise, two outputs"
    ),
    pytest.param(lambda: nn.Conv3d(2, 3, 2), (3, 2, 3, 4, 3), id="3d"),
    pytest.param(
        lambda: nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), groups=2),
        (3, 2, 2, 4, 3),
        id="3d, different in each dimension",
    ),
    pytest.param(
        lambda: nn.Conv3d(2, 2, 2, padding="same", dilation=2), (3, 2, 4, 3, 4), id="3d, same"
    ),
    pytest.param(lambda: nn.Conv3d(2, 2, 2, groups=2), (3, 2, 3, 3, 3), id="3d, depthwise"),
    pytest.param(lambda: nn.ConvTranspose1d(2, 5, 3), (3, 2, 7), id="1d, transposed"),
    pytest.param(
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (3, 4, 5),
        id="1d, transposed, groups",
    ),
    pytest.param(
        lambda: nn.ConvTranspose1d(2, 3, 2, dilation=3, output_padding=2),
        (3, 2, 4),
        id="1d, transposed, additional output beyond the stride",
    ),
    pytest.param(
        lambda: nn.ConvTranspose1d(2, 5, 3, padding=2), (3, 2, 7), id="1d, transposed, cut"
    ),
    pytest.param(
        lambda: nn.ConvTranspose2d(2, 5, 2, stride=2),
        (3, 2, 3, 4),
        id="2d, transposed, patches without overlap",
    ),
    pytest.param(
        lambda: nn.ConvTranspose2d(3, 3, 3, padding=1, bias=False),
        (3, 3, 3, 3),
        id="2d, transposed, all sizes equal",
    ),
    pytest.param(
        lambda: nn.ConvTranspose2d(2, 3, 2, stride=3), (3, 2, 3, 3), id="2d, transposed, holes"
    ),
    pytest.param(
        lambda: nn.ConvTranspose2d(4, 4, 3, groups=4), (3, 4, 2, 3), id="2d, transposed, depthwise"
    ),
    pytest.param(
        lambda: nn.ConvTranspose2d(
            *(2, 5, (3, 2)),
            stride=(2, 3),
            padding=(0, 1),
            output_padding=(1, 2),
            dilation=(1, 2),
        ),
        (3, 2, 3, 4),
        id="2d, transposed, different in each dimension",
    ),
    pytest.param(
        lambda: nn.ConvTranspose3d(
            *(2, 4, (1, 2, 3)), stride=(1, 2, 1), padding=(0, 1, 1), groups=2, dilation=(1, 1, 2)
        ),
        (3, 2, 2, 3, 3),
        id="3d, transposed, different in each dimension",
    ),
    pytest.param(
        call(lambda x, w, c: F.conv_transpose2d(x.mT, w.mT, c, 2), (2, 3, 2, 3), (3,)),
        (3, 2, 3, 4),
        id="2d, transposed, other order in memory",
    ),
    pytest.param(
        call(
            lambda x, w: F.conv_transpose2d(
                x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
            ).sin(),
            (2, 3, 2, 3),
        ),
        (3, 2, 3, 4),
        id="2d, transposed, channels last",
    ),
    pytest.param(
        call(folded_transposed, (2, 5, 3, 3)),
        (3, 4, 2, 3, 3),
        id="transposed, frames folded behind the samples",
    ),
    pytest.param(call(F.conv2d, (5, 2, 3, 3), (5,)), (3, 2, 4, 4), id="function"),
    pytest.param(
        call(
            lambda x, w, c: torch.conv2d(input=x, bias=c, weight=w, stride=[2], padding=[1, 0]),
            (5, 2, 3, 3),
            (5,),
        ),
        (3, 2, 5, 5),
        id="function by keywords, one stride for both dimensions",
    ),
    pytest.param(
        call(folded, (5, 2, 3, 3)), (3, 4, 2, 4, 4), id="frames folded behind the samples"
    ),
    pytest.param(
        call(folded_time_first, (5, 2, 3, 3)),
        (3, 4, 2, 4, 4),
        id="frames folded before the samples",
    ),
]

UNBATCHED = [
    pytest.param(lambda: nn.Conv1d(2, 5, 3, padding=1), (2, 7), id="1d"),
    pytest.param(lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (4, 5, 5), id="2d, groups"),
    pytest.param(
        lambda: nn.Conv3d(2, 3, 2, padding="same"),
        (2, 3, 3, 3),
        id="3d, same",
        marks=pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    ),
    pytest.param(
        lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, stride=2), (4, 5), id="1d, transposed, groups"
    ),
    pytest.param(lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 3), id="2d, transposed"),
]


@pytest.mark.parametrize(("wrap", "objectives"), SETTINGS)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_gramian_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], wrap: Wrap, objectives: Objectives
) -> None:
    assert_rule_is_exact(make_model, torch.randn(shape), wrap, objectives)


@pytest.mark.parametrize("objectives", WITHOUT_SAMPLES, ids=repr)
@pytest.mark.parametrize(("make_model", "shape"), UNBATCHED)
def test_input_without_batch_dimension(
    make_model: ModelFactory, shape: tuple[int, ...], objectives: Objectives
) -> None:
    assert_gramian_is_exact(make_model, torch.randn(shape), objectives=objectives)


@pytest.mark.parametrize("limit", [1, 2**12, 2**16])
def test_memory_limit_does_not_matter(limit: int) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, groups=2))

    x = torch.randn(4, 2, 8, 8)
    assert_gramian_is_exact(make_model, x, memory_limit_bytes=limit)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("keep", ["factors", "rows"])
@pytest.mark.parametrize("objectives", [PER_SAMPLE, SEVERAL, SECOND, COUPLED], ids=repr)
@pytest.mark.parametrize(("make_model", "shape"), CASES)
def test_weighted_gradient_is_exact(
    make_model: ModelFactory, shape: tuple[int, ...], objectives: Objectives, keep: Any
) -> None:
    """By the kernel of an ordinary backward pass, where the samples are in order."""
    model = make_model()
    engine = Engine(model, batch_dim=objectives.batch_dim)
    losses = objectives.of(model(torch.randn(shape)))
    weights = irregular(*losses.shape)
    found = engine.jacobian(losses, keep=keep).vjp(weights)
    expected = torch.autograd.grad(losses, trainable(model), weights)
    for gradient, plain in zip(found.values(), expected, strict=True):
        assert_close_to_reference(gradient, plain)


def test_a_changed_input_is_noticed_by_the_jacobian() -> None:
    """The input itself is read again for a weighted gradient."""
    model = nn.Conv1d(2, 3, 2)
    engine = Engine(model)
    x = torch.randn(4, 2, 5)
    jacobian = engine.jacobian(features(model(x), 1).squeeze(1), keep="factors")
    x.mul_(2)
    with pytest.raises(ChangedTensorError):
        jacobian.vjp(torch.ones(4))
