"""`ultraep inspect`: the imbalance of a model's routing, and the effect of balancing."""

from __future__ import annotations

import shlex
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from ultraep.errors import BackendUnavailable
from ultraep.tools.cli.options import (
    Policies,
    option,
    split_names,
    split_numbers,
    split_ranges,
)
from ultraep.tools.cli.terminal import (
    FAINT,
    Grid,
    make_console,
    make_grid,
    print_error,
    print_facts,
    print_notes,
    progress,
)
from ultraep.tools.inspect.options import InspectOptions

if TYPE_CHECKING:
    from ultraep.tools.inspect.findings import Findings, InspectionResult
    from ultraep.tools.inspect.run import Inspection

EXAMPLE = (
    "Example: ultraep inspect --random qwen3_moe\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --text code.txt --text prose.txt --ep 8,64\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --layers 0-7 --tokens 4096"
)
DEFAULTS = InspectOptions(family="mixtral")
POLICIES = ",".join(DEFAULTS.policies)
PRINTED_LAYERS = 12  # the report has all layers
CLUSTER = "h200-nvl8"
INTERRUPTED = 130  # exit code


def command(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Directory of a checkpoint, as transformers' save_pretrained writes it.",
            show_default=False,
        ),
    ] = None,
    random: Annotated[
        str | None,
        option(
            "Use a tiny model with random weights instead: qwen3_moe, mixtral, olmoe, "
            "deepseek_v3, gpt_oss, glm4_moe, ...",
            metavar="FAMILY",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        option(
            "Text to send through the model. Repeat the option for several texts.",
            "code, prose and tables of Python's library",
            metavar="FILE",
        ),
    ] = None,
    ep: Annotated[
        str | None,
        option(
            "Ranks in the expert-parallel group.",
            "8,16,64, at most the experts",
            metavar="N,...",
        ),
    ] = None,
    slots: Annotated[str, option("Spare slots per rank.", metavar="N,...")] = "1,2",
    tokens: Annotated[int, option("Tokens to read from every text.")] = DEFAULTS.tokens,
    window: Annotated[int, option("Tokens per microbatch of all ranks.")] = DEFAULTS.window,
    sequence_length: Annotated[int, option("Tokens per sequence.")] = DEFAULTS.sequence,
    layers: Annotated[
        str | None,
        option(
            "Layers to record. The model runs up to the last of them.",
            "all MoE layers",
            metavar="N-M,...",
        ),
    ] = None,
    policy: Policies = POLICIES,
    history: Annotated[
        int, option("Past windows of a layer that eplb, lplb and flashlb plan from.")
    ] = DEFAULTS.history,
    out: Annotated[
        Path, option("Output directory for trace, result and report.", metavar="DIR")
    ] = Path("ultraep-inspect"),
    device: Annotated[str | None, option("cpu, cuda or cuda:0.", "cuda if available")] = None,
    dtype: Annotated[
        str | None, option("float32, bfloat16 or float16.", "as saved; float32 on a CPU")
    ] = None,
    seed: Annotated[int, option("Seed of random weights.")] = DEFAULTS.seed,
    no_report: Annotated[bool, option("Do not write report.html.", flag="--no-report")] = False,
) -> None:
    """Inspect a model: how imbalanced is its routing, and how much does balancing help?

    Sends text through a Mixture-of-Experts checkpoint of transformers on this machine, one block
    at a time, records the choices of its routers, and plans them for large groups. Downloads
    nothing and needs no cluster.
    """
    options = InspectOptions(
        model=model,
        family=random,
        files=tuple(text or ()),
        tokens=tokens,
        window=window,
        sequence=sequence_length,
        layers=None if layers is None else tuple(split_ranges(layers, "--layers")),
        sizes=None if ep is None else tuple(split_numbers(ep, "--ep")),
        slots=tuple(split_numbers(slots, "--slots")),
        policies=tuple(split_names(policy, "--policy")),
        history=history,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch falls back
        _inspect(options, out, report=not no_report)


def _inspect(options: InspectOptions, out: Path, *, report: bool) -> None:
    from ultraep.tools.inspect.run import Inspection, claim_folder

    console = make_console()
    inspection = Inspection(options)
    with claim_folder(out) as output_dir:
        _introduce(console, inspection)
        began = time.perf_counter()
        try:
            with progress("reading") as report_block:
                recorder = inspection.record(output_dir, report_block)
            with progress("planning") as report_case:
                findings = inspection.findings(output_dir, report_case)
        except KeyboardInterrupt:
            print_error(f"interrupted; the records so far are in {output_dir.traces[0]}")
            raise typer.Exit(INTERRUPTED) from None
        result = inspection.result(recorder, findings, time.perf_counter() - began)
        _show(console, result, findings)
        _save(console, inspection, result, findings, out, report=report)


def _introduce(console: Console, inspection: Inspection) -> None:
    """Print sizes before anything is read."""
    estimate, opened = inspection.estimate, inspection.opened
    layers, windows = inspection.anatomy.experts, len(inspection.windows)
    texts = ", ".join(span.name for span in inspection.texts)
    length = inspection.windows[0].shape[1]
    facts = {
        "model": f"{inspection.options.name}: {_large(estimate.parameters)} parameters; "
        f"{len(layers)} of {len(opened.anatomy.blocks)} layers, {inspection.topology.experts} "
        f"experts in each, {inspection.choices} per token",
        "text": f"{texts}: {estimate.tokens:,} tokens in {windows} windows, sequences of {length}",
        "work": f"reads {decimal(estimate.read)}, needs about {decimal(estimate.memory)} of memory "
        f"({opened.device}, {str(opened.dtype).removeprefix('torch.')})",
    }
    print_facts(console, facts)
    console.print()


def _large(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _show(console: Console, result: InspectionResult, findings: Findings) -> None:
    from ultraep.tools.inspect.findings import BEYOND, LEGEND

    title = "Imbalance by group size, mean of all layers and windows (worst)"
    console.print(make_grid(*findings.table(), title))
    console.print(Text(LEGEND, FAINT))
    if findings.beyond:
        console.print(Text(f"* {BEYOND}", FAINT))
    console.print()
    console.print(_texts(findings))
    console.print()
    console.print(_layers(findings))
    head, rows = findings.past_table()
    if rows:
        console.print()
        title = f"Imbalance of policies that plan from past windows, at EP{findings.sizes[0]}"
        console.print(make_grid(head, rows, title))
    console.print(f"\n{findings.headline}.", style="bold", soft_wrap=True)
    print_notes(console, result.notes)
    console.print(f"Measured in {result.wall_seconds:.0f} s.\n")


def _texts(findings: Findings) -> Grid:
    from ultraep.tools.inspect.findings import label

    shown = [findings.shown_of(size) for size in findings.sizes]
    rows = []
    for span in findings.texts:
        own = findings.text == span.name
        cells = [f"{case.before[own].mean():.3f} -> {case.after[own].mean():.3f}" for case in shown]
        rows.append([span.name, *cells])
    head = ["text", *(f"EP{size}" for size in findings.sizes)]
    return make_grid(head, rows, f"Imbalance by text, before -> {label(findings.shown.case)}")


def _layers(findings: Findings) -> Grid:
    """Return a line for every layer, or for the most imbalanced ones."""
    from ultraep.tools.inspect.findings import label

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
    return make_grid(["layer", "before", label(shown.case), "replicas"], rows, title)


def _save(
    console: Console,
    inspection: Inspection,
    result: InspectionResult,
    findings: Findings,
    out: Path,
    *,
    report: bool,
) -> None:
    """Save after printing, so that a full disk loses no output."""
    from ultraep.tools.inspect.findings import PRESET_FILE, TRACE
    from ultraep.tools.inspect.report import write_report
    from ultraep.tools.inspect.run import write_preset

    print_facts(console, {"trace": str(out / TRACE), "result": str(result.save(out))})
    write_preset(out / PRESET_FILE, inspection, result.top_k)
    if report:
        try:
            print_facts(console, {"report": str(write_report(out, result, findings))})
        except BackendUnavailable as missing:
            print_notes(console, [str(missing)])
    sizes = findings.sizes
    ranks = next((size for size in sizes if result.experts % size == 0), sizes[0])
    words = ("ultraep", "advise", "--trace", out / TRACE, "--model", out / PRESET_FILE)
    advise = shlex.join(map(str, (*words, "--cluster", CLUSTER, "--ep", ranks)))
    console.print(f"\nDoes balancing pay on a cluster? {advise}", soft_wrap=True)
