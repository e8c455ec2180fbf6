"""The folder of a demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ultraep.tools.demo.result import REPORT_FILE, RESULT_FILE, TRACE
from ultraep.tools.outputs import OutputDir


class DemoFolder(OutputDir):
    """Result, report and a trace for each policy, claimed by one demo."""

    def __init__(self, folder: str | Path, policies: Sequence[str]) -> None:
        traces = [f"{policy}/{TRACE}" for policy in policies]
        super().__init__(folder, work="demo", files=(RESULT_FILE, REPORT_FILE), traces=traces)
