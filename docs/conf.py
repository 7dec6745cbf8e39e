"""Sphinx: `python -m sphinx -W -q -b html docs OUT` builds the site and fails on any warning."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import edgeinfer

project = "edgeinfer"
author = copyright = "the authors of edgeinfer"
release = version = edgeinfer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc's sections name the types
numpydoc_show_class_members = False
copybutton_prompt_text = "$ "
html_theme = "furo"
html_title = "edgeinfer"
html_show_copyright = False

ROOT_PAGES = {"ARCHITECTURE": "explanation/architecture", "CONTRIBUTING": "how-to/contributing"}
"""Files of the repository's root that a page of the site includes."""


def link_root_pages(text: str) -> str:
    """Return the text with links to files of the root pointing at the pages that include them."""
    for name, page in ROOT_PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)*{name}\.md", f"](/{page}.md", text)
    return text


def setup(app: Sphinx) -> None:
    """Rewrite links to files of the root, which lie outside of Sphinx's source directory."""

    def replace(content: list[str]) -> None:
        content[0] = link_root_pages(content[0])

    app.connect("source-read", lambda app, name, content: replace(content))
    app.connect("include-read", lambda app, path, parent, content: replace(content))
