"""Products with the Jacobian of a vector of losses, without forming it."""

from autogram import _compiled as _compiled  # registers the backend
from autogram._capture.backward.run import UseReport
from autogram._engine import Engine
from autogram._jacobian import Jacobian, Sketch, concatenate
from autogram._losses import gramians_by_task
from autogram._report import ParameterReport, Report
from autogram.errors import (
    AutogramError,
    ChangedTensorError,
    CompiledPartWarning,
    CoupledObjectivesWarning,
    FreedGraphError,
    HookError,
    InexactWeightsWarning,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidModulesError,
    InvalidOperandError,
    InvalidOptionError,
    MemoryLimitError,
    MixedSamplesError,
    NonFiniteError,
    NotConnectedError,
    RankError,
    RemovedEngineError,
    RuleCheckError,
    RuleError,
    StaleCaptureError,
    UnseenUseError,
    UnseenUseWarning,
    UnsupportedError,
    UnverifiedWarning,
    VerificationError,
)

__version__ = "0.1.0"

__all__ = [
    "AutogramError",
    "ChangedTensorError",
    "CompiledPartWarning",
    "CoupledObjectivesWarning",
    "Engine",
    "FreedGraphError",
    "HookError",
    "InexactWeightsWarning",
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
    "ParameterReport",
    "RankError",
    "RemovedEngineError",
    "Report",
    "RuleCheckError",
    "RuleError",
    "Sketch",
    "StaleCaptureError",
    "UnseenUseError",
    "UnseenUseWarning",
    "UnsupportedError",
    "UnverifiedWarning",
    "UseReport",
    "VerificationError",
    "concatenate",
    "gramians_by_task",
]
