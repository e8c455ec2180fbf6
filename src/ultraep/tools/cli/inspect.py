"""`ultraep inspect`: what imbalance a model would have, and what balancing would bring."""

from __future__ import annotations

import shlex
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from ultraep.errors import BackendUnavailable
from ultraep.tools.cli import render
from ultraep.tools.cli.lists import names_in, numbers_in, ranges_in
from ultraep.tools.cli.progress import duration, progress
from ultraep.tools.cli.terminal import Grid, complain, make_console
from ultraep.tools.inspect.asked import Asked

if TYPE_CHECKING:
    from ultraep.tools.inspect.findings import Findings
    from ultraep.tools.inspect.result import InspectionResult
    from ultraep.tools.inspect.run import Inspection

EXAMPLE = (
    "Example: ultraep inspect --random qwen3_moe\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --text code.txt --text prose.txt --ep 8,64\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --layers 0-7 --tokens 4096"
)
USUAL = Asked(family="mixtral")
POLICIES = ",".join(USUAL.policies)
MOST_LAYERS = 12  # that are printed; the report has them all
CLUSTER = "h200-nvl8"
INTERRUPTED = 130  # exit code

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a checkpoint, as transformers' save_pretrained writes it.",
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
        help="A text to send through the model; several: --text A --text B. They are told apart.",
        show_default="code, prose and tables of Python's library",
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--ep", metavar="N,...", help="Ranks of the group.", show_default="8,16,64 where they fit"
    ),
]
Slots = Annotated[str, typer.Option(metavar="N,...", help="Spare slots of every rank.")]
Tokens = Annotated[int, typer.Option(help="Tokens to read of every text.")]
Window = Annotated[int, typer.Option(help="Tokens of a microbatch, all ranks together.")]
Sequence = Annotated[int, typer.Option(help="Tokens that see each other.")]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="N-M,...",
        help="Layers to look at; the model is run up to the last of them.",
        show_default="all with experts",
    ),
]
Policies = Annotated[str, typer.Option(metavar="NAME,...", help="Policies to compare.")]
History = Annotated[
    int, typer.Option(help="Past windows of a layer that eplb, lplb and flashlb place by.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for trace, result and report.")]
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
    sequence: Sequence = USUAL.sequence,
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
    at a time, records what its routers decide, and plans that for groups of many ranks. Nothing
    is downloaded, and no cluster is needed.
    """
    asked = Asked(
        model=model,
        family=random,
        files=tuple(text or ()),
        tokens=tokens,
        window=window,
        sequence=sequence,
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
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # slow then, and that is told
        _inspect(asked, out, report=not no_report)


def _inspect(asked: Asked, out: Path, *, report: bool) -> None:
    from ultraep.tools.inspect.conclude import conclude
    from ultraep.tools.inspect.run import Inspection, claim_folder

    console, began = make_console(), time.perf_counter()
    inspection = Inspection(asked)
    with claim_folder(out) as claim:
        _introduce(console, inspection)
        try:
            with inspection, progress("reading") as tell:
                caught = inspection.record(claim, tell)
            with progress("planning") as tell:
                findings = inspection.findings(claim, tell)
        except KeyboardInterrupt:
            kept = f"what was recorded so far is in {claim.traces[0]}"
            complain(f"interrupted; {kept}")
            raise typer.Exit(INTERRUPTED) from None
        result = conclude(inspection, caught, findings, time.perf_counter() - began)
        _show(console, result, findings)
        _save(console, inspection, result, findings, report=report, out=out)


# -- before --------------------------------------------------------------------------------------


def _introduce(console: Console, inspection: Inspection) -> None:
    """Sizes and time, before anything is read."""
    known, opened = inspection.estimate, inspection.opened
    layers, windows = inspection.anatomy.experts, inspection.texts[-1].end + 1
    texts = ", ".join(span.name for span in inspection.texts)
    length = inspection.excerpts[0].windows[0].shape[1]
    lines = {
        "model": f"{inspection.asked.name}: {_large(known.parameters)} parameters; "
        f"{len(layers)} of {len(opened.anatomy.blocks)} layers, {inspection.topology.experts} "
        f"experts in each, {inspection.choices} for a token",
        "text": f"{texts}: {known.tokens:,} tokens in {windows} windows, sequences of {length}",
        "to do": f"reads {decimal(known.read)}, needs about {decimal(known.memory)} of memory, "
        f"takes about {duration(known.seconds)} on {opened.device}, "
        f"{str(opened.dtype).removeprefix('torch.')}",
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
    from ultraep.tools.inspect.report import words

    console.print(_policies(result))
    console.print()
    console.print(_texts(findings))
    console.print()
    console.print(_layers(findings))
    console.print()
    for sentence in words.verdict(findings):
        console.print(Text(sentence), width=min(console.width, 100))
    if any(row.beyond for row in result.rows):
        console.print(Text(f"* {words.BEYOND_LIMITS}", render.FAINT))
    for note in result.notes:
        console.print(Text(f"note: {note}", render.FAINT), soft_wrap=True)
    console.print(f"It took {result.wall_seconds:.0f} s in all.\n")


def _grid(title: str, *columns: str) -> Grid:
    grid = Grid(title=title, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="right" if number else "left")
    return grid


def _policies(result: InspectionResult) -> Grid:
    grid = _grid(
        "Imbalance at every size, mean of all layers and windows (worst)",
        *("policy", "EP", "slots", "before", "after", "bound", "copies", "remote"),
    )
    for row in result.rows:
        grid.add_row(
            row.policy + "*" * bool(row.beyond),
            *(str(row.ranks), "-" if row.policy == "none" else str(row.slots)),
            f"{row.before:.3f} ({row.before_worst:.2f})",
            f"{row.after:.3f} ({row.after_worst:.2f})",
            *(f"{row.bound:.3f}", f"{row.copies:.1f}", f"{row.remote:.1%}"),
        )
    return grid


def _texts(findings: Findings) -> Grid:
    sizes = findings.sizes
    columns = [f"EP{size}" for size in sizes]
    grid = _grid(f"Imbalance of every text, before -> {findings.shown_label}", "text", *columns)
    for span in findings.texts:
        own = findings.text == span.name
        cells = []
        for size in sizes:
            one = findings.shown_of(size)
            cells.append(f"{one.before[own].mean():.3f} -> {one.after[own].mean():.3f}")
        grid.add_row(span.name, *cells)
    return grid


def _layers(findings: Findings) -> Grid:
    """All layers, or the most uneven ones of many."""
    one, layers = findings.shown, findings.trace.layers.tolist()
    own = {layer: findings.trace.layer == layer for layer in layers}
    worst = sorted(layers, key=lambda layer: -float(one.before[own[layer]].mean()))[:MOST_LAYERS]
    which = "of every layer" if len(layers) == len(worst) else "of the most uneven layers"
    title = f"Imbalance {which} at EP{findings.sizes[0]}, mean (worst)"
    grid = _grid(title, "layer", "before", findings.shown_label, "copies")
    for layer in sorted(worst):
        before, after = one.before[own[layer]], one.after[own[layer]]
        grid.add_row(
            str(layer),
            *(f"{values.mean():.3f} ({values.max():.2f})" for values in (before, after)),
            f"{one.copies[own[layer]].mean():.1f}",
        )
    return grid


def _save(
    console: Console,
    inspection: Inspection,
    result: InspectionResult,
    findings: Findings,
    *,
    report: bool,
    out: Path,
) -> None:
    """After all is printed: a disk that is full by now takes nothing away."""
    from ultraep.tools.inspect.preset import write_preset
    from ultraep.tools.inspect.report import write_report
    from ultraep.tools.inspect.result import PRESET_FILE, TRACE

    console.print(f"trace    {out / TRACE}", soft_wrap=True)
    console.print(f"result   {result.save(out)}", soft_wrap=True)
    write_preset(out / PRESET_FILE, inspection, result.top_k)
    if report:
        try:
            console.print(f"report   {write_report(out, result, findings)}", soft_wrap=True)
        except BackendUnavailable as missing:
            console.print(f"note: {missing}", soft_wrap=True)
    console.print("\nWould it pay on a cluster? " + _advise(out, result), soft_wrap=True)


def _advise(out: Path, result: InspectionResult) -> str:
    """The command that takes it from here."""
    from ultraep.tools.inspect.result import PRESET_FILE, TRACE

    sizes = [row.ranks for row in result.rows]
    ranks = next((size for size in sizes if result.experts % size == 0), sizes[0])
    words = ("ultraep", "advise", "--trace", out / TRACE, "--model", out / PRESET_FILE)
    return shlex.join(map(str, (*words, "--cluster", CLUSTER, "--ep", ranks)))
