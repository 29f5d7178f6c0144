"""Small models with random weights, each with a batch and the losses it is usually trained on.

Nothing is downloaded: every model is built from a configuration. All are in training mode, with
dropout, and all but one in float64. The weights are moved away from their initial values, because
ones and zeros (norms, biases, relative-position tables) would hide mistakes.
"""

from .adapters import ADAPTERS
from .decoders import DECODERS, GEMMA, GPT2, LLAMA, MAMBA, MIXTRAL
from .encoders import BERT, ENCODERS, T5
from .images import CONVNEXT, IMAGES, MHA, RESNET, SWIN, VIT
from .specimen import Attention, Batch, Specimen
from .speech import SPEECH, WAV2VEC2
from .videos import TIMESFORMER, VIDEOS

__all__ = [
    "ADAPTERS",
    "BERT",
    "CONVNEXT",
    "GEMMA",
    "GPT2",
    "LLAMA",
    "MAMBA",
    "MHA",
    "MIXTRAL",
    "RESNET",
    "SPECIMENS",
    "SWIN",
    "T5",
    "TIMESFORMER",
    "VIT",
    "WAV2VEC2",
    "Attention",
    "Batch",
    "Specimen",
]

SPECIMENS: dict[str, Specimen] = DECODERS | ENCODERS | IMAGES | VIDEOS | SPEECH | ADAPTERS
