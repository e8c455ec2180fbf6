"""`ultraep demo`: train, serve and measure a small MoE model, with and without balancing.

OUT/
|-- result.json                a `DemoResult`
|-- none/trace, ultraep/trace  the training under each policy, for `ultraep.read_trace`
|-- report.html
`-- .ultraep-demo              marker: lists these files, and is locked while a demo runs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.policies import get_policy, policy_names
from ultraep.tools.cli import options as cli
from ultraep.tools.cli.options import option, switch
from ultraep.tools.cli.terminal import Terminal, progress
from ultraep.tools.demo.result import (
    REPORT_FILE,
    RESULT_FILE,
    TRACE,
    DemoResult,
    Event,
    Note,
    Progress,
    trace_folder,
    write_report,
)
from ultraep.tools.demo.sizes import Job, Machine, choose, this_machine
from ultraep.tools.launch.processes import RankPlace, run_ranks, stop_on_sigterm
from ultraep.tools.outputs import OutputDir
from ultraep.tools.report.words import counted

EXAMPLE = (
    "Example: ultraep demo --quick\n\n"
    "Example: torchrun --nproc-per-node 8 -m ultraep demo --out demo"
)
DEVICES = ("cpu", "cuda")
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
        "Policies to compare; the first is the baseline. They must fit the spare slots, which eplb "
        "and lplb do not.",
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
            with _events(terminal) as show:
                result = run(job, show, place, output_dir)
        except KeyboardInterrupt:
            terminal.print(f"interrupted; the traces so far are in {options.out}")
            raise
        _conclude(terminal, result)
        if not terminal.quiet:
            _save(terminal, result, options)


def _machine(device: str) -> Machine:
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    if device == "cpu":
        return this_machine()
    from ultraep.tools.launch.group import gpus

    return replace(this_machine(), gpus=gpus())


def prepare(job: Job, place: RankPlace | None = None) -> AbstractContextManager[OutputDir | None]:
    """Check the policies and claim the output directory; under torchrun, rank 0 claims it."""
    for name in job.policies:
        if not get_policy(name).within_limits:
            runnable = [other for other in policy_names() if get_policy(other).within_limits]
            raise ConfigError(
                f"policy {name!r} exceeds the spare slots or moves experts, so it cannot run; use "
                f"{', '.join(runnable)} (the report compares other policies on the same loads)"
            )
    if place is not None and place.rank:
        return nullcontext()
    traces = [f"{policy}/{TRACE}" for policy in job.policies]
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
        work = "ultraep.tools.demo.ranks:work"
        result: DemoResult = run_ranks(work, job, job.sizes.ranks, report, keep)
        return result
    from ultraep.tools.demo.ranks import work as work_as_rank  # imports torch

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


@contextmanager
def _events(terminal: Terminal) -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows an event of rank 0."""
    with progress("demo", terminal=terminal) as report:

        def show(event: Event) -> None:
            if isinstance(event, Note):
                terminal.print_notes(event.text)
            else:
                report(event.done, event.of, _describe(event))

        yield show


def _describe(now: Progress) -> str:
    parts = [
        f"{PHASES[now.phase]:<18} {now.policy:<8} {now.subject:<6}",
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
