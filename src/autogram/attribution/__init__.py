"""The effect of samples on a model, from the Gramian of their gradients."""

from autogram.attribution._self_influence import self_influence

__all__ = ["self_influence"]
