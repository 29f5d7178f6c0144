"""Configuration of the documentation: ``make docs``."""

import zlib
from pathlib import Path

project = "autogram"
author = "autogram contributors"
copyright = "autogram contributors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # with its fonts: the site asks no other one
    "sphinx_copybutton",
    "sphinx_design",
]
templates_path = ["_templates"]
exclude_patterns = ["_templates"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "autogram"

autodoc_member_order = "bysource"
# What the documentation is built without.
autodoc_mock_imports = ["accelerate", "matplotlib", "torchjd", "transformers"]
napoleon_use_ivar = True  # else attributes of data classes are there twice
# Types of other packages, whose documentation is not asked for, and types that are not public.
nitpick_ignore_regex = [
    ("py:.*", r"(accelerate|collections|contextlib|matplotlib|torch|transformers|typing)\..*"),
    ("py:.*", r"autogram\.(\w+\.)*_.*"),
    ("py:class", r"Tensor|Axes|Block|Lookup|(tuple|dict)\[.*|autogram\.hooks\.switch\.Switch"),
    # Names in overloads of a decorated method are looked for in the file of the decorator.
    ("py:class", r"GradScaler|GradientsOutside|Grouping|L|Weighting|Losses|Literal\[.*"),
]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Pages of PyTorch's documentation that docstrings name. The inventory of that site has all names,
# and would be fetched at each build.
_PYTORCH = "https://docs.pytorch.org/docs/stable/"
_PAGES = {
    "torch.Tensor": "tensors.html",
    "torch.device": "tensor_attributes.html",
    "torch.dtype": "tensor_attributes.html",
    "torch.nn.Parameter": "generated/torch.nn.parameter.Parameter.html",
    **{
        name: f"generated/{name}.html"
        for name in (
            "torch.Generator",
            "torch.nn.Module",
            "torch.optim.Optimizer",
            "torch.autograd.Function",
        )
    },
}


def _write_inventory(path: Path) -> None:
    """Writes the pages as an inventory of Sphinx, version 2: four lines, and a compressed list."""
    lines = [f"{name} py:class 1 {page}#{name} -\n" for name, page in _PAGES.items()]
    head = "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: stable\n"
    head += "# The remainder of this file is compressed using zlib.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))


_INVENTORY = Path(__file__).parents[1] / "build" / "pytorch.inv"
_write_inventory(_INVENTORY)
intersphinx_mapping = {"torch": (_PYTORCH, str(_INVENTORY))}
