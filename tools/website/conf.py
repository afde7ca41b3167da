"""Configuration of Sphinx: pages in MyST, notebooks that have run, docstrings; nothing is loaded from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import kvlab  # noqa: E402
from tools.website.docstrings import as_rst  # noqa: E402
from tools.website.pages import LINKED, WORK  # noqa: E402

project, author, version = "kvlab", "The kvlab authors", kvlab.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = [name for name in LINKED if "." not in name]
root_doc = "index"
html_theme = "furo"
html_title = f"kvlab {version}"
html_favicon = str(Path(__file__).with_name("icon.svg"))
html_static_path = [str(WORK / "source" / "_static")]
html_extra_path = [str(WORK / "extra")]
html_css_files, html_js_files = ["explorer.css"], ["explorer.js"]
html_copy_source = html_show_sphinx = html_show_copyright = False
html_theme_options = {"source_view_link": ""}
html_use_index = True
pygments_style, pygments_dark_style = "friendly", "monokai"
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, object] = {}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
toc_object_entries = False
suppress_warnings = ["ref.python"]  # names of builtins that are fields, too


def setup(app: object) -> None:
    """Docstrings have tables of arguments without marks."""
    app.connect("autodoc-process-docstring", as_rst)  # type: ignore[attr-defined]
