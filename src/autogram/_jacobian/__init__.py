"""The Jacobian as an operator. See README.md here."""

from autogram._compiled.frames import stay_outside
from autogram._jacobian.accumulating import Accumulating
from autogram._jacobian.concatenation import concatenate
from autogram._jacobian.groups import check_groups, groups_of
from autogram._jacobian.jacobian import Jacobian
from autogram._jacobian.operator import MatrixForm, Operator, TransposedJacobian
from autogram._jacobian.parts import JacobianPart
from autogram._jacobian.sketch import Sketch, Sketching

__all__ = [
    "Jacobian",
    "JacobianPart",
    "Sketch",
    "Sketching",
    "check_groups",
    "concatenate",
    "groups_of",
]

stay_outside(Jacobian, Accumulating, MatrixForm, TransposedJacobian, Operator, Sketch)
