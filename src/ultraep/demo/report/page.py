"""The page: one HTML file with everything in it, plotly.js too. It cannot load anything else.

The numbers stand in it as JSON, in scripts whose ids begin with "numbers-"; page.js draws them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from ultraep.demo.report import words
from ultraep.demo.report.numbers import Numbers
from ultraep.demo.report.sources import Sources
from ultraep.errors import BackendUnavailable


@dataclass(frozen=True)
class Section:
    """A part of the page; `plots` are the numbers that it draws, each under a sentence."""

    name: str
    title: str
    plots: tuple[str, ...]


SECTIONS = (
    Section("imbalance", "Imbalance during the training", ("imbalance",)),
    Section("layers", "Imbalance of every layer", ("layers",)),
    Section("microbatches", "One microbatch, rank by rank", ("microbatches",)),
    Section("copies", "Copies, and what they cost", ("copies",)),
    Section("replay", "The same loads under other policies", ("replay",)),
    Section("loss", "Loss", ("loss",)),
    Section("speed", "Speed", ("speed", "requests")),
)
PICKER = """<p class="picker">
<label>layer <select id="layer"></select></label>
<label>step <input id="moment" type="range" min="0" step="1"></label>
<button type="button" id="worst">most uneven</button></p>
<p id="told" class="told"></p>"""
BEYOND = "<p>* needs more spare slots than there are, or moves homes: compared here, not run.</p>"


def plotly_js() -> str:
    """The source of plotly.js, which the package plotly brings along."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise BackendUnavailable(
            f"the report needs plotly ({error}): pip install 'ultraep[plot]'"
        ) from None
    source: str = get_plotlyjs()
    return source


def page(sources: Sources, numbers: dict[str, Numbers], library: str) -> str:
    """The whole file. library: the source of plotly.js."""
    told = words.sentences(sources, numbers)
    sections = "\n".join(_section(section, told, numbers) for section in SECTIONS)
    names = [row.policy for row in sources.result.policies]
    return Template(_file("page.html")).substitute(
        title=escape(f"Balanced experts: {words.listed(names)}"),
        style=_file("page.css"),
        facts="\n".join(f"<dt>{a}</dt><dd>{escape(b)}</dd>" for a, b in words.facts(sources)),
        notes=_notes(words.notes(sources, numbers)),
        result=words.result_table(sources.result),
        sections=sections,
        numbers="\n".join(embedded(name, part) for name, part in numbers.items()),
        library=library.replace("</script", "<\\/script"),
        script=_file("page.js"),
    )


def embedded(name: str, numbers: Numbers) -> str:
    """JSON that cannot end the script it stands in."""
    text = json.dumps(numbers, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="numbers-{name}">{text}</script>'


def _section(section: Section, told: dict[str, str], numbers: dict[str, Numbers]) -> str:
    parts = [f'<section id="{section.name}"><h2>{escape(section.title)}</h2>']
    for plot in section.plots:
        parts.append(f"<p>{escape(told[plot])}</p>")
        if plot == "microbatches":
            parts.append(PICKER)
        parts.append(f'<div class="plot" id="plot-{plot}"></div>')
    if section.name == "replay":
        parts.append(words.replay_table(numbers["replay"]))
        if any(row["beyond"] for row in numbers["replay"]["table"]):
            parts.append(BEYOND)
    return "\n".join([*parts, "</section>"])


def _notes(notes: list[str]) -> str:
    if not notes:
        return ""
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">\n{items}\n</ul>'


def _file(name: str) -> str:
    """A file beside this one."""
    return files("ultraep.demo.report").joinpath(name).read_text("utf-8")
