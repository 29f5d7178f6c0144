"""Configuration of the documentation: ``make docs``."""

project = "autogram"
author = "autogram contributors"
copyright = "autogram contributors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
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
