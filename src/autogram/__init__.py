"""Products with the Jacobian of a vector of losses, without forming it."""

from autogram import _compiled as _compiled  # registers the backend
from autogram import errors
from autogram._capture.backward.run import UseReport
from autogram._engine import Engine
from autogram._jacobian import Jacobian, Sketch, concatenate
from autogram._losses import gramians_by_task
from autogram._report import ParameterReport, Report
from autogram.errors import *  # noqa: F403 - each error and warning is public here, too

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Jacobian",
    "ParameterReport",
    "Report",
    "Sketch",
    "UseReport",
    "concatenate",
    "gramians_by_task",
]
__all__ += errors.__all__
