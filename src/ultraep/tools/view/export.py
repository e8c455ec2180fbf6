"""One HTML file in place of a server: a trace as its viewer shows it, thinned out where it is long.

It is made of the parts that all reports share, needs no network, and cannot load anything.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ultraep.errors import ConfigError
from ultraep.files.writing import write_text
from ultraep.tools.report.numbers import MOST_NUMBERS, Numbers, sample
from ultraep.tools.report.page import PICKER, Page, Section, own_file, plotly_js
from ultraep.tools.report.words import counted, size, table
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.record import numbers_of, stages_of
from ultraep.tools.view.table import Table, heat, overview
from ultraep.tools.view.traces import SERVED, TIMED, OpenTrace
from ultraep.trace.schema import Key

POINTS, COLUMNS = 600, 240
SECTIONS = (
    Section("imbalance", "Imbalance over time", ("imbalance",)),
    Section("layers", "Imbalance of every layer", ("layers",)),
    Section("map", "Layers over time", ("before", "after")),
    Section("copies", "Copies, and what they cost", ("copies",)),
    Section("time", "Time lost and saved", ("time",)),
    Section("microbatches", "One microbatch, rank by rank", ("microbatches",)),
    Section("flows", "Copies of the most uneven microbatch, from home to hosts", ("flows",)),
    Section("stages", "Its stages on all ranks", ("forward", "backward")),
)
TOLD = {
    "imbalance": "Mean of the layers; the band reaches from the least to the most uneven layer.",
    "layers": "Mean of all microbatches, without and with copies.",
    "before": "Imbalance without copies: the darker (on a dark page, the brighter), the worse.",
    "after": "Imbalance with copies, likewise.",
    "copies": "Copies of a layer, and bytes that all ranks have sent for them.",
    "time": "Of all layers. Still lost: how much longer the slowest rank computes experts than the "
    "mean rank. Saved: how much longer it would without copies, if time follows rows. Spent: "
    "planning, and sending weights and gradients of copies.",
    "microbatches": "Rows of every rank, stacked by expert; copies are hatched.",
}


def write_page(catalogue: Catalogue, path: Path) -> int:
    """Write the only trace of a catalogue; return the number of its records."""
    script = plotly_js()
    traces = [(shown.item, shown.trace) for shown in catalogue.shown if shown.trace is not None]
    if len(traces) != 1:
        names = ", ".join(item.name for item, _ in traces) or "none"
        raise ConfigError(f"--export writes one trace, here are {len(traces)}: {names}; name one")
    [(item, trace)] = traces
    catalogue.read_all()
    if not len(trace.table):
        raise ConfigError(f"{item.path}: nothing to show, the trace has no records")
    write_text(path, _page(item.name, trace).html(script))
    return len(trace.table)


def _page(name: str, trace: OpenTrace) -> Page:
    table = trace.table
    whole = overview(table, most=POINTS)
    shared = {name: whole[name] for name in ("step", "steps_per_point", "axis", "domains")}
    lines = shared | {"unit": "microbatch" if whole["several"] else "step"} | whole["lines"]
    key = table.key(_place_of_worst(table))
    copies = numbers_of(trace.record(key, SERVED))["copies"]
    numbers: dict[str, Numbers | None] = {
        **dict.fromkeys(("imbalance", "copies"), lines),
        "layers": whole["layers"],
        "before": heat(table, "before", most=COLUMNS),
        "after": heat(table, "after", most=COLUMNS),
        "time": lines if whole["totals"]["lost"] is not None else None,
        "microbatches": _microbatches(trace),
        "flows": copies if copies["list"] else None,
        **stages_of(trace.record(key, TIMED)),
    }
    drawn = {plot: values for plot, values in numbers.items() if values is not None}
    return Page(
        title=f"Trace {name}",
        facts=_facts(trace, whole["totals"]),
        notes=[*trace.notes, *_thinned(whole, drawn["microbatches"])],
        result=f"<h2>Result</h2>\n{_result(whole['totals'])}",
        sections=_sections(drawn),
        captions=TOLD | _told_of_worst(key, copies),
        numbers=drawn,
        script=own_file("ultraep.tools.view", "page/export.js"),
        controls={"microbatches": PICKER.format(noun="step")},
    )


def _sections(numbers: dict[str, Numbers]) -> list[Section]:
    """Those of which there is something to draw."""
    found = (
        replace(section, plots=tuple(plot for plot in section.plots if plot in numbers))
        for section in SECTIONS
    )
    return [section for section in found if section.plots]


def _told_of_worst(key: Key, copies: Numbers) -> dict[str, str]:
    step, layer, microbatch = key
    where = f"Step {step}, microbatch {microbatch}, layer {layer}"
    way = "passed on from copy to copy" if copies["relay"] == "chain" else "each sent by its home"
    told = copies["told"] in ("direct", "chain")
    why = "as the balancer was told" if told else "as balancers choose by themselves"
    return {
        "flows": f"{where}: {way}, {why}. As wide as the tokens that are served elsewhere; where "
        "there is little room, ranks are numbers only.",
        "forward": f"{where}, forward.",
        "backward": f"{where}, backward.",
    }


def _facts(trace: OpenTrace, totals: Numbers) -> list[tuple[str, str]]:
    header = trace.header
    sizes = [
        counted(header.ranks, "rank"),
        counted(header.experts, "expert"),
        f"{counted(header.slots, 'spare slot')} each",
    ]
    return [
        ("run", ", ".join(sizes)),
        ("policy", f"{header.policy} for {header.objective}, tolerance {header.tolerance:g}"),
        ("recorded", f"{header.created} {header.note}".strip()),
        ("records", f"{totals['records']:,}"),
    ]


def _result(totals: Numbers) -> str:
    rows = [
        ["imbalance without copies", f"{totals['before']:.3f}", f"{totals['before_worst']:.3f}"],
        ["imbalance with copies", f"{totals['after']:.3f}", f"{totals['after_worst']:.3f}"],
        ["copies", f"{totals['copies'] / totals['records']:.1f}", ""],
        ["bytes moved", size(totals["bytes"] / totals["records"]), ""],
    ]
    return table(["of a layer", "mean", "worst"], rows, "result")


def _thinned(whole: Numbers, microbatches: Numbers) -> list[str]:
    found = []
    if whole["steps_per_point"] > 1:
        found.append(f"a point of a line stands for {whole['steps_per_point']} microbatches")
    shown, recorded = len(microbatches["moments"]), microbatches["recorded"]
    if shown < recorded:
        found.append(f"{shown} of the {recorded} microbatches can be chosen below")
    return found


def _microbatches(trace: OpenTrace) -> Numbers:
    """Return microbatches to choose from, as the reports have them."""
    table, topology = trace.table, trace.header.topology
    step_M, microbatch_M, moment_N = table.moments
    layers, place_N = table.layers
    slots = int(topology.first_slot_of_rank[-1]) + topology.ranks * topology.slots
    worst = _place_of_worst(table)
    size = len(layers) * (topology.experts + slots)
    shown = sample(len(step_M), size, int(moment_N[worst]), MOST_NUMBERS)
    place = {int(moment): at for at, moment in enumerate(shown)}
    records: list[list[Numbers | None]] = [[None] * len(layers) for _ in shown]
    for record in np.flatnonzero(np.isin(moment_N, shown)).tolist():
        whole = numbers_of(trace.record(table.key(record), SERVED))
        held = {name: whole[name] for name in ("loads", "rows", "held")}
        records[place[int(moment_N[record])]][int(place_N[record])] = held
    return {
        "noun": "Step",
        "homes": [topology.home_experts(rank).tolist() for rank in range(topology.ranks)],
        "slots": topology.slots,
        "layers": layers.tolist(),
        "recorded": len(step_M),
        "moments": [
            {
                "step": int(step_M[moment]),
                "microbatch": int(microbatch_M[moment]),
                "domain": trace.header.policy,
            }
            for moment in shown.tolist()
        ],
        "worst": [place[int(moment_N[worst])], int(place_N[worst])],
        "records": records,
    }


def _place_of_worst(table: Table) -> int:
    return int(np.nan_to_num(table.before).argmax())
