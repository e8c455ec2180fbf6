"""Settings of Sphinx: Markdown pages, the reference from docstrings, nothing from the network."""

from __future__ import annotations

import re
from typing import Any

import ultraep

project, author = "ultraep", "the ultraep authors"
version = release = ultraep.__version__
copyright = "Apache-2.0"  # noqa: A001  a name of Sphinx
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["docs/site"]
html_theme = "furo"
html_title = f"ultraep {version}"
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
SEVERAL = re.compile(rf" {{3}}(?={NAMES}: )")  # arguments on one line


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_restructured)


def as_restructured(_app: Any, _what: str, _name: str, _of: Any, _options: Any, lines: Any) -> None:
    """Docstrings here are plain text: paragraphs, `names`, arguments by a colon, drawings."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    lines[:] = [line for paragraph in paragraphs for line in [*converted(paragraph), ""]]


def converted(paragraph: list[str]) -> list[str]:
    """One paragraph in the language of Sphinx."""
    if not paragraph or paragraph[0].startswith(">>>"):
        return paragraph
    if paragraph[0].startswith("    "):
        return ["::", "", *paragraph]
    found: list[str] = []
    for line in (part for whole in paragraph for part in SEVERAL.split(whole)):
        if match := ARGUMENT.fullmatch(line):
            found += ["", f"``{match[1]}``", f"    {escaped(match[2])}"]
        elif found and found[-1].startswith("    "):
            found += [f"    {escaped(line.strip())}"] if line[0] == " " else ["", escaped(line)]
        else:
            found.append(escaped(line.strip()))
    return found


def escaped(text: str) -> str:
    """What stands in backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*|\\]|_(?!\w))", r"\\\1", part)
        for part in parts
    )
