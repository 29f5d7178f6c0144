"""Products with the Jacobian of a vector of losses, without forming it."""

from autogram._engine import Engine
from autogram._errors import (
    AutogramError,
    CoupledObjectivesWarning,
    FreedGraphError,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidModulesError,
    MixedSamplesError,
    NonFiniteError,
    NotConnectedError,
    RuleCheckError,
    RuleError,
    UnsupportedError,
)

__all__ = [
    "AutogramError",
    "CoupledObjectivesWarning",
    "Engine",
    "FreedGraphError",
    "InvalidBatchDimError",
    "InvalidLossesError",
    "InvalidModulesError",
    "MixedSamplesError",
    "NonFiniteError",
    "NotConnectedError",
    "RuleCheckError",
    "RuleError",
    "UnsupportedError",
]
