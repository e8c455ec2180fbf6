"""Settings of Sphinx: Markdown pages, an API from docstrings, nothing from the network."""

from __future__ import annotations

import re
from typing import Any

import ultraep

project, author = "ultraep", "the ultraep authors"
version = release = ultraep.__version__
copyright = "Apache-2.0"  # noqa: A001  Sphinx reads this name
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["docs/site"]
html_theme = "furo"
html_title = f"ultraep {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
default_role = "code"
highlight_language = "none"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
nitpicky = False

NAMES = r"[a-z_]\w*(?:, [a-z_]\w*)*"
ARGUMENT = re.compile(rf"({NAMES}): (.+)")
SEVERAL_ARGUMENTS = re.compile(rf" {{3}}(?={NAMES}: )")  # on one line


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", to_restructured_text)


def to_restructured_text(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Convert a docstring in place: plain paragraphs, `names`, arguments with a colon, drawings."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    lines[:] = [line for paragraph in paragraphs for line in [*convert(paragraph), ""]]


def convert(paragraph: list[str]) -> list[str]:
    """Convert one paragraph."""
    if not paragraph or paragraph[0].startswith(">>>"):
        return paragraph
    if paragraph[0].startswith("    "):
        return ["::", "", *paragraph]
    converted: list[str] = []
    for line in (part for whole in paragraph for part in SEVERAL_ARGUMENTS.split(whole)):
        in_argument = bool(converted) and converted[-1].startswith("    ")
        if match := ARGUMENT.fullmatch(line):
            converted += ["", f"``{match[1]}``", f"    {escape(match[2])}"]
        elif in_argument and line[0] == " ":
            converted.append(f"    {escape(line.strip())}")
        elif in_argument:
            converted += ["", escape(line)]
        else:
            converted.append(escape(line.strip()))
    return converted


def escape(text: str) -> str:
    """Escape the markup of reStructuredText, except inside backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*|\\]|_(?!\w))", r"\\\1", part)
        for part in parts
    )
