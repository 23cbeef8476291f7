"""The site that ``make docs`` builds from the Markdown files of this repository.

The source folder is the repository, so that each link leads to the same page or file here as in the repository.
Sphinx searches in the browser, and furo uses the fonts of the system: the site needs no network.
"""

import itertools
from pathlib import Path

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

# The pages of the sidebar. Sphinx warns of a page that is in no chapter.
_CHAPTERS = {
    "First steps": ["docs/your_script", "docs/script", "docs/rehearse", "docs/local", "docs/two_boxes", "docs/environment", "docs/migrating"],
    "Machines": ["docs/ssh", "docs/hosts", "docs/slurm", "docs/kubernetes", "docs/pods", "docs/kaggle", "docs/image", "ansible/README"],
    "Training": ["docs/training", "docs/sharding", "docs/checkpoints", "docs/export"],
    "A run": ["docs/watching", "docs/explain", "docs/restarts", "docs/node_commands", "docs/doctor", "docs/bench", "docs/troubleshooting"],
    "Monitoring": ["docs/monitoring", "docs/alerts", "docs/metrics", "docs/scraping"],
    "Reference": ["docs/torchrun", "docs/events", "docs/glossary", "docs/upgrading", "CHANGELOG"],
    "Specs": ["slurm/README", "k8s/README"],
    "Results": ["docs/benchmarks", "docs/faults", *sorted(f"docs/results/{page.stem}" for page in Path("results").glob("*.md"))],
    "Development": ["CONTRIBUTING", "SECURITY", "docs/decisions/README", "findings/README"],
}
_DECISIONS = sorted(f"docs/decisions/{page.stem}" for page in Path("decisions").glob("0*.md"))

include_patterns = [f"{page}.md" for page in ["README", *itertools.chain(*_CHAPTERS.values()), *_DECISIONS]]


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *(f"/{page}" for page in pages), "```", ""])


def _add_sidebar(app, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += "".join(itertools.starmap(_toctree, _CHAPTERS.items()))
    elif page == "docs/decisions/README":
        source[0] += _toctree("Decisions", _DECISIONS)


def setup(app) -> None:
    app.connect("source-read", _add_sidebar)
