"""The Jacobian as an operator. See README.md here."""

from autogram._compiled.frames import stay_outside
from autogram._jacobian.concatenation import concatenate
from autogram._jacobian.jacobian import Jacobian
from autogram._jacobian.operator import MatrixForm, Operator, TransposedJacobian
from autogram._jacobian.parts import JacobianPart
from autogram._jacobian.sketch import Sketch, Sketching

__all__ = ["Jacobian", "JacobianPart", "Sketch", "Sketching", "concatenate"]

stay_outside(Jacobian, MatrixForm, TransposedJacobian, Operator, Sketch)
