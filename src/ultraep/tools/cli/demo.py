"""`ultraep demo`: train, serve and measure a small MoE model on this machine, with and without
balancing.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import ultraep.tools.demo.estimate as estimate
from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.tools.cli import render
from ultraep.tools.cli.terminal import Grid, make_console
from ultraep.tools.demo.job import Job
from ultraep.tools.demo.result import DemoResult, Event, Note, PolicyResult, Progress, trace_folder
from ultraep.tools.demo.sizes import Machine, choose, this_machine
from ultraep.tools.launch.place import RankPlace

EXAMPLE = (
    "Example: ultraep demo --quick\n\n"
    "Example: torchrun --nproc-per-node 8 -m ultraep demo --out demo"
)
DEVICES = ("cpu", "cuda")
LINES = 8  # of a phase, where there is no terminal
HISTORY = 30  # steps in a sparkline
PHASES = {
    "training": "1 training",
    "prefill": "2 answering requests",
    "layers": "3 measuring layers",
}


def command(
    quick: Annotated[bool, typer.Option("--quick", help="A smaller one, under a minute.")] = False,
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
        Path, typer.Option(metavar="DIR", help="Folder for result, traces and report.")
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

    The text is Python's own library, the ranks are real processes. Everything that is
    printed was measured in this run. Under torchrun its ranks take the place of processes.
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
    began = time.perf_counter()
    with prepare(job, place) as claim:
        _introduce(console, job)
        display = Display(console, names)
        try:
            with display:
                result = run(job, display.show, place, claim)
        except KeyboardInterrupt:
            console.print(f"interrupted; what was recorded so far is in {out}")
            raise
        _conclude(console, result, time.perf_counter() - began)
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
    where = "a GPU each" if job.device == "cuda" else "one thread each"
    slots = "1 spare slot" if sizes.slots == 1 else f"{sizes.slots} spare slots"
    _say(
        console,
        f"What will happen: {sizes.ranks} ranks train a small language model with every policy, "
        "answer requests with it, measure its layers beside even routing, and write a report. "
        f"{_how_long(job)}",
    )
    _say(
        console,
        f"{sizes.ranks} rank{'s' * (sizes.ranks > 1)}, {where}; "
        f"this machine has {cores} core{'s' * (cores > 1)}. "
        f"A byte-level language model: {sizes.layers} MoE layers of {sizes.experts} experts, "
        f"{sizes.top_k} for each token, width {sizes.hidden}, {sizes.dtype}; "
        f"{sizes.tokens} tokens per rank and step, {sizes.steps} steps, {slots} per rank. "
        "It reads Python's own "
        f"library: code, then prose, then tables. Policies: {', '.join(job.policies)}; they take "
        "turns, with the same seeds and the same text.",
    )
    for words in job.notes:
        console.print(f"note: {words}")


def _how_long(job: Job) -> str:
    """Before it begins."""
    if job.device != "cpu":
        return "How long that takes on a GPU is not known beforehand: some minutes."
    speed, cores = estimate.core_speed(job.sizes.dtype), this_machine().cores
    found = estimate.seconds(job.sizes, len(job.policies), cores, speed)
    return (
        f"That takes {estimate.in_words(sum(found.values()))} on this machine, by "
        f"{speed / 1e9:.0f} billion operations a second of one core; other programs make it longer."
    )


def _say(console: Console, words: str) -> None:
    """A paragraph, no wider than is pleasant to read."""
    console.print(Text(words), width=min(console.width, 88))
    console.print()


# -- while it runs -------------------------------------------------------------------------------


class Display:
    """What goes on: a picture that changes on a terminal, else a line now and then."""

    def __init__(self, console: Console, policies: tuple[str, ...]) -> None:
        self.console = console
        self.past: dict[str, list[Progress]] = {name: [] for name in policies}
        self.live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()

    def show(self, event: Event) -> None:
        """Take in what rank 0 told."""
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
            self.console.print(f"{where} {now.policy:<8} {_told(now)}", soft_wrap=True)

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


def _told(now: Progress) -> str:
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


def _conclude(console: Console, result: DemoResult, seconds: float) -> None:
    console.print(_table(result))
    console.print()
    _say(console, f"{_meaning(result)} It took {seconds:.0f} s in all.")


def _save(console: Console, result: DemoResult, out: Path, *, report: bool) -> None:
    """After all is printed: a disk that is full by now takes nothing away."""
    for policy in result.policies:
        console.print(f"trace    {trace_folder(out, policy.policy)}", soft_wrap=True)
    console.print(f"result   {result.save(out)}", soft_wrap=True)
    if report:
        _report(console, out)


def _report(console: Console, out: Path) -> None:
    from ultraep.tools.demo.report import write_report

    try:
        console.print(f"report   {write_report(out)}", soft_wrap=True)
    except BackendUnavailable as missing:
        console.print(f"note: {missing}", soft_wrap=True)


def _table(result: DemoResult) -> Table:
    sizes = result.sizes
    title = (
        f"{sizes.ranks} rank{'s' * (sizes.ranks > 1)}, {result.steps} steps, "
        f"{result.parameters / 1e6:.1f} M parameters, {result.requests} requests"
    )
    grid = Grid(title=title, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left")
    grid.add_column("")
    for row in result.policies:
        grid.add_column(row.policy, justify="right")
    grid.add_column("forced balance", justify="right", style=render.FAINT)
    ceiling = {
        "MoE layers: tokens/s": f"{result.forced_tokens_per_second:,.0f}",
        "  share of forced balance": "100.0%",
    }
    for name, values in _rows(result.policies).items():
        grid.add_row(name, *values, ceiling.get(name, ""))
    return grid


def _rows(policies: list[PolicyResult]) -> dict[str, list[str]]:
    forms = {
        "training: loss, last tenth": "{loss:.4f}",
        "  loss on held-out text": "{loss_held_out:.4f}",
        "  tokens/s, whole step": "{tokens_per_second:,.0f}",
        "  imbalance before (worst)": "{imbalance_before:.3f} ({imbalance_before_worst:.2f})",
        "  imbalance after (worst)": "{imbalance_after:.3f} ({imbalance_after_worst:.2f})",
        "  copies per layer": "{copies_per_layer:.2f}",
        "  moved for copies": "{moved}",
        "MoE layers: tokens/s": "{layer_tokens_per_second:,.0f}",
        "  share of forced balance": "{layer_share:.1%}",
        "prefill: first token, median": "{first_token_median:.3f} s",
        "  first token, p90": "{first_token_p90:.3f} s",
    }
    found: dict[str, list[str]] = {}
    for name, form in forms.items():
        found[name] = [
            form.format(**vars(row), moved=decimal(row.weights_bytes + row.gradients_bytes))
            for row in policies
        ]
    return found


def _meaning(result: DemoResult) -> str:
    """One sentence about the first policy and the last."""
    first, last = result.policies[0], result.policies[-1]
    if result.sizes.ranks == 1 or first is last:
        return (
            f"The fullest rank had {last.imbalance_before:.2f} times the mean load before copies, "
            f"{last.imbalance_after:.3f} times with them; MoE layers reach {last.layer_share:.0%} "
            "of forced balance."
        )
    gain = last.layer_tokens_per_second / first.layer_tokens_per_second
    much = f"{gain:.2f} times as fast" if gain >= 1 else f"slower, {gain:.2f} times as fast"
    return (
        f"The router gave the fullest rank {last.imbalance_before:.2f} times the mean load; "
        f"{last.policy} brought that to {last.imbalance_after:.3f} with "
        f"{last.copies_per_layer:.1f} copies per layer, so that MoE layers ran {much} as with "
        f"{first.policy}, at {last.layer_share:.0%} of what even routing would reach, and the "
        f"losses agree {_closely(result.loss_difference_first)} over the first tenth of the steps, "
        f"{_closely(result.loss_difference_last)} at the end."
    )


def _closely(difference: float) -> str:
    return f"to {difference:.0e}" if difference else "to the last bit"
