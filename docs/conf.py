"""Settings of the site that 'make docs' builds from docs/. It needs no network."""

import sys
from importlib.metadata import version as installed
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

project, author = "idmm", "the authors of idmm"
project_copyright = author
version = release = installed("idmm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_parts"]
exclude_patterns = ["_build"]
smartquotes = False  # keep quotes as they are typed
highlight_language = "text"  # for blocks without a language: commands

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"  # the browser draws it, without a script or network

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"idmm {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#0072b2"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}
