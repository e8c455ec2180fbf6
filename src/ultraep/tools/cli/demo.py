"""`ultraep demo`: train, serve and measure a small MoE model on this machine, with and without
balancing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.tools.cli import render
from ultraep.tools.cli.tables import grid_of
from ultraep.tools.cli.terminal import Grid, make_console
from ultraep.tools.demo.result import DemoResult, Event, Note, Progress, trace_folder
from ultraep.tools.demo.sizes import (
    Job,
    Machine,
    choose,
    core_speed,
    expected_seconds,
    this_machine,
)
from ultraep.tools.launch.processes import RankPlace

EXAMPLE = (
    "Example: ultraep demo --quick\n\n"
    "Example: torchrun --nproc-per-node 8 -m ultraep demo --out demo"
)
DEVICES = ("cpu", "cuda")
LINES = 8  # of a phase, where there is no terminal
HISTORY = 30  # steps in a sparkline
LESS, MORE = 0.8, 1.4  # of the estimated time
PHASES = {
    "training": "1 training",
    "prefill": "2 answering requests",
    "layers": "3 measuring layers",
}


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a smaller demo, under a minute.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the training.", show_default="100, or as time allows"),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes of the expert-parallel group.", show_default="by cores"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda with a GPU for every rank.")] = "cpu",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Output directory for result, traces and report.")
    ] = Path("ultraep-demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights, texts and requests.")] = 0,
    policy: Annotated[
        str, typer.Option(metavar="NAME,...", help="Policies to compare, in this order.")
    ] = "none,ultraep",
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Do not write report.html.")
    ] = False,
) -> None:
    """Train a small MoE model here, answer requests with it, and measure its layers.

    The text is Python's own library, the ranks are real processes. All printed numbers are
    measured in this run. Under torchrun, the demo runs on its ranks instead.
    """
    from ultraep.tools.demo.run import prepare, run

    if seed < 0:
        raise ConfigError(f"--seed must not be negative, got {seed}")
    place, names = RankPlace.of_torchrun(), tuple(name.strip() for name in policy.split(","))
    if place is not None and ranks not in (None, place.size):
        raise ConfigError(f"--ranks {ranks}, but torchrun has started {place.size}")
    sizes, notes = choose(
        _machine(device),
        quick=quick,
        ranks=place.size if place else ranks,
        steps=steps,
        device=device,
        policies=len(names),
    )
    job = Job(sizes, names, str(out), seed, device, tuple(notes))
    console = make_console()
    console.quiet = place is not None and place.rank > 0
    with prepare(job, place) as claim:
        _introduce(console, job)
        display = Display(console, names)
        try:
            with display:
                result = run(job, display.show, place, claim)
        except KeyboardInterrupt:
            console.print(f"interrupted; what was recorded so far is in {out}")
            raise
        _conclude(console, result)
        if not console.quiet:
            _save(console, result, out, report=not no_report)


def _machine(device: str) -> Machine:
    if device not in DEVICES:
        raise ConfigError(f"--device is one of {', '.join(DEVICES)}, got {device!r}")
    machine = this_machine()
    if device == "cpu":
        return machine
    from ultraep.tools.launch.group import gpus

    return Machine(machine.cores, machine.memory, gpus())


# -- before --------------------------------------------------------------------------------------


def _introduce(console: Console, job: Job) -> None:
    sizes, cores = job.sizes, this_machine().cores
    ranks = f"{sizes.ranks} rank{'s' * (sizes.ranks > 1)}"
    where = "a GPU" if job.device == "cuda" else "one thread"
    slots = f"{sizes.slots} spare slot{'s' * (sizes.slots > 1)}"
    lines = {
        "demo": "train a small language model under every policy, answer requests with it, measure "
        "its MoE layers beside even routing, write a report",
        "ranks": f"{ranks}, {where} and {slots} each; this machine has {cores} "
        f"core{'s' * (cores > 1)}",
        "model": f"bytes as tokens, {sizes.layers} MoE layers of {sizes.experts} experts, "
        f"{sizes.top_k} per token, width {sizes.hidden}, {sizes.dtype}",
        "text": "Python's own library: code, then prose, then tables; "
        f"{sizes.tokens} tokens per rank and step, {sizes.steps} steps",
        "policies": f"{', '.join(job.policies)}, in turns, with the same seeds and the same text",
        "time": _how_long(job, cores),
    }
    for name, words in lines.items():
        console.print(Text(f"{name:<10}{words}"), soft_wrap=True)
    for words in job.notes:
        console.print(f"note: {words}", soft_wrap=True)
    console.print()


def _how_long(job: Job, cores: int) -> str:
    """An estimate for this machine, as wide as it is uncertain."""
    if job.device != "cpu":
        return "some minutes"
    speed = core_speed(job.sizes.dtype)
    seconds = expected_seconds(job.sizes, len(job.policies), cores, speed)
    low, high = LESS * seconds / 60, MORE * seconds / 60
    span = f"{max(1, int(low))} to {math.ceil(high)} minutes"
    return f"{span if high > 1 else 'under a minute'} on idle cores; other programs make it longer"


# -- while it runs -------------------------------------------------------------------------------


class Display:
    """Progress: a picture that changes on a terminal, else a line now and then."""

    def __init__(self, console: Console, policies: tuple[str, ...]) -> None:
        self.console = console
        self.past: dict[str, list[Progress]] = {name: [] for name in policies}
        self.live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def show(self, event: Event) -> None:
        """Print or draw an event of rank 0."""
        if isinstance(event, Note):
            self.console.print(f"note: {event.words}")
            return
        if event.policy:
            self.past[event.policy].append(event)
        if self.console.is_terminal:
            self.live.update(self.picture(event), refresh=True)
        else:
            self.line(event)

    def line(self, now: Progress) -> None:
        every = -(-now.of // LINES)
        if now.done % every == 0 or now.done in (1, now.of):
            where = f"{PHASES[now.phase]:<21} {now.done:>4}/{now.of:<4}"
            self.console.print(f"{where} {now.policy:<8} {_summary(now)}", soft_wrap=True)

    def picture(self, now: Progress) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(PHASES[now.phase], "bold"),
            ProgressBar(now.of, now.done, width=24),
            f"{now.done}/{now.of}",
            f"text: {now.subject}",
        )
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False)
        for name in ("policy", "loss", "tokens/s", "imbalance", "before", "after"):
            grid.add_column(name, justify="right" if name in ("loss", "tokens/s") else "left")
        lines = {policy: past for policy, past in self.past.items() if past}
        high = max([1.1, *(p.before or 1.0 for past in lines.values() for p in past[-HISTORY:])])
        for policy, past in lines.items():
            grid.add_row(policy, *_cells(past, high, render.glyphs_for(self.console)))
        return Group(head, grid)


def _summary(now: Progress) -> str:
    parts = [
        f"{now.subject:<6}",
        "" if now.loss is None else f"loss {now.loss:.3f}",
        "" if now.tokens_per_second is None else f"{now.tokens_per_second:>7,.0f} tokens/s",
        "" if now.after is None else f"imbalance {now.before:.3f} -> {now.after:.3f}",
    ]
    return "  ".join(part for part in parts if part)


def _cells(past: list[Progress], high: float, glyphs: render.Glyphs) -> list[str | Text]:
    now = past[-1]
    same = [p for p in past if p.phase == now.phase][-HISTORY:]

    def chart(values: list[float | None], style: str) -> Text:
        known = [value for value in values if value is not None]
        return Text(render.sparkline(known, low=1.0, high=high, glyphs=glyphs), style)

    return [
        "" if now.loss is None else f"{now.loss:.3f}",
        f"{now.tokens_per_second:,.0f}",
        f"{now.before:.3f} -> {now.after:.3f}",
        chart([p.before for p in same], render.OVERFULL),
        chart([p.after for p in same], render.CALM),
    ]


# -- afterwards ----------------------------------------------------------------------------------


def _conclude(console: Console, result: DemoResult) -> None:
    sizes, last = result.sizes, result.policies[-1]
    title = (
        f"{sizes.ranks} rank{'s' * (sizes.ranks > 1)}, {result.steps} steps, "
        f"{result.parameters / 1e6:.1f} M parameters, {result.requests} requests"
    )
    console.print()
    console.print(grid_of(title, *result.table()))
    console.print(f"\n{result.headline}.", style="bold", soft_wrap=True)
    console.print(
        f"Imbalance {last.imbalance_before:.2f} -> {last.imbalance_after:.3f}, "
        f"{last.layer_share:.0%} of the speed of even routing; losses differ by at most "
        f"{result.loss_difference:.0e}. Measured in {result.wall_seconds:.0f} s.\n"
    )


def _save(console: Console, result: DemoResult, out: Path, *, report: bool) -> None:
    """Save after printing, so that a full disk costs nothing."""
    for policy in result.policies:
        console.print(f"trace    {trace_folder(out, policy.policy)}", soft_wrap=True)
    console.print(f"result   {result.save(out)}", soft_wrap=True)
    if not report:
        return
    from ultraep.tools.demo.report import write_report

    try:
        console.print(f"report   {write_report(out)}", soft_wrap=True)
    except BackendUnavailable as missing:
        console.print(f"note: {missing}", soft_wrap=True)
