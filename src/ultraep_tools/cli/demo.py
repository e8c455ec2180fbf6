"""`ultraep demo`: train, serve and measure a small MoE model, with and without balancing.

OUT/
|-- result.json                a `DemoResult`
|-- none/trace, ultraep/trace  the training under each policy, for `ultraep.read_trace`
|-- report.html
`-- .ultraep-demo              marker: lists these files, and is locked while a demo runs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ultraep.config import check_choice
from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.policies import running_policy
from ultraep_tools.cli import options as cli
from ultraep_tools.cli import render
from ultraep_tools.cli.options import option, switch
from ultraep_tools.cli.terminal import Grid, Terminal
from ultraep_tools.demo.result import DemoResult, Event, Note, Progress, trace_folder, write_report
from ultraep_tools.demo.sizes import Job, Machine, choose, this_machine
from ultraep_tools.launch.processes import RankPlace, run_ranks, stop_on_sigterm
from ultraep_tools.outputs import OutputDir
from ultraep_tools.report.page import REPORT_FILE, RESULT_FILE
from ultraep_tools.report.words import counted

EXAMPLE = (
    "Example: ultraep demo --quick\n\n"
    "Example: torchrun --nproc-per-node 8 -m ultraep demo --out demo"
)
DEVICES = ("cpu", "cuda")
LINES = 8  # per phase, without a terminal
HISTORY = 30  # steps in a sparkline
PHASES = {
    "training": "1 training",
    "prefill": "2 serving requests",
    "layers": "3 measuring layers",
}


class DemoOptions(cli.Options):
    quick: bool = switch("Run a smaller demo, 1 to 2 minutes.", "--quick")
    steps: int | None = option("Training steps.", "100 (--quick: 30), fewer on a slow machine")
    ranks: int | None = option("Processes in the expert-parallel group.", "by cores, 2 to 8")
    device: str = option("cpu, or cuda with one GPU per rank.", default="cpu", metavar="cpu|cuda")
    out: Path = option(
        "Output directory for result, traces and report.",
        default=Path("ultraep-demo"),
        metavar="DIR",
    )
    seed: int = option("Seed of weights, texts and requests.", default=0)
    policy: str = option(
        "Policies to compare; the first is the baseline. The report compares the "
        "offline baselines on the same loads.",
        default="none,ultraep",
        metavar="NAME,...",
    )
    no_report: bool = switch("Do not write report.html.", "--no-report")


@cli.with_options
def command(options: DemoOptions) -> None:
    """Train a small MoE model, serve requests with it, and measure its layers.

    The text is Python's own library, the ranks are processes on this machine, and every printed
    number is measured in this run. Under torchrun, the demo uses torchrun's ranks.
    """
    if options.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {options.seed}")
    place, policies = RankPlace.of_torchrun(), cli.split_names(options.policy, "--policy")
    if place is not None and options.ranks not in (None, place.size):
        raise ConfigError(
            f"--ranks is {options.ranks}, but torchrun started {place.size} ranks; remove --ranks"
        )
    sizes, notes = choose(
        _machine(options.device),
        quick=options.quick,
        ranks=place.size if place else options.ranks,
        steps=options.steps,
        device=options.device,
    )
    job = Job(sizes, policies, str(options.out), options.seed, options.device, tuple(notes))
    terminal = Terminal()
    terminal.quiet = place is not None and place.rank > 0
    with prepare(job, place) as output_dir:
        _introduce(terminal, job)
        try:
            with Display(terminal, policies) as display:
                result = run(job, display.show, place, output_dir)
        except KeyboardInterrupt:
            terminal.print(f"interrupted; the traces so far are in {options.out}")
            raise
        _conclude(terminal, result)
        if not terminal.quiet:
            _save(terminal, result, options)


def _machine(device: str) -> Machine:
    check_choice("--device", device, DEVICES)
    if device == "cpu":
        return this_machine()
    from ultraep_tools.launch.group import gpus

    return replace(this_machine(), gpus=gpus())


def prepare(job: Job, place: RankPlace | None = None) -> AbstractContextManager[OutputDir | None]:
    """Check the policies and claim the output directory; under torchrun, rank 0 claims it."""
    for name in job.policies:
        running_policy(name)
    if place is not None and place.rank:
        return nullcontext()
    traces = [str(trace_folder("", policy)) for policy in job.policies]
    return OutputDir(job.out, work="demo", files=(RESULT_FILE, REPORT_FILE), traces=traces)


def run(
    job: Job,
    report: Callable[[Event], None],
    place: RankPlace | None = None,
    output_dir: OutputDir | None = None,
) -> DemoResult:
    """Run the job on processes of this machine, or as one rank of torchrun.

    report: called with every event. On interruption all processes end; the traces stay readable.
    """
    if place is None:
        keep = [] if output_dir is None else [output_dir.lock]
        work = "ultraep_tools.demo.ranks:work"
        result: DemoResult = run_ranks(work, job, job.sizes.ranks, report, keep)
        return result
    from ultraep_tools.demo.ranks import work as work_as_rank  # imports torch

    stop_on_sigterm()
    return work_as_rank(place, job, report)


def _introduce(terminal: Terminal, job: Job) -> None:
    sizes = job.sizes
    unit = "a GPU" if job.device == "cuda" else "one thread"
    time = "depends on --steps"
    if sizes.seconds is not None:  # training takes about half of the time
        low, high = max(1, round(2 * sizes.seconds / 60)), math.ceil(4 * sizes.seconds / 60)
        time = f"about {low} to {high} minutes"
    terminal.print_facts(
        demo="train a small language model under every policy, serve requests with it, measure "
        "its MoE layers, write a report",
        ranks=f"{counted(sizes.ranks, 'rank')} with {unit} and "
        f"{counted(sizes.slots, 'spare slot')} each; {counted(this_machine().cores, 'core')} here",
        model=f"bytes as tokens, {sizes.layers} MoE layers of {sizes.experts} experts, "
        f"{sizes.top_k} per token, width {sizes.hidden}, {sizes.dtype}",
        text="Python's own library: code, then prose, then tables; "
        f"{sizes.tokens} tokens per rank and step, {sizes.steps} steps",
        policies=f"{', '.join(job.policies)}, in turns, with the same seeds and the same text",
        time=f"{time}, longer if other programs use the cores",
    )
    terminal.print_notes(*job.notes)
    terminal.print()


# -- progress ------------------------------------------------------------------------------------


class Display:
    """A live picture on a terminal, else a line from time to time."""

    def __init__(self, terminal: Terminal, policies: tuple[str, ...]) -> None:
        self.terminal = terminal
        self.past: dict[str, list[Progress]] = {name: [] for name in policies}
        self.live = Live(console=terminal, transient=True, auto_refresh=False)

    def __enter__(self) -> Display:
        if self.terminal.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def show(self, event: Event) -> None:
        if isinstance(event, Note):
            self.terminal.print_notes(event.text)
            return
        if event.policy:
            self.past[event.policy].append(event)
        if self.terminal.is_terminal:
            self.live.update(self.picture(event), refresh=True)
        elif event.done % -(-event.of // LINES) == 0 or event.done in (1, event.of):
            self.terminal.print(_line(event), soft_wrap=True)

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
        recent = {policy: past[-HISTORY:] for policy, past in self.past.items() if past}
        high = max([1.1, *(event.before or 1.0 for past in recent.values() for event in past)])
        glyphs = render.glyphs_for(self.terminal)
        for policy, past in recent.items():
            last = past[-1]
            phase = [event for event in past if event.phase == last.phase]
            before = render.sparkline([event.before for event in phase], high, glyphs)
            after = render.sparkline([event.after for event in phase], high, glyphs)
            grid.add_row(
                policy,
                "" if last.loss is None else f"{last.loss:.3f}",
                f"{last.tokens_per_second:,.0f}",
                f"{last.before:.3f} -> {last.after:.3f}",
                Text(before, render.OVERFULL),
                Text(after, render.CALM),
            )
        return Group(head, grid)


def _line(now: Progress) -> str:
    parts = [
        f"{PHASES[now.phase]:<21} {now.done:>4}/{now.of:<4} {now.policy:<8} {now.subject:<6}",
        "" if now.loss is None else f"loss {now.loss:.3f}",
        "" if now.tokens_per_second is None else f"{now.tokens_per_second:>7,.0f} tokens/s",
        "" if now.after is None else f"imbalance {now.before:.3f} -> {now.after:.3f}",
    ]
    return "  ".join(part for part in parts if part)


# -- result --------------------------------------------------------------------------------------


def _conclude(terminal: Terminal, result: DemoResult) -> None:
    last = result.policies[-1]
    title = (
        f"{counted(result.sizes.ranks, 'rank')}, {result.steps} steps, "
        f"{result.parameters / 1e6:.1f} M parameters, {result.requests} requests"
    )
    terminal.print()
    terminal.print_table(*result.table(), title)
    terminal.print(f"\n{result.headline}.", style="bold", soft_wrap=True)
    terminal.print(
        f"Imbalance {last.imbalance_before:.2f} -> {last.imbalance_after:.3f}, "
        f"{last.layer_share:.0%} of the speed of forced balance; losses differ by at most "
        f"{result.loss_difference:.0e}. Measured in {result.wall_seconds:.0f} s.\n"
    )


def _save(terminal: Terminal, result: DemoResult, options: DemoOptions) -> None:
    """Save after printing, so that a full disk loses no output."""
    for row in result.policies:
        terminal.print_facts(trace=trace_folder(options.out, row.policy))
    terminal.print_facts(result=result.save(options.out))
    if not options.no_report:
        try:
            terminal.print_facts(report=write_report(options.out, result))
        except BackendUnavailable as missing:
            terminal.print_notes(str(missing))
