"""The report of an inspection: one HTML file with interactive plots, made of its findings.

    numbers.py   what each section draws
    words.py     facts, tables, and a sentence for each plot
    page.py      the file; page.js draws its plots. What reports share is in ultraep.report

It needs no network, neither here nor in the browser. plotly: pip install 'ultraep[plot]'.
"""

from __future__ import annotations

from pathlib import Path

from ultraep.inspect.findings import Findings
from ultraep.inspect.report.page import page
from ultraep.inspect.result import REPORT_FILE, InspectionResult
from ultraep.outputs import write_text
from ultraep.report.page import plotly_js


def write_report(out: Path, result: InspectionResult, findings: Findings) -> Path:
    """Write OUT/report.html."""
    library = plotly_js()
    path = out / REPORT_FILE
    write_text(path, page(result, findings).html(library))
    return path
