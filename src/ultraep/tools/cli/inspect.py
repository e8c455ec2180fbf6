"""`ultraep inspect`: what imbalance a model would have, and what balancing would bring."""

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
from ultraep.tools.cli import render
from ultraep.tools.cli.lists import names_in, numbers_in, ranges_in
from ultraep.tools.cli.progress import duration, progress
from ultraep.tools.cli.tables import grid_of
from ultraep.tools.cli.terminal import Grid, complain, make_console
from ultraep.tools.inspect.options import InspectOptions

if TYPE_CHECKING:
    from ultraep.tools.inspect.findings import Findings, InspectionResult
    from ultraep.tools.inspect.run import Inspection

EXAMPLE = (
    "Example: ultraep inspect --random qwen3_moe\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --text code.txt --text prose.txt --ep 8,64\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --layers 0-7 --tokens 4096"
)
USUAL = InspectOptions(family="mixtral")
POLICIES = ",".join(USUAL.policies)
MOST_LAYERS = 12  # that are printed; the report has them all
CLUSTER = "h200-nvl8"
INTERRUPTED = 130  # exit code

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Directory of a checkpoint, as transformers' save_pretrained writes it.",
        show_default=False,
    ),
]
Family = Annotated[
    str | None,
    typer.Option(
        "--random", metavar="FAMILY", help="A tiny model with random weights instead: qwen3_moe, "
        "mixtral, olmoe, deepseek_v3, gpt_oss, glm4_moe, ..."
    ),
]  # fmt: skip
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="A text to send through the model; several: --text A --text B. Results are per text.",
        show_default="code, prose and tables of Python's library",
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--ep",
        metavar="N,...",
        help="Ranks of the expert-parallel group.",
        show_default="8,16,64 where they fit",
    ),
]
Slots = Annotated[str, typer.Option(metavar="N,...", help="Spare slots of every rank.")]
Tokens = Annotated[int, typer.Option(help="Tokens to read of every text.")]
Window = Annotated[int, typer.Option(help="Tokens of a microbatch, all ranks together.")]
SequenceLength = Annotated[int, typer.Option(help="Tokens per sequence.")]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="N-M,...",
        help="Layers to record; the model is run up to the last of them.",
        show_default="all with experts",
    ),
]
Policies = Annotated[str, typer.Option(metavar="NAME,...", help="Policies to compare.")]
History = Annotated[
    int, typer.Option(help="Past windows of a layer that eplb, lplb and flashlb place by.")
]
Out = Annotated[
    Path, typer.Option(metavar="DIR", help="Output directory for trace, result and report.")
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:0.", show_default="cuda where there is one"),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", show_default="as saved; float32 on a CPU"),
]
Seed = Annotated[int, typer.Option(help="Seed of random weights.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Do not write report.html.")]


