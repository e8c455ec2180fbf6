"""`ultraep demo`: train, serve and measure a small MoE model, with and without balancing.

OUT/
|-- result.json                a `DemoResult`
|-- none/trace, ultraep/trace  the training under each policy, for `ultraep.read_trace`
|-- report.html                the viewer with these traces, in one file
`-- .ultraep-demo              marker: the next demo replaces these files
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.policies import running_policy
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option, switch
from ultraep_tools.cli.terminal import Terminal, progress
from ultraep_tools.demo.result import DemoResult, Progress, trace_folder
from ultraep_tools.demo.sizes import Job, choose, cores_here
from ultraep_tools.launch.processes import run_ranks
from ultraep_tools.outputs import prepare_folder
from ultraep_tools.report.page import REPORT_FILE, RESULT_FILE, require_plotly
from ultraep_tools.report.words import counted
from ultraep_tools.view.api import write_page
from ultraep_tools.view.catalogue import Catalogue

EXAMPLE = "Example: ultraep demo --quick"


class DemoOptions(cli.Options):
    quick: bool = switch("Run a smaller demo, several times as fast.", "--quick")
    steps: int | None = option("Training steps.", "36 (--quick: 21)")
    ranks: int | None = option("Processes in the expert-parallel group.", "by cores, 2 to 4")
    out: Path = option(
        "Output directory for result, traces and report.",
        default=Path("ultraep-demo"),
        metavar="DIR",
    )
    seed: int = option("Seed of weights, texts and requests.", default=0)
    policy: str = option(
        "Policies to compare; the first is the baseline.",
        default="none,ultraep",
        metavar="NAME,...",
    )
    no_report: bool = switch("Do not write report.html.", "--no-report")


@cli.with_options
def command(options: DemoOptions) -> None:
    """Train a small MoE model, serve requests with it, and measure its layers.

    The text is Python's own library, the ranks are processes on this machine, and every printed
    number is measured in this run.
    """
    if options.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {options.seed}")
    policies = cli.split_names(options.policy, "--policy")
    sizes, notes = choose(
        cores_here(), quick=options.quick, ranks=options.ranks, steps=options.steps
    )
    job = Job(sizes, policies, str(options.out), options.seed, tuple(notes))
    terminal = Terminal()
    prepare(job)
    _introduce(terminal, job)
    has_report = not options.no_report and _can_report(terminal)
    terminal.print(
        f"\nStarting {sizes.ranks} processes, which load torch and compile the planner: some "
        "seconds, half a minute on a new machine.",
        soft_wrap=True,
    )
    try:
        with progress("running") as bar:
            result = run(job, lambda at: bar(at.done, at.of, at.text))
    except KeyboardInterrupt:
        terminal.print(f"interrupted; the traces so far are in {options.out}")
        raise
    _conclude(terminal, result)
    _save(terminal, result, options.out, has_report=has_report)


def prepare(job: Job) -> None:
    """Check the policies, and remove the outputs of an earlier demo."""
    for name in job.policies:
        running_policy(name)
    traces = [str(trace_folder("", policy)) for policy in job.policies]
    prepare_folder(Path(job.out), "demo", (RESULT_FILE, REPORT_FILE, *traces))


def run(job: Job, report: Callable[[Progress], None]) -> DemoResult:
    """Run the job on processes of this machine; report its progress.

    On interruption all processes end; the traces stay readable.
    """
    result: DemoResult = run_ranks("ultraep_tools.demo.ranks:work", job, job.sizes.ranks, report)
    return result


def _introduce(terminal: Terminal, job: Job) -> None:
    sizes = job.sizes
    terminal.print_facts(
        demo="train a small language model under every policy, serve requests with it, measure "
        "its MoE layers",
        ranks=f"{counted(sizes.ranks, 'rank')} with one thread and "
        f"{counted(sizes.slots, 'spare slot')} each; {counted(cores_here(), 'core')} here",
        model=f"bytes as tokens, {sizes.layers} MoE layers of {sizes.experts} experts, "
        f"{sizes.top_k} per token, width {sizes.hidden}, {sizes.dtype}",
        text="Python's own library: code, then prose, then tables; "
        f"{sizes.tokens} tokens per rank and step, {sizes.steps} steps",
        policies=f"{', '.join(job.policies)}, in turns, with the same seeds and the same text",
    )
    terminal.print_notes(*job.notes)


def _can_report(terminal: Terminal) -> bool:
    """Say at the start, not after minutes, that the report cannot be written."""
    try:
        require_plotly()
    except BackendUnavailable as missing:
        terminal.print_notes(f"there will be no report.html: {missing}")
        return False
    return True


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
        f"{result.loss_difference:.0e}. Measured in {result.wall_seconds:.0f} s.\n",
    )


def _save(terminal: Terminal, result: DemoResult, out: Path, *, has_report: bool) -> None:
    """Save after printing, so that a full disk loses no output."""
    for row in result.policies:
        terminal.print_facts(trace=trace_folder(out, row.policy))
    terminal.print_facts(result=result.save(out))
    if has_report:
        traces = [trace_folder(out, row.policy) for row in result.policies]
        write_page(Catalogue(traces), out / REPORT_FILE)
        terminal.print_facts(report=out / REPORT_FILE)
