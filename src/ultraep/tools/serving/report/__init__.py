"""The figure of a load test: time to the first token against the rate, one line for each variant.

One HTML file that needs no network. plotly: pip install 'ultraep[plot]'.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ultraep.files.writing import write_text
from ultraep.tools.report.page import plotly_js
from ultraep.tools.serving.measure import Turn
from ultraep.tools.serving.report.page import page


def write_report(
    path: Path, turns: Sequence[Turn], objective: float, facts: Sequence[tuple[str, str]]
) -> None:
    """Write the page. facts: what was measured, by name."""
    library = plotly_js()
    write_text(path, page(turns, objective, facts).html(library))
