"""Small models with random weights, each with a batch and the losses it is usually trained on.

Nothing is downloaded: every model is built from a configuration. All of them are in float64 and in
training mode, with dropout. The weights are moved away from their initial values, because ones and
zeros (norms, biases, relative-position tables) would hide mistakes.
"""

from .images import IMAGES, MHA, SWIN, VIT
from .language import BERT, GPT2, LANGUAGE, LLAMA, T5
from .specimen import Attention, Batch, Specimen

__all__ = [
    "BERT",
    "GPT2",
    "LLAMA",
    "MHA",
    "SPECIMENS",
    "SWIN",
    "T5",
    "VIT",
    "Attention",
    "Batch",
    "Specimen",
]

SPECIMENS: dict[str, Specimen] = LANGUAGE | IMAGES
