"""Weightings: from a Gramian to the weights of a step. See README.md here."""

from autogram.weightings.certificate import Certificate
from autogram.weightings.dual_cone import DualProj, UPGrad
from autogram.weightings.projection import Projector
from autogram.weightings.surgery import GradVac, PCGrad

__all__ = ["Certificate", "DualProj", "GradVac", "PCGrad", "Projector", "UPGrad"]
