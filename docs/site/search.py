"""The search of the site: an index of all sections, which works without a server.

Sphinx's own search fetches a page to show an excerpt, which browsers refuse for files. Here the
index itself holds the text.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

SPHINX_SCRIPTS = re.compile(
    r'<script[^>]*src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"[^>]*></script>\s*'
)
OUR_SCRIPTS = '<script src="_static/sections.js"></script><script src="_static/search.js"></script>'
HEADINGS = ("h1", "h2", "h3", "h4")
SKIPPED = ("script", "style", "svg")
VOID = ("br", "hr", "img", "input", "link", "meta", "wbr")
BLOCKS = (*HEADINGS, "p", "li", "td", "th", "tr", "pre", "dt", "dd", "div")

Section = tuple[str, str, str, str]  # address, title of the page, heading, text


class _Sections(HTMLParser):
    """Collects the sections of the <article> of a page: `[id, heading, text]`."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[list[str]] = []
        self._depth = self._skipping = 0  # open elements in the article; in a skipped one
        self._id, self._in_heading = "", False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag in VOID or (tag != "article" and not self._depth):
            return
        self._depth += 1
        is_permalink = "headerlink" in (values.get("class") or "")
        if tag in SKIPPED or is_permalink or self._skipping:
            self._skipping += 1
        elif tag == "section":
            self._id = values.get("id") or ""
        elif tag in HEADINGS:
            self._in_heading = True
            self.sections.append([self._id, "", ""])
        elif tag == "dt" and values.get("id"):  # a name of the API
            self.sections.append([values["id"] or "", (values["id"] or "").split(".")[-1], ""])

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or not self._depth:
            return
        self._depth -= 1
        self._skipping = max(0, self._skipping - 1)
        if tag in HEADINGS:
            self._in_heading = False
        elif tag in BLOCKS:
            self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        if self._depth and self.sections and not self._skipping:
            self.sections[-1][1 if self._in_heading else 2] += data


def sections_of(page: str, address: str) -> list[Section]:
    """The sections of one HTML page, with their text on one line."""
    parser = _Sections()
    parser.feed(page)
    cleaned = [[" ".join(part.split()) for part in section] for section in parser.sections]
    title = cleaned[0][1] if cleaned else address
    return [
        (f"{address}#{name}" if name else address, title, heading, text)
        for name, heading, text in cleaned
    ]


def write_search(site: Path) -> None:
    """Write the index, and make the search page of a built site use it."""
    page = site / "search.html"
    html = page.read_text()
    if 'id="search-results"' not in html:
        raise SystemExit(f"{page} has no element with the id search-results")
    sections: list[Section] = []
    for path in sorted(site.rglob("*.html"), key=lambda path: (path.stem == "CHANGELOG", path)):
        if path.stem not in ("search", "genindex", "py-modindex"):
            sections += sections_of(path.read_text(), path.relative_to(site).as_posix())
    index = json.dumps(sections, ensure_ascii=False)
    (site / "_static" / "sections.js").write_text(f"const SECTIONS = {index};\n")
    html = SPHINX_SCRIPTS.sub("", html).replace("</body>", f"{OUR_SCRIPTS}</body>")
    page.write_text(html)
