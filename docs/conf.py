"""Configuration of the documentation: ``make docs``."""

project = "autogram"
author = "autogram contributors"
copyright = "autogram contributors"

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "autogram"
