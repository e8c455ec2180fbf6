"""The report of an inspection: one HTML file with interactive plots, made of its findings.

    numbers.py   what each section draws
    words.py     facts, tables, and a sentence for each plot
    page.py      the file; page.js draws its plots. What reports share is in ultraep.tools.report

It needs no network, neither here nor in the browser. plotly: pip install 'ultraep[plot]'.
"""

from __future__ import annotations

from pathlib import Path

from ultraep.files.writing import write_text
from ultraep.tools.inspect.findings import Findings
from ultraep.tools.inspect.report.page import page
from ultraep.tools.inspect.result import REPORT_FILE, InspectionResult
from ultraep.tools.report.page import plotly_js


def write_report(out: Path, result: InspectionResult, findings: Findings) -> Path:
    """Write OUT/report.html."""
    library = plotly_js()
    path = out / REPORT_FILE
    write_text(path, page(result, findings).html(library))
    return path
