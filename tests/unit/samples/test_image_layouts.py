"""Images and videos: channels in the last dimension of memory, frames and windows in the batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autogram import Engine
from tests.unit.checks import (
    COUPLED,
    PER_SAMPLE,
    SEVERAL,
    Objectives,
    assert_gramian_is_exact,
)
from tests.unit.engines import assert_exact, batch, per_sample

AS_SAMPLES = Objectives("(B,) given", PER_SAMPLE.of, batch_dim=0)
EXACT = pytest.mark.parametrize("objectives", [AS_SAMPLES, SEVERAL, COUPLED], ids=repr)

# --- Channels last --------------------------------------------------------------------------------


def _images_2d() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Conv2d(4, 4, 3, groups=4, stride=2),
        nn.BatchNorm2d(4).eval(),
        nn.PReLU(4),
        nn.Conv2d(4, 6, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def _images_3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, (1, 2, 2)),
        nn.GroupNorm(1, 4),
        nn.SiLU(),
        nn.Conv3d(4, 4, 2, groups=2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


FORMATS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.memory_format]] = {
    "2d": (_images_2d, (2, 5, 5), torch.channels_last),
    "3d": (_images_3d, (2, 3, 3, 4), torch.channels_last_3d),
}


@EXACT
@pytest.mark.parametrize("samples", [1, 3, 4, 6])  # as many as channels, too
@pytest.mark.parametrize("of_model", [True, False])
@pytest.mark.parametrize("of_inputs", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_channels_last(
    name: str, of_inputs: bool, of_model: bool, samples: int, objectives: Objectives
) -> None:
    """Weights, inputs, or both are in memory with their channels last."""
    make, shape, memory_format = FORMATS[name]
    images = batch(samples, *shape)
    template = make()
    template(images)  # lazy layers take their shapes

    def make_model() -> nn.Module:
        return template.to(memory_format=memory_format) if of_model else template

    if of_inputs:
        images = images.contiguous(memory_format=memory_format)
    assert_gramian_is_exact(make_model, images, objectives=objectives)


def test_memory_format_that_changes() -> None:
    """The shapes stay, and the strides do not."""
    model = _images_2d()
    engine = Engine(model, batch_dim=0)
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        images = batch(3, 2, 5, 5).contiguous(memory_format=memory_format)
        assert_exact(engine, per_sample(model(images)), model)


class ChannelsLastNorm(nn.Module):
    """Layer normalisation of the channels, which are last in shape as in memory meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv2d(2, 4, 2), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, images: Tensor) -> Tensor:
        y = self.conv(images).permute(0, 2, 3, 1)
        return self.scale(self.norm(y)).permute(0, 3, 1, 2).tanh()


@EXACT
def test_channels_moved_behind_pixels(objectives: Objectives) -> None:
    assert_gramian_is_exact(ChannelsLastNorm, batch(3, 2, 4, 4), objectives=objectives)


# --- Videos ---------------------------------------------------------------------------------------


class DividedAttention(nn.Module):
    """Attention over patches with frames in the batch, then over frames with patches in it."""

    def __init__(self, frames_first: bool) -> None:
        super().__init__()
        self.frames_first = frames_first
        self.frame_embedding = nn.Parameter(batch(3, 1, 4))
        arguments: Any = {"d_model": 4, "nhead": 2, "dim_feedforward": 5, "batch_first": True}
        self.space = nn.TransformerEncoderLayer(**arguments, dropout=0.1)
        self.time = nn.TransformerEncoderLayer(**arguments, dropout=0.1)

    def forward(self, video: Tensor) -> Tensor:
        b, t, s, d = video.shape
        video = video + self.frame_embedding[:t]
        if self.frames_first:
            folded = video.transpose(0, 1).reshape(t * b, s, d)  # (t b) s d
            video = self.space(folded).view(t, b, s, d).transpose(0, 1)
        else:
            video = self.space(video.reshape(b * t, s, d)).view(b, t, s, d)  # (b t) s d
        folded = video.transpose(1, 2).reshape(b * s, t, d)  # (b s) t d
        return self.time(folded).view(b, s, t, d)


@EXACT
@pytest.mark.parametrize("frames_first", [False, True])
@pytest.mark.parametrize(("samples", "frames", "patches"), [(2, 3, 4), (3, 3, 3), (4, 2, 4)])
def test_frames_and_patches_in_the_batch(
    samples: int, frames: int, patches: int, frames_first: bool, objectives: Objectives
) -> None:
    """The samples lie before and between other dimensions, in turn, also with equal sizes."""
    video = batch(samples, frames, patches, 4)
    assert_gramian_is_exact(lambda: DividedAttention(frames_first), video, objectives=objectives)


class FrameByFrame(nn.Module):
    """A convolution of single frames, channels last, and one over time."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.over = nn.Conv2d(2, 4, 2), nn.Conv1d(4, 3, 2)

    def forward(self, video: Tensor) -> Tensor:
        b, t = video.shape[:2]
        frames = video.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        features = self.frame(frames).tanh().mean((2, 3)).view(b, t, -1)
        return self.over(features.transpose(1, 2))


@EXACT
@pytest.mark.parametrize(("samples", "frames"), [(1, 3), (3, 3), (4, 2)])
def test_frames_with_channels_last(samples: int, frames: int, objectives: Objectives) -> None:
    assert_gramian_is_exact(FrameByFrame, batch(samples, frames, 2, 3, 3), objectives=objectives)


# --- Windows --------------------------------------------------------------------------------------


class ShiftedWindows(nn.Module):
    """Attention in 2 x 2 windows of an image that was rolled, with a learnt bias and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.bias = nn.Parameter(batch(9, 2))
        self.register_buffer("places", torch.arange(16).view(4, 4) % 9)
        mask = torch.zeros(4, 1, 4, 4)
        mask[3, :, :2, 2:] = mask[3, :, 2:, :2] = -100.0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, d = x.shape
        x = x.roll((-1, -1), (1, 2)).view(b, h // 2, 2, w // 2, 2, d)
        windows = x.transpose(2, 3).reshape(-1, 4, d)  # (b windows) t d
        q, k, v = self.project(windows).view(-1, 4, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) + self.bias[self.places].permute(2, 0, 1)
        scores = (scores.view(b, -1, 2, 4, 4) + self.mask).view_as(scores)
        y = (scores.softmax(3) @ v).transpose(1, 2).reshape(b, h // 2, w // 2, 2, 2, d)
        return y.transpose(2, 3).reshape(b, h, w, d).roll((1, 1), (1, 2))


@EXACT
@pytest.mark.parametrize("samples", [1, 3, 4, 16])  # windows, and patches, of an image
def test_shifted_windows(samples: int, objectives: Objectives) -> None:
    assert_gramian_is_exact(ShiftedWindows, batch(samples, 4, 4, 4), objectives=objectives)
