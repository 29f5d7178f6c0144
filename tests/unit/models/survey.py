"""What the engine does with a specimen: kinds of uses, samples, error."""

import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from autogram import CoupledObjectivesWarning, Engine
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
        derived: How many parameters are read by way of tensors that are computed from them.
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


def calls_of(engine: Engine) -> set[tuple[str, int, bool]]:
    """The calls that read parameters: function, index, and whether there is a rule.

    Each is there once, whatever it reads. They are those of one forward pass.
    """
    uses = [use for of in engine.report().parameters for use in of.uses]
    return {(use.function, use.index, use.rule is not None) for use in uses}


def survey(specimen: Specimen) -> Finding:
    """Compute the Gramian of a batch, and see how; with the attention that is the default."""
    torch.manual_seed(0)
    model = specimen.make_model(specimen.attentions[-1])
    batch = specimen.make_batch(specimen.sizes[1])
    engine = Engine(model)
    losses = specimen.compute_losses(model, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CoupledObjectivesWarning)
        gramian = engine.compute_gramian(losses)
    report = engine.report()
    calls = calls_of(engine)
    jacobian = reference_jacobian(losses, trainable(model))
    expected = jacobian @ jacobian.T
    return Finding(
        model=type(model).__name__,
        rules=Counter(function for function, _, has_rule in calls if has_rule),
        fallbacks=Counter(function for function, _, has_rule in calls if not has_rule),
        derived=sum(any(use.is_derived for use in of.uses) for of in report.parameters),
        is_per_sample=not caught,
        dtype=expected.dtype,
        error=float((gramian - expected).abs().max() / expected.abs().max()),
    )
