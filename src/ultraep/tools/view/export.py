"""One HTML file in place of a server: a trace as its viewer shows it, thinned out where it is long.

It is made of the parts that all reports share, needs no network, and cannot load anything.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ultraep.errors import ConfigError
from ultraep.files.writing import write_text
from ultraep.tools.report.numbers import MOST_NUMBERS, Numbers, kept
from ultraep.tools.report.page import PICKER, Page, Section, own_file, plotly_js
from ultraep.tools.report.words import counted, size, table
from ultraep.tools.view.catalogue import Catalogue, Index, Shown
from ultraep.tools.view.table import Table, heat, overview

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
    """Write the only trace of a catalogue; how many records it has."""
    script = plotly_js()
    number, shown = _only(catalogue)
    catalogue.read_all()
    assert shown.index is not None
    if not len(shown.index.table):
        raise ConfigError(f"{shown.item.path}: nothing to show, the trace has no records")
    write_text(path, _page(catalogue, number, shown, shown.index).html(script))
    return len(shown.index.table)


def _only(catalogue: Catalogue) -> tuple[int, Shown]:
    found = [(n, shown) for n, shown in enumerate(catalogue.shown) if shown.index is not None]
    if len(found) != 1:
        names = ", ".join(shown.item.name for _, shown in found) or "none"
        raise ConfigError(f"--export writes one trace, here are {len(found)}: {names}; name one")
    return found[0]


def _page(catalogue: Catalogue, number: int, shown: Shown, index: Index) -> Page:
    whole = overview(index.table, most=POINTS)
    shared = {name: whole[name] for name in ("step", "steps_per_point", "axis", "domains")}
    lines = shared | {"unit": "microbatch" if whole["several"] else "step"} | whole["lines"]
    key = index.table.key(_place_of_worst(index.table))
    worst = _of_worst(catalogue, number, key)
    numbers: dict[str, Numbers] = {
        **dict.fromkeys(("imbalance", "copies"), lines),
        "layers": whole["layers"],
        "before": heat(index.table, "before", most=COLUMNS),
        "after": heat(index.table, "after", most=COLUMNS),
        "microbatches": _microbatches(catalogue, number, index),
    }
    if whole["totals"]["lost"] is not None:
        numbers["time"] = lines
    numbers |= {name: found for name, found in worst.items() if found}
    return Page(
        title=f"Trace {shown.item.name}",
        facts=_facts(index, whole["totals"]),
        notes=[*index.notes, *_thinned(whole, numbers["microbatches"])],
        result=f"<h2>Result</h2>\n{_result(whole['totals'])}",
        sections=_sections(numbers),
        told=TOLD | _told_of_worst(key, worst["flows"]),
        numbers=numbers,
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


def _of_worst(
    catalogue: Catalogue, number: int, key: tuple[int, int, int]
) -> dict[str, Numbers | None]:
    """Copies and stages of one record; None: there are none."""
    copies = catalogue.record(number, key)["copies"]
    return {"flows": copies if copies["list"] else None} | catalogue.stages(number, key)


def _told_of_worst(key: tuple[int, int, int], copies: Numbers | None) -> dict[str, str]:
    step, layer, microbatch = key
    where = f"Step {step}, microbatch {microbatch}, layer {layer}"
    chained = copies is not None and copies["relay"] == "chain"
    told = copies is not None and copies["told"] in ("direct", "chain")
    way = "passed on from copy to copy" if chained else "each sent by its home"
    why = "as the balancer was told" if told else "as balancers choose by themselves"
    return {
        "flows": f"{where}: {way}, {why}. As wide as the tokens that are served elsewhere; where "
        "there is little room, ranks are numbers only.",
        "forward": f"{where}, forward.",
        "backward": f"{where}, backward.",
    }


def _facts(index: Index, totals: Numbers) -> list[tuple[str, str]]:
    header = index.header
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


def _microbatches(catalogue: Catalogue, number: int, index: Index) -> Numbers:
    """Microbatches to choose from, as the reports have them."""
    found, topology = index.table, index.header.topology
    step_M, microbatch_M, moment_N = found.moments
    layers, place_N = found.layers
    slots = int(topology.first_slot_of_rank[-1]) + topology.ranks * topology.slots
    worst = _place_of_worst(found)
    shown = kept(
        len(step_M),
        len(layers) * (topology.experts + slots),
        int(moment_N[worst]),
        MOST_NUMBERS,
    )
    place = {int(moment): at for at, moment in enumerate(shown)}
    records: list[list[Numbers | None]] = [[None] * len(layers) for _ in shown]
    for record in np.flatnonzero(np.isin(moment_N, shown)).tolist():
        step, layer, microbatch = found.key(record)
        whole = catalogue.record(number, (step, layer, microbatch))
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
                "domain": index.header.policy,
            }
            for moment in shown.tolist()
        ],
        "worst": [place[int(moment_N[worst])], int(place_N[worst])],
        "records": records,
    }


def _place_of_worst(found: Table) -> int:
    return int(np.nan_to_num(found.before).argmax())
