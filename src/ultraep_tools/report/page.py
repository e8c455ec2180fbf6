"""Parts of HTML pages: plotly.js, files of the package, and numbers as scripts."""

from __future__ import annotations

import json
from importlib.resources import files
from importlib.util import find_spec

from ultraep.errors import BackendUnavailable
from ultraep.supported import install_extra
from ultraep_tools.report.numbers import Numbers

RESULT_FILE, REPORT_FILE = "result.json", "report.html"  # in the output of a command


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