def command(
    model: Model = None,
    random: Family = None,
    text: Texts = None,
    ep: Sizes = None,
    slots: Slots = "1,2",
    tokens: Tokens = USUAL.tokens,
    window: Window = USUAL.window,
    sequence_length: SequenceLength = USUAL.sequence,
    layers: Layers = None,
    policy: Policies = POLICIES,
    history: History = USUAL.history,
    out: Out = Path("ultraep-inspect"),
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = USUAL.seed,
    no_report: NoReport = False,
) -> None:
    """Look into a model: how uneven is its routing, and what would balancing bring?

    Sends text through a Mixture-of-Experts checkpoint of transformers on this machine, one block
    at a time, records the choices of its routers, and plans them for groups of many ranks. Nothing
    is downloaded, and no cluster is needed.
    """
    options = InspectOptions(
        model=model,
        family=random,
        files=tuple(text or ()),
        tokens=tokens,
        window=window,
        sequence=sequence_length,
        layers=None if layers is None else tuple(ranges_in(layers, "--layers")),
        sizes=None if ep is None else tuple(numbers_in(ep, "--ep")),
        slots=tuple(numbers_in(slots, "--slots")),
        policies=tuple(names_in(policy, "--policy")),
        history=history,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # slow then
        _inspect(options, out, report=not no_report)


def _inspect(options: InspectOptions, out: Path, *, report: bool) -> None:
    from ultraep.tools.inspect.run import Inspection, claim_folder

    console = make_console()
    inspection = Inspection(options)
    with claim_folder(out) as claim:
        _introduce(console, inspection)
        began = time.perf_counter()
        try:
            with inspection, progress("reading") as tell:
                caught = inspection.record(claim, tell)
            with progress("planning") as tell:
                findings = inspection.findings(claim, tell)
        except KeyboardInterrupt:
            complain(f"interrupted; what was recorded so far is in {claim.traces[0]}")
            raise typer.Exit(INTERRUPTED) from None
        result = inspection.result(caught, findings, time.perf_counter() - began)
        _show(console, result, findings)
        _save(console, inspection, result, findings, report=report, out=out)


# -- before --------------------------------------------------------------------------------------


def _introduce(console: Console, inspection: Inspection) -> None:
    """Print sizes and time before anything is read."""
    known, opened = inspection.estimate, inspection.opened
    layers, windows = inspection.anatomy.experts, inspection.texts[-1].end + 1
    texts = ", ".join(span.name for span in inspection.texts)
    length = inspection.excerpts[0].windows[0].shape[1]
    lines = {
        "model": f"{inspection.options.name}: {_large(known.parameters)} parameters; "
        f"{len(layers)} of {len(opened.anatomy.blocks)} layers, {inspection.topology.experts} "
        f"experts in each, {inspection.choices} per token",
        "text": f"{texts}: {known.tokens:,} tokens in {windows} windows, sequences of {length}",
        "to do": f"reads {decimal(known.read)}, needs about {decimal(known.memory)} of memory, "
        f"takes about {duration(known.seconds)} when idle "
        f"({opened.device}, {str(opened.dtype).removeprefix('torch.')})",
    }
    for name, words in lines.items():
        console.print(Text(f"{name:<7}{words}"), soft_wrap=True)
    for note in inspection.notes:
        console.print(Text(f"note:  {note}"), soft_wrap=True)
    console.print()


def _large(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


# -- afterwards ----------------------------------------------------------------------------------


def _show(console: Console, result: InspectionResult, findings: Findings) -> None:
    from ultraep.tools.inspect.findings import BEYOND

    title = "Imbalance at every size, mean of all layers and windows (worst)"
    console.print(grid_of(title, *result.table()))
    if any(row.beyond for row in result.rows):
        console.print(Text(f"* {BEYOND}", render.FAINT))
    console.print()
    console.print(_texts(findings))
    console.print()
    console.print(_layers(findings))
    head, rows = findings.past_table()
    if rows:
        console.print()
        title = f"Imbalance of policies that place by past windows, at EP{findings.sizes[0]}"
        console.print(grid_of(title, head, rows))
    console.print(f"\n{findings.headline}.", style="bold", soft_wrap=True)
    for note in result.notes:
        console.print(Text(f"note: {note}", render.FAINT), soft_wrap=True)
    console.print(f"It took {result.wall_seconds:.0f} s.\n")


def _texts(findings: Findings) -> Grid:
    from ultraep.tools.inspect.findings import label

    shown = [findings.shown_of(size) for size in findings.sizes]
    rows = []
    for span in findings.texts:
        own = findings.text == span.name
        cells = [f"{case.before[own].mean():.3f} -> {case.after[own].mean():.3f}" for case in shown]
        rows.append([span.name, *cells])
    title = f"Imbalance of every text, before -> {label(findings.shown.case)}"
    return grid_of(title, ["text", *(f"EP{size}" for size in findings.sizes)], rows)


def _layers(findings: Findings) -> Grid:
    """All layers, or the worst of many."""
    from ultraep.tools.inspect.findings import label

    shown, layers = findings.shown, findings.trace.layers.tolist()
    own = {layer: findings.trace.layer == layer for layer in layers}
    worst = sorted(layers, key=lambda layer: -float(shown.before[own[layer]].mean()))[:MOST_LAYERS]
    rows = []
    for layer in sorted(worst):
        both = shown.before[own[layer]], shown.after[own[layer]]
        cells = [f"{values.mean():.3f} ({values.max():.2f})" for values in both]
        rows.append([str(layer), *cells, f"{shown.copies[own[layer]].mean():.1f}"])
    which = "of every layer" if len(layers) == len(worst) else "of the worst layers"
    title = f"Imbalance {which} at EP{findings.sizes[0]}, mean (worst)"
    return grid_of(title, ["layer", "before", label(shown.case), "copies"], rows)


def _save(
    console: Console,
    inspection: Inspection,
    result: InspectionResult,
    findings: Findings,
    *,
    report: bool,
    out: Path,
) -> None:
    """Save after printing, so that a full disk costs nothing."""
    from ultraep.tools.inspect.findings import PRESET_FILE, TRACE
    from ultraep.tools.inspect.preset import write_preset
    from ultraep.tools.inspect.report import write_report

    console.print(f"trace    {out / TRACE}", soft_wrap=True)
    console.print(f"result   {result.save(out)}", soft_wrap=True)
    write_preset(out / PRESET_FILE, inspection, result.top_k)
    if report:
        try:
            console.print(f"report   {write_report(out, result, findings)}", soft_wrap=True)
        except BackendUnavailable as missing:
            console.print(f"note: {missing}", soft_wrap=True)
    sizes = [row.ranks for row in result.rows]
    ranks = next((size for size in sizes if result.experts % size == 0), sizes[0])
    words = ("ultraep", "advise", "--trace", out / TRACE, "--model", out / PRESET_FILE)
    advise = shlex.join(map(str, (*words, "--cluster", CLUSTER, "--ep", ranks)))
    console.print(f"\nWould it pay on a cluster? {advise}", soft_wrap=True)
