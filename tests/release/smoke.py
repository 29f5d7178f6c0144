"""Runs in an environment that has the wheel and what it requires, and nothing else."""

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from torch import nn

import autogram
import autogram.testing
import autogram.weightings

MODEL = """
import torch
from torch import nn

def make():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    return model, lambda: model(x).square().sum(1)
"""


def main() -> None:
    """Looks at what is installed, and takes a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", help="a folder that nothing may be imported from")
    checkout = Path(parser.parse_args().checkout).resolve()
    place = Path(autogram.__file__).resolve()
    assert checkout not in place.parents, f"imported from the checkout: {place}"
    assert autogram.__version__ == importlib.metadata.version("torch-autogram")
    assert files("autogram").joinpath("py.typed").is_file()
    for name in ("opt_einsum", "torch"):
        assert importlib.util.find_spec(name), name
    for name in ("matplotlib", "numpy", "pytest", "torchjd", "transformers"):
        assert not importlib.util.find_spec(name), f"{name} is here, so that nothing is shown"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    engine = autogram.Engine(model)
    for size in (6, 6, 4):
        losses = model(torch.randn(size, 5).double()).square().sum(1)
        rows = autogram.testing.reference_jacobian(losses, model.parameters())
        assert torch.allclose(engine.compute_gramian(losses), rows @ rows.T)
        weights = engine.backward(losses, autogram.weightings.UPGrad())
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.allclose(found, weights @ rows)
        model.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(MODEL)
        command = ["-m", "autogram", "check", "mine:make", "--json", "--seconds", "0.1"]
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=True
        )
    assert json.loads(done.stdout)["status"] == "fine"
    print(f"autogram {autogram.__version__} works with torch {torch.__version__} in {sys.prefix}")


if __name__ == "__main__":
    main()
