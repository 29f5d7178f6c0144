"""The models of the zoo, compiled: the Gramian is that of the compiled graph, row by row.

With `AUTOGRAM_TEST_INNER=inductor`, as `make compiled` sets it, a dozen of them in kernels.
"""

import os

import pytest
import torch

from autogram import Engine
from autogram.testing import reference_jacobian
from tests.unit._compiled.compiling import compile_inside, counted_parts
from tests.unit.checks import TOLERANCES, trainable
from tests.unit.models.zoo import (
    BERT,
    CONVNEXT,
    GEMMA,
    GPT2,
    LLAMA,
    MAMBA,
    MIXTRAL,
    RESNET,
    SPECIMENS,
    SWIN,
    T5,
    VIT,
    WAV2VEC2,
)

INNER = os.environ.get("AUTOGRAM_TEST_INNER", "aot_eager")
_DOZEN = (BERT, GPT2, LLAMA, GEMMA, T5, MAMBA, MIXTRAL, VIT, SWIN, CONVNEXT, RESNET, WAV2VEC2)
_NAMES = [x for x in SPECIMENS if INNER != "inductor" or SPECIMENS[x] in _DOZEN]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _NAMES)
def test_gramian(name: str) -> None:
    """Dropout draws once for a graph, which autograd differentiates objective by objective.

    Models whose code computes in float32 do so: what the zoo exchanges, Dynamo does not see.
    """
    specimen = SPECIMENS[name]
    is_rounded = hasattr(specimen.compute_losses, "__wrapped__")
    model = specimen.make_model(specimen.attentions[-1])
    compile_inside(model, INNER)
    engine = Engine(model)
    with counted_parts() as parts:
        for size in (specimen.sizes[-1],) * 4:
            losses = specimen.compute_losses(model, specimen.make_batch(size))
            jacobian = reference_jacobian(losses, trainable(model))
            expected = jacobian @ jacobian.T
            error = (engine.compute_gramian(losses) - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCES[torch.float32 if is_rounded else specimen.dtype]
    assert parts
