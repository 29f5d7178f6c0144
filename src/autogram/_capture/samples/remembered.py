"""Where samples lay in earlier calls of an engine, and when that holds again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from autogram._blocks import Placement
from autogram._capture.recording import Channel
from autogram._capture.samples.layouts import Layouts
from autogram._capture.samples.proof import Constant, Proof, Spot
from autogram._capture.samples.survey import Survey
from autogram._containers import Latest


@dataclass
class Known:
    """The layouts that were found for one graph.

    Attributes:
        layouts: The layouts of each use, in the order of the survey.
        constants: The constants that the layouts depend on, with their values at that time.
        silent: The spots whose cotangent was zero.
        is_doubted: Whether to search for the samples again before the layouts are used.
    """

    layouts: tuple[tuple[Placement, ...], ...]
    constants: tuple[tuple[Constant, Tensor], ...]
    silent: tuple[Spot, ...]
    is_doubted: bool = False

    def changes(self, survey: Survey) -> list[Tensor]:
        """For each constant, whether it has other values now."""
        return [_differ(constant.value(survey), old) for constant, old in self.constants]

    def of_uses(self, survey: Survey) -> Layouts:
        """The layouts, by use."""
        return dict(zip(survey.uses, self.layouts, strict=True))


@dataclass(frozen=True)
class Remembered:
    """What an engine remembers of graphs. It holds no tensor of a pass but constants.

    Layouts, and reasons why samples count as mixed (refusals), are kept by a survey's key and the
    dimension of the losses. Proofs are kept by the structure of a graph and, where it matters, a
    pattern of sizes (`Search._proof_keys`).
    """

    channel: Channel
    layouts: Latest[tuple[bytes, int | None], Known] = field(default_factory=Latest)
    refusals: Latest[tuple[bytes, int | None], str] = field(default_factory=Latest)
    proofs: Latest[tuple[bytes, int | None, bytes], Proof] = field(default_factory=Latest)


def _differ(new: Tensor, old: Tensor) -> Tensor:
    """Whether two tensors differ, as a tensor on their device."""
    if new.shape != old.shape or new.device != old.device:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return (new != old).any()
