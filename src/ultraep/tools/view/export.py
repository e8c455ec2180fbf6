"""A trace as one HTML file: the page of the viewer with its scripts and the answers of the server.

The file needs no network and cannot load anything. Of a long trace it holds some microbatches,
evenly spaced, and the most imbalanced one.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ultraep.errors import ConfigError
from ultraep.files.writing import write_text
from ultraep.tools.report.numbers import MOST_NUMBERS, Numbers, sample
from ultraep.tools.report.page import embedded
from ultraep.tools.view.api import Api
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.table import VALUES
from ultraep.tools.view.traces import OpenTrace
from ultraep.trace.schema import KEY

POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">"
)
FILES = re.compile(r'<link rel="stylesheet" href="(.*?)">|<script src="(.*?)"></script>')


def write_page(catalogue: Catalogue, path: Path) -> int:
    """Write the only trace of a catalogue; return the number of its records."""
    items = [item for item in catalogue.items if item.trace is not None]
    if len(items) != 1:
        names = ", ".join(item.name for item in items) or "none"
        raise ConfigError(
            f"--export writes one trace, but {len(items)} are open ({names}): pass one"
        )
    [item], api = items, Api(catalogue)
    catalogue.read_all()
    trace = catalogue.trace(item.name)
    if not len(trace.table):
        raise ConfigError(f"{item.path}: nothing to export, the trace has no records")
    write_text(path, _html(api, _answers(api, item.name, trace)))
    return len(trace.table)


def _answers(api: Api, name: str, trace: OpenTrace) -> Numbers:
    """Return the answers that the exported page needs, by name."""
    query, state = {"trace": name}, api.state({})
    state["items"] = [entry for entry in state["items"] if entry["name"] == name]
    table, header = trace.table, trace.header
    step_M, _, moment_N = table.moments
    slots = int(header.topology.first_slot_of_rank[-1])
    per_record = header.experts + 2 * slots + 3 * header.ranks * len(header.stages)
    worst = int(moment_N[table.before.argmax()])
    moments = sample(len(step_M), per_record * len(table.layers[0]), worst, MOST_NUMBERS)
    records = map(table.key, np.flatnonzero(np.isin(moment_N, moments)).tolist())
    notes = []
    if len(moments) < len(step_M):
        notes.append(f"this file holds {len(moments):,} of {len(step_M):,} microbatches")
    return {
        "state": state,
        "overview": api.overview(query),
        "training": api.training(query),
        "heat": {value: api.heat(query | {"value": value}) for value in VALUES},
        "records": {",".join(map(str, key)): _record(api, name, key) for key in records},
        "notes": notes,
    }


def _record(api: Api, name: str, key: tuple[int, int, int]) -> Numbers:
    values = dict(zip(KEY, map(str, key), strict=True))
    return api.record({"trace": name} | values)


def _html(api: Api, answers: Numbers) -> str:
    """Return the page with all files inside it."""

    def inline(match: re.Match[str]) -> str:
        style, script = match.groups()
        text = api.files[style or script].content.decode()
        if style:
            return f"<style>\n{text}</style>"
        return "<script>" + text.replace("</script", "<\\/script") + "</script>"

    page = api.files["/"].content.decode().replace("<title>", f"{POLICY}\n<title>", 1)
    baked = embedded("baked", answers).replace('id="numbers-baked"', 'id="baked"', 1)
    first, rest = page.split("<script", 1)
    return FILES.sub(inline, f"{first}{baked}\n<script{rest}")
