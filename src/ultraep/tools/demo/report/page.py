"""The page of a demo: its sections, its plots in page.js, on the page that all reports share."""

from __future__ import annotations

from ultraep.tools.demo.report import words
from ultraep.tools.demo.report.sources import Sources
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.report.page import BEYOND, PICKER, Page, Section, own_file
from ultraep.tools.report.words import listed

SECTIONS = (
    Section("imbalance", "Imbalance during the training", ("imbalance",)),
    Section("layers", "Imbalance of every layer", ("layers",)),
    Section("microbatches", "One microbatch, rank by rank", ("microbatches",)),
    Section("copies", "Copies, and what they cost", ("copies",)),
    Section("replay", "The same loads under other policies", ("replay",)),
    Section("loss", "Loss", ("loss",)),
    Section("speed", "Speed", ("speed", "requests")),
)


def page(sources: Sources, numbers: dict[str, Numbers], library: str) -> str:
    """The whole file. library: the source of plotly.js."""
    replayed = words.replay_table(numbers["replay"])
    if any(row["beyond"] for row in numbers["replay"]["table"]):
        replayed += f"\n{BEYOND}"
    return Page(
        title=f"Balanced experts: {listed([row.policy for row in sources.result.policies])}",
        facts=words.facts(sources),
        notes=words.notes(sources, numbers),
        result=f"<h2>Result</h2>\n{words.result_table(sources.result)}",
        sections=SECTIONS,
        told=words.sentences(sources, numbers),
        numbers=numbers,
        script=own_file("ultraep.tools.demo.report", "page.js"),
        controls={"microbatches": PICKER.format(noun="step")},
        tables={"replay": replayed},
    ).html(library)
