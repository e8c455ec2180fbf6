"""The page of an inspection: its sections, its plots in page.js, on the page all reports share."""

from __future__ import annotations

from ultraep.tools.inspect.findings import Findings
from ultraep.tools.inspect.report import words
from ultraep.tools.inspect.report.numbers import all_numbers
from ultraep.tools.inspect.result import InspectionResult
from ultraep.tools.report.page import PICKER, Page, Section, own_file

SECTIONS = (
    Section("sizes", "Imbalance by the size of the group", ("sizes",)),
    Section("layers", "Imbalance of every layer", ("layers",)),
    Section("texts", "Imbalance of every text", ("texts",)),
    Section("history", "Placing by the past", ("history",)),
    Section("experts", "Which experts are popular", ("experts",)),
    Section("microbatches", "One window, rank by rank", ("microbatches",)),
)
CHOICE = '<p class="picker"><label>{noun} <select id="choice-{plot}"></select></label></p>'


def page(result: InspectionResult, findings: Findings) -> Page:
    """All that stands on it."""
    numbers = all_numbers(findings)
    table = words.result_table(result)
    if any(row.beyond for row in result.rows):
        table += f"\n<p>* {words.BEYOND_LIMITS}.</p>"
    return Page(
        title=f"Experts of {result.model}",
        facts=words.facts(result),
        notes=result.notes,
        result=f"<h2>Result</h2>\n{table}",
        sections=[section for section in SECTIONS if section.plots[0] in numbers],
        told=words.sentences(findings, numbers),
        numbers=numbers,
        script=own_file("ultraep.tools.inspect.report", "page.js"),
        controls={
            "layers": CHOICE.format(noun="ranks", plot="layers"),
            "texts": CHOICE.format(noun="ranks", plot="texts"),
            "experts": CHOICE.format(noun="text", plot="experts"),
            "microbatches": PICKER.format(noun="window"),
        },
    )
