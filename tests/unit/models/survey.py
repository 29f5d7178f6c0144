"""What the engine does with a specimen: kinds of uses, samples, error."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autogram import CoupledObjectivesWarning, Engine
from autogram._capture.forward import tapping
from autogram._capture.uses import FallbackUse, RuleUse, Use
from autogram.testing import reference_jacobian
from tests.unit.checks import trainable

from .specimen import Specimen


@dataclass(frozen=True)
class Finding:
    """How the Gramian of one specimen is computed.

    Attributes:
        model: The class of the model.
        rules: How many uses each rule has, by the torch function's name.
        fallbacks: The same of calls that have none, or that the recorder could not see.
        derived: Tensors that are read in the place of parameters, and pulled back to them.
        is_per_sample: Whether the losses are treated as losses of samples.
        dtype: Of the Gramian, and of the one that it is compared with.
        error: Largest error of an entry, over the largest entry.
    """

    model: str
    rules: Counter[str]
    fallbacks: Counter[str]
    derived: int
    is_per_sample: bool
    dtype: torch.dtype
    error: float


@contextmanager
def seen_uses() -> Iterator[list[Use]]:
    """The uses that are recorded meanwhile."""
    seen: list[Use] = []
    tap = tapping.tap

    def tap_and_tell(use: Use, *rest: Any, **options: Any) -> Tensor:
        seen.append(use)
        return tap(use, *rest, **options)

    with mock.patch.object(tapping, "tap", tap_and_tell):
        yield seen


def survey(specimen: Specimen) -> Finding:
    """Compute the Gramian of a batch, and see how; with the attention that is the default."""
    torch.manual_seed(0)
    model = specimen.make_model(specimen.attentions[-1])
    batch = specimen.make_batch(specimen.sizes[1])
    engine = Engine(model)
    with seen_uses() as uses:
        losses = specimen.compute_losses(model, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CoupledObjectivesWarning)
        gramian = engine.compute_gramian(losses)
    jacobian = reference_jacobian(losses, trainable(model))
    expected = jacobian @ jacobian.T
    return Finding(
        model=type(model).__name__,
        rules=Counter(use.function for use in uses if isinstance(use, RuleUse)),
        fallbacks=Counter(use.function for use in uses if isinstance(use, FallbackUse)),
        derived=len({read for use in uses for read in use.reads if read.region is None}),
        is_per_sample=not caught,
        dtype=expected.dtype,
        error=float((gramian - expected).abs().max() / expected.abs().max()),
    )
