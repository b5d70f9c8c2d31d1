"""Settings of Sphinx for the documentation site, which ``nox -s docs`` builds.

The documents stay in the folders of the packages that they explain. Sphinx reads the repository
itself, as far as ``include_patterns`` says, so that links between documents need no translation.
"""

from __future__ import annotations

import os

import amanda

project = "Amanda"
author = "the authors of Amanda"
release = version = amanda.__version__
site_path = os.environ.get("AMANDA_SITE_PATH", "/")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = [
    *("*.md", "docs/*.md", "docs/*/*.md"),
    *("amanda-*/*.md", "amanda-*/docs/*.md", "amanda-*/docs/*/*.md", "amanda-*/accel/*.md"),
    *("amanda-core/templates/*/README.md", "amanda-core/examples/*/README.md"),
    "tests/packaging/autograd_driver/README.md",
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = f"Amanda {release}"
html_show_sourcelink = False
html_theme_options = {
    "navbar_start": ["navbar-logo", "version-switcher"],
    "switcher": {"json_url": f"{site_path}versions.json", "version_match": release},
    "check_switcher": False,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 7,
    "secondary_sidebar_items": ["page-toc"],
}
