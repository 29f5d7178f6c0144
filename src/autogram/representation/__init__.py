"""The Gramian with respect to a representation, instead of parameters."""

from autogram.representation._functions import backward, compute_gramian

__all__ = ["backward", "compute_gramian"]
