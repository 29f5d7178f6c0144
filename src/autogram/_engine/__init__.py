"""The engine: the interface for a training loop. See README.md here."""

from autogram._compiled.frames import stay_outside
from autogram._engine.accumulation import Accumulation
from autogram._engine.clipping import Clipping
from autogram._engine.engine import Engine
from autogram._engine.hooked import Hooked
from autogram._engine.training import Training

__all__ = ["Engine"]

stay_outside(Hooked, Training, Clipping, Engine, Accumulation)
