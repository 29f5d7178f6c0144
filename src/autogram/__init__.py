"""Products with the Jacobian of a vector of losses, without forming it."""

from autogram._engine import Engine
from autogram._errors import (
    AutogramError,
    ChangedTensorError,
    CoupledObjectivesWarning,
    FreedGraphError,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidModulesError,
    InvalidOperandError,
    InvalidOptionError,
    MemoryLimitError,
    MixedSamplesError,
    NonFiniteError,
    NotConnectedError,
    RemovedEngineError,
    RuleCheckError,
    RuleError,
    UnsupportedError,
    UnverifiedWarning,
    VerificationError,
)
from autogram._jacobian import Jacobian

__all__ = [
    "AutogramError",
    "ChangedTensorError",
    "CoupledObjectivesWarning",
    "Engine",
    "FreedGraphError",
    "InvalidBatchDimError",
    "InvalidLossesError",
    "InvalidModulesError",
    "InvalidOperandError",
    "InvalidOptionError",
    "Jacobian",
    "MemoryLimitError",
    "MixedSamplesError",
    "NonFiniteError",
    "NotConnectedError",
    "RemovedEngineError",
    "RuleCheckError",
    "RuleError",
    "UnsupportedError",
    "UnverifiedWarning",
    "VerificationError",
]
