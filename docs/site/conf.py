"""Settings of Sphinx for the pages that build.py stages."""

from docutils.nodes import Element, SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = html_title = "medclip_dcl"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 6
myst_enable_extensions = ["dollarmath"]
autodoc_default_options = {"members": True}
napoleon_use_ivar = True
autodoc_inherit_docstrings = False  # those of Lightning link to its own pages
default_role = "code"
nb_execution_mode = "off"  # notebooks are kept with their outputs
nb_ipywidgets_js: dict[str, object] = {}  # the default comes from another host
html_theme = "furo"
html_copy_source = html_show_sphinx = html_show_copyright = False
html_static_path, html_css_files = ["static"], ["style.css"]
smartquotes = False  # they would turn --option into a dash
html_math_renderer = "mathml"


def _formula(visitor: HTML5Translator, node: Element) -> None:
    """Write a formula as MathML, which browsers draw themselves."""
    visitor.body.append(str(tex2mathml(node.astext(), as_block=node.tagname == "math_block")))
    raise SkipNode


def _whole(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Let napoleon not take the words before a colon for the type of an attribute."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")


def setup(app: Sphinx) -> None:
    """Register the renderer of formulas, and the reading of attributes."""
    app.add_html_math_renderer("mathml", inline_renderers=(_formula, None), block_renderers=(_formula, None))
    app.connect("autodoc-process-docstring", _whole, priority=0)
