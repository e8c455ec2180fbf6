"""`ultraep inspect`: the imbalance of a model's routing, and the effect of balancing."""

from __future__ import annotations

import shlex
import time
import warnings
from typing import TYPE_CHECKING

from rich.filesize import decimal

from ultraep.errors import BackendUnavailable
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.terminal import Terminal, progress
from ultraep_tools.inspect.findings import (
    BEYOND,
    LEGEND,
    PRESET_FILE,
    TRACE,
    Findings,
    InspectionResult,
    label,
    write_report,
)
from ultraep_tools.inspect.options import InspectOptions

if TYPE_CHECKING:
    from ultraep_tools.inspect.run import Inspection

EXAMPLE = (
    "Example: ultraep inspect --random qwen3_moe\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --text code.txt --text prose.txt --ep 8,64\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --layers 0-7 --tokens 4096"
)
PRINTED_LAYERS = 12  # the report has all layers
CLUSTER = "h200-nvl8"


@cli.with_options
def command(options: InspectOptions) -> None:
    """Inspect a model: how imbalanced is its routing, and how much does balancing help?

    Sends text through a Mixture-of-Experts checkpoint of transformers on this machine, one block
    at a time, records the choices of its routers, and plans them for large groups. Downloads
    nothing and needs no cluster.
    """
    from ultraep_tools.inspect.run import Inspection, claim_folder

    terminal = Terminal()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch falls back
        inspection = Inspection(options)
        with claim_folder(options.out) as output_dir:
            _introduce(terminal, inspection)
            began = time.perf_counter()
            try:
                with progress("reading") as report_block:
                    recorder = inspection.record(output_dir, report_block)
                with progress("planning") as report_case:
                    findings = inspection.findings(output_dir, report_case)
            except KeyboardInterrupt:
                records = f"the records so far are in {output_dir.traces[0]}"
                raise KeyboardInterrupt(records) from None
            result = inspection.result(recorder, findings, time.perf_counter() - began)
            _show(terminal, result, findings)
            _save(terminal, inspection, result, findings)


def _introduce(terminal: Terminal, inspection: Inspection) -> None:
    """Print sizes before anything is read."""
    estimate, opened = inspection.estimate, inspection.opened
    layers, windows = inspection.anatomy.experts, len(inspection.windows)
    texts = ", ".join(span.name for span in inspection.texts)
    length = inspection.windows[0].shape[1]
    millions = estimate.parameters / 1e6
    parameters = f"{millions / 1e3:.1f} billion" if millions >= 1e3 else f"{millions:.1f} million"
    terminal.print_facts(
        model=f"{inspection.options.name}: {parameters} parameters; "
        f"{len(layers)} of {len(opened.anatomy.blocks)} layers, {inspection.topology.experts} "
        f"experts in each, {inspection.choices} per token",
        text=f"{texts}: {estimate.tokens:,} tokens in {windows} windows, sequences of {length}",
        work=f"reads {decimal(estimate.read)}, needs about {decimal(estimate.memory)} of memory "
        f"({opened.device}, {str(opened.dtype).removeprefix('torch.')})",
    )
    terminal.print()


def _show(terminal: Terminal, result: InspectionResult, findings: Findings) -> None:
    title = "Imbalance by group size, mean of all layers and windows (worst)"
    terminal.print_table(*findings.table(), title)
    terminal.print_faint(LEGEND)
    if findings.beyond:
        terminal.print_faint(f"* {BEYOND}")
    terminal.print()
    _print_texts(terminal, findings)
    terminal.print()
    _print_layers(terminal, findings)
    head, rows = findings.past_table()
    if rows:
        terminal.print()
        title = f"Imbalance of policies that plan from past windows, at EP{findings.sizes[0]}"
        terminal.print_table(head, rows, title)
    terminal.print(f"\n{findings.headline}.", style="bold", soft_wrap=True)
    terminal.print_notes(*result.notes)
    terminal.print(f"Measured in {result.wall_seconds:.0f} s.\n")


def _print_texts(terminal: Terminal, findings: Findings) -> None:
    cases = [findings.shown_of(size) for size in findings.sizes]
    rows = []
    for span in findings.texts:
        own = findings.text == span.name
        cells = [f"{case.before[own].mean():.3f} -> {case.after[own].mean():.3f}" for case in cases]
        rows.append([span.name, *cells])
    head = ["text", *(f"EP{size}" for size in findings.sizes)]
    title = f"Imbalance by text, before -> {label(findings.shown.case)}"
    terminal.print_table(head, rows, title)


def _print_layers(terminal: Terminal, findings: Findings) -> None:
    """Print a line for every layer, or for the most imbalanced ones."""
    shown, layers = findings.shown, findings.trace.layers.tolist()
    own = {layer: findings.trace.layer == layer for layer in layers}
    worst = sorted(layers, key=lambda layer: -float(shown.before[own[layer]].mean()))
    rows = []
    for layer in sorted(worst[:PRINTED_LAYERS]):
        both = shown.before[own[layer]], shown.after[own[layer]]
        cells = [f"{values.mean():.3f} ({values.max():.2f})" for values in both]
        rows.append([str(layer), *cells, f"{shown.copies[own[layer]].mean():.1f}"])
    which = "by layer" if len(layers) == len(rows) else "of the most imbalanced layers"
    title = f"Imbalance {which} at EP{findings.sizes[0]}, mean (worst)"
    terminal.print_table(["layer", "before", label(shown.case), "replicas"], rows, title)


def _save(
    terminal: Terminal, inspection: Inspection, result: InspectionResult, findings: Findings
) -> None:
    """Save after printing, so that a full disk loses no output."""
    from ultraep_tools.inspect.run import write_preset

    options, out = inspection.options, inspection.options.out
    terminal.print_facts(trace=out / TRACE, result=result.save(out))
    write_preset(out / PRESET_FILE, inspection, result.top_k)
    if not options.no_report:
        try:
            terminal.print_facts(report=write_report(out, result, findings))
        except BackendUnavailable as missing:
            terminal.print_notes(str(missing))
    sizes = findings.sizes
    ranks = next((size for size in sizes if result.experts % size == 0), sizes[0])
    words = ("ultraep", "advise", "--trace", out / TRACE, "--model", out / PRESET_FILE)
    advise = shlex.join(map(str, (*words, "--cluster", CLUSTER, "--ep", ranks)))
    terminal.print(f"\nDoes balancing pay on a cluster? {advise}", soft_wrap=True)
