"""The report of a demo: one HTML file with interactive plots, made of result.json and the traces.

    sources.py   reads them, and checks that they belong together
    numbers.py   what each section draws
    replays.py   the recorded loads under other policies
    words.py     facts, tables, and a sentence for each plot
    page.py      the file; page.js draws its plots. What reports share is in ultraep.tools.report

It needs no network, neither here nor in the browser. plotly: pip install 'ultraep[plot]'.
"""

from __future__ import annotations

from pathlib import Path

from ultraep.files.writing import write_text
from ultraep.tools.demo.report.numbers import all_numbers
from ultraep.tools.demo.report.page import page
from ultraep.tools.demo.report.replays import replay_numbers
from ultraep.tools.demo.report.sources import read_sources
from ultraep.tools.demo.result import REPORT_FILE
from ultraep.tools.report.page import plotly_js


def write_report(out: str | Path) -> Path:
    """Write OUT/report.html from OUT/result.json and the traces beside it."""
    out = Path(out)
    library = plotly_js()
    sources = read_sources(out)
    numbers = all_numbers(sources, replay_numbers(sources))
    path = out / REPORT_FILE
    write_text(path, page(sources, numbers, library))
    return path
