"""The site that ``make docs`` builds from the Markdown files of this repository.

The source folder is the repository, so that each link leads to the same page or file here as in the repository.
Sphinx searches in the browser, and furo uses the fonts of the system: the site needs no network.
"""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

project = "ddpctl"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "ddpctl"
html_copy_source = False
html_show_copyright = False

root_doc = "README"
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # headings can be linked by their text, as on GitHub
smartquotes = False  # tables show values as programs write them
highlight_language = "none"  # blocks without a language are commands and output
html_static_path = ["site.css"]
html_css_files = ["site.css"]

# The sidebar is the lists of pages in docs/README.md. Sphinx warns of a page that is in no list.
_CHAPTERS = re.findall(r"^## (.*)\n\n((?:- .*\n)+)", Path("README.md").read_text(), re.M)
_DECISIONS = sorted(f"docs/decisions/{page.name}" for page in Path("decisions").glob("0*.md"))


def _pages(chapter: str) -> list[str]:
    """Return the paths of the pages that a chapter links to, from the root of the repository."""
    return [os.path.normpath(f"docs/{link}") for link in re.findall(r"\]\(([^)]+\.md)\)", chapter)]


def _toctree(caption: str, pages: list[str]) -> str:
    entries = "".join(f"/{page}\n" for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}```\n"


def _add_sidebar(_app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += "".join(_toctree(caption, _pages(chapter)) for caption, chapter in _CHAPTERS)
    elif page == "docs/decisions/README":
        source[0] += _toctree("Decisions", _DECISIONS)


include_patterns = [
    "README.md",
    "docs/README.md",
    *_DECISIONS,
    *(page for _, chapter in _CHAPTERS for page in _pages(chapter)),
]


def setup(app: Sphinx) -> None:
    """Sphinx calls this first."""
    app.connect("source-read", _add_sidebar)
