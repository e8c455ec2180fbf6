"""The HTML file of a report. It contains its data and plotly.js, and loads nothing.

The data is JSON in scripts whose ids begin with "numbers-". The `figures` of a report's script draw
it with the functions of parts.js and figures.js. A section whose plot has no data is removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from string import Template

from ultraep.errors import BackendUnavailable
from ultraep.supported import install_extra
from ultraep_tools.report.numbers import Numbers

RESULT_FILE, REPORT_FILE = "result.json", "report.html"  # in the output of a command
OWN = "ultraep_tools.report"
SHARED = ("parts.js", "figures.js")


@dataclass(frozen=True, kw_only=True)
class Page:
    """The contents of a page.

    report: name of the .html file with its sections and of the .js file with its figures.
    title: the answer.   kind: the kind of report, above the title.   facts, notes: plain text.
    tables: HTML for the placeholders in the sections.   numbers: the data of every plot.
    """

    report: str
    title: str
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    tables: Mapping[str, str]
    numbers: Mapping[str, Numbers]
    kind: str = ""

    def html(self) -> str:
        scripts = (*SHARED, f"{self.report}.js")
        return Template(own_file(OWN, "page.html")).substitute(
            title=escape(f"{self.kind}: {self.title}" if self.kind else self.title),
            kind=escape(self.kind),
            headline=escape(self.title),
            style=own_file(OWN, "page.css"),
            facts="\n".join(f"<dt>{a}</dt><dd>{escape(b)}</dd>" for a, b in self.facts),
            notes=_notes(self.notes),
            sections=Template(own_file(OWN, f"{self.report}.html")).substitute(self.tables),
            numbers="\n".join(embedded(name, part) for name, part in self.numbers.items()),
            library=plotly_js().replace("</script", "<\\/script"),
            script="".join(own_file(OWN, name) for name in scripts),
        )


def require_plotly() -> None:
    """Raise `BackendUnavailable` unless plotly is installed. Call it before any work."""
    if find_spec("plotly") is None:
        raise BackendUnavailable(f"pages with plots need plotly: {install_extra('view')}")


def plotly_js() -> str:
    require_plotly()
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source


def embedded(name: str, numbers: Numbers) -> str:
    """Return a script with JSON in which no closing tag can occur."""
    text = json.dumps(numbers, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="numbers-{name}">{text}</script>'


def own_file(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text("utf-8")


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">\n{items}\n</ul>'
