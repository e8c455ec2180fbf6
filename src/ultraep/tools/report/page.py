"""The HTML file of a report. It contains its data and plotly.js, and loads nothing.

The data is JSON in scripts whose ids begin with "numbers-". The `figures` of a report's script draw
it with the functions of parts.js and figures.js.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template

from ultraep.errors import BackendUnavailable
from ultraep.tools.report.numbers import Numbers

INTRODUCTION = """Every rank of a Mixture-of-Experts layer is the home of some experts. The router
sends each token to a few experts, and all ranks wait for the busiest one. <em>Imbalance</em> is the
load of the busiest rank over the mean: 1 is perfect, and 2 means that the layer takes twice as long
as necessary. Balancing replicates busy experts into spare slots of other ranks, in every layer of
every step, and sends some of their rows there."""
PICKER = """<p class="picker">
<label>layer <select id="layer"></select></label>
<label>{noun} <input id="moment" type="range" min="0" step="1"></label>
<button type="button" id="worst">most imbalanced</button></p>
<p id="told" class="told"></p>"""
SHARED = ("parts.js", "figures.js")
BEYOND = "<p>* exceeds the spare slots or moves experts, so it is compared here but cannot run.</p>"


@dataclass(frozen=True)
class Section:
    """A section of the page; `plots` are the names of its plots."""

    name: str
    title: str
    plots: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """The contents of a page.

    title: the answer.   kind: the kind of report, above the title.   facts, notes: plain text.
    result: HTML after the first section.   captions: the sentence above every plot.
    controls: HTML above a plot.   tables: HTML at the end of a section.
    script: JavaScript with the figures.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    result: str
    sections: Sequence[Section]
    captions: Mapping[str, str]
    numbers: Mapping[str, Numbers]
    script: str
    controls: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""

    def html(self, library: str) -> str:
        """Return the HTML file. library: the source of plotly.js."""
        first, *others = map(self._section, self.sections)
        return Template(own_file("ultraep.tools.report", "page.html")).substitute(
            title=escape(f"{self.kind}: {self.title}" if self.kind else self.title),
            kind=escape(self.kind),
            headline=escape(self.title),
            introduction=INTRODUCTION,
            style=own_file("ultraep.tools.report", "page.css"),
            facts="\n".join(f"<dt>{a}</dt><dd>{escape(b)}</dd>" for a, b in self.facts),
            notes=_notes(self.notes),
            sections="\n".join([first, self.result, *others]),
            numbers="\n".join(embedded(name, part) for name, part in self.numbers.items()),
            library=library.replace("</script", "<\\/script"),
            script="".join(own_file("ultraep.tools.report", name) for name in SHARED) + self.script,
        )

    def _section(self, section: Section) -> str:
        parts = [f'<section id="{section.name}"><h2>{escape(section.title)}</h2>']
        for plot in section.plots:
            parts.append(f"<p>{escape(self.captions[plot])}</p>")
            parts.append(self.controls.get(plot, ""))
            parts.append(f'<div class="plot" id="plot-{plot}"></div>')
        parts.append(self.tables.get(section.name, ""))
        return "\n".join(part for part in [*parts, "</section>"] if part)


def plotly_js() -> str:
    """Return the source of plotly.js from the package plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise BackendUnavailable(
            f"the report needs plotly ({error}); pip install 'ultraep[plot]'"
        ) from None
    source: str = get_plotlyjs()
    return source


def embedded(name: str, numbers: Numbers) -> str:
    """Return a script with JSON in which no closing tag can occur."""
    text = json.dumps(numbers, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="numbers-{name}">{text}</script>'


def own_file(package: str, name: str) -> str:
    """Return the text of a file in a package."""
    return files(package).joinpath(name).read_text("utf-8")


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">\n{items}\n</ul>'
