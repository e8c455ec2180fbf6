"""`ultraep trace info | replay | place | export | crash`: summaries, plans, homes, crashes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import typer
from rich.padding import Padding
from rich.text import Text

from ultraep.config import NOMINAL_SPEED, Rates
from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import write_text
from ultraep.policies import get_policy
from ultraep.trace.flight import default_folder
from ultraep.trace.read import Trace, read_trace
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option, split_numbers
from ultraep_tools.cli.terminal import Grid, Terminal, describe_topology, make_grid, plain, progress
from ultraep_tools.crash import MOST_CRASHES, crash_folders, read_crash
from ultraep_tools.outputs import check_targets
from ultraep_tools.placement import place_trace, verdict
from ultraep_tools.replay import Replayed, cases, differing, replayed
from ultraep_tools.report.words import counted

DIFFERS = 1  # exit code of a replay that differs from the recorded plans
MB = 1e6
LAYER_HEADERS = (
    *("policy", "layer", "records", "before\nmean", "before\nworst", "after\nmean"),
    *("after\nworst", "replicas\nmean", "MB moved\nmean"),
)
REPLAY_HEADERS = (
    *("policy", "EP", "slots", "history", "before\nmean", "after\nmean", "after\nworst"),
    *("bound\nmean", "replicas\nmean", "remote\nmean"),
)
PLACE_HEADERS = ("layer", "busiest domain\nas recorded", "busiest domain\nplaced", "order")

app = typer.Typer(
    no_args_is_help=True,
    help="Summarise, replan or convert a trace of a run; explain a crash or a hang.",
    epilog="Record with ULTRAEP_TRACE=FOLDER or Balancer(..., record=FOLDER), then: "
    "ultraep trace info FOLDER",
)


class TraceOptions(cli.Options):
    """A trace."""

    path: Path = cli.argument(
        "Folder of a trace (for a demo: ultraep-demo/ultraep/trace), or a file written by "
        "`ultraep trace export --npz`.",
        "PATH",
    )


# -- info ----------------------------------------------------------------------------------------


@app.command("info", epilog="Example: ultraep trace info run/")
@cli.with_options
def info(options: TraceOptions) -> None:
    """Summarise a trace: imbalance before and after, replicas, bytes, time, missing records."""
    trace = read_trace(options.path)
    terminal, by_policy = Terminal(), trace.by_policy()
    terminal.print(Text(_headline(by_policy)))
    _print_heading(terminal, options.path, trace)
    if by_policy:
        terminal.print(_layers(by_policy))
        together = {"all": trace} if len(by_policy) > 1 else {}
        terminal.print(_stages(by_policy | together, trace.header.stages))
    _print_missing(terminal, trace)


def _headline(by_policy: dict[str, Trace]) -> str:
    """Return what the policy of the run achieved."""
    if not by_policy:
        return "no records"
    policy, own = next(iter(by_policy.items()))
    before, after = own.imbalance_before.mean(), own.imbalance_after.mean()
    if policy == "none":
        return f"imbalance {before:.2f}, not balanced: policy none"
    if own.left_alone.any() and not own.num_copies.any():
        return f"imbalance {before:.2f}, 0 replicas: none would have saved time"
    return f"imbalance {before:.2f} -> {after:.2f} (busiest rank over mean rank)"


def _print_heading(terminal: Terminal, path: Path, trace: Trace) -> None:
    """Print what was recorded: sizes, settings, rates and speeds."""
    header = trace.header
    sizes = ", ".join([counted(len(trace), "record"), *describe_topology(trace.topology)])
    terminal.print(Text(f"{path}: {sizes}"))
    lines = [f"policy {header.policy}, tolerance {header.tolerance:g}, recorded {header.created}"]
    if len(trace):
        steps, rows = trace.steps, trace.rank_loads.sum(axis=1).mean()
        lines.append(
            f"{counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}; "
            f"{rows:,.0f} routed rows per record"
        )
    for line in (*lines, *_costs(trace), header.note):
        if line:
            terminal.print(Text(line))
    terminal.print()


def _costs(trace: Trace) -> Iterator[str]:
    """Yield the rates and speeds of the plans."""
    rates = trace.rates[trace.rates.any(axis=1)]
    if len(rates):
        median = Rates.from_numbers(np.median(rates, axis=0).astype(int).tolist()).microseconds
        shown = [f"{name} {value:.3g}" for name, value in median.items()]
        yield f"median rates in microseconds: {', '.join(shown)}"
    if alone := int(trace.left_alone.sum()):
        yield f"{counted(alone, 'record')} without replicas: none would have saved time"
    speeds = trace.speeds[trace.speeds.any(axis=1)]
    if len(speeds):
        lowest, rank = speeds.min() / NOMINAL_SPEED, speeds.min(axis=0).argmin()
        yield (
            f"{counted(len(speeds), 'record')} planned by speeds, imbalances compare rows over "
            f"speed; the lowest speed is {lowest:.1%}, of rank {rank}"
        )


def _layers(by_policy: dict[str, Trace]) -> Grid:
    rows = []
    for policy, own in by_policy.items():
        parts = {str(layer): own.of_layer(layer) for layer in own.layers.tolist()}
        if len(parts) > 1:
            parts["all"] = own
        for layer, part in parts.items():
            before, after = part.imbalance_before, part.imbalance_after
            ratios = (before.mean(), before.max(), after.mean(), after.max())
            moved = part.bytes_moved.sum(axis=1).mean() / MB
            rows.append(
                [
                    *(policy, layer, f"{len(part):,}", *(f"{ratio:.3f}" for ratio in ratios)),
                    *(f"{part.num_copies.mean():.1f}", f"{moved:.2f}"),
                ]
            )
    return make_grid(LAYER_HEADERS, rows)


def _stages(by_policy: dict[str, Trace], stages: Sequence[str]) -> Grid | str:
    """Return the mean time of every stage; the viewer shows the mean of all records."""
    means = [own.stage_means for own in by_policy.values()]
    rows = [
        [stage, *(f"{1e3 * own.get(stage, 0):,.2f}" for own in means)]
        for stage in stages
        if any(stage in own for own in means)
    ]
    heading = "\nmilliseconds per record, on the rank with the largest mean"
    return make_grid(("stage", *by_policy), rows, heading) if rows else "no stage times recorded"


def _print_missing(terminal: Terminal, trace: Trace) -> None:
    """Print what the trace lacks."""
    if trace.dropped:
        terminal.print_faint(
            f"{trace.dropped:,} records or additions were dropped: the disk was too slow for them"
        )
    if trace.left_out:
        missing = counted(trace.left_out, "record")
        terminal.print_faint(f"{missing} left out: not recorded by all ranks")
    if not len(trace):
        terminal.print_faint("no step was recorded by all ranks")


# -- replay --------------------------------------------------------------------------------------


class ReplayOptions(TraceOptions):
    """Options of the command; None means as recorded."""

    policy: str = cli.policy_option("none,quota,ultraep")
    slots: str | None = option("Spare slots per rank.", "as recorded", metavar="N,...")
    ep: str | None = option(
        "Ranks in the group, a divisor or multiple of the recorded number.",
        "as recorded",
        metavar="N,...",
    )
    history: str = option(
        "Past microbatches of a layer that eplb and lplb plan from.",
        default="1",
        metavar="N,...",
    )
    as_json: bool = cli.json_option()


@app.command(
    "replay", epilog="Example: ultraep trace replay run/ --policy none,eplb,ultraep --slots 1,2"
)
@cli.with_options
def replay(options: ReplayOptions) -> None:
    """Plan a trace again under other policies, slots, group sizes and histories.

    First plans every record as it was recorded. The plans must be equal bit for bit; if they are
    not, the exit code is 1.
    """
    trace = read_trace(options.path)
    names = cli.split_names(options.policy, "--policy")
    planned = cases(
        trace,
        policies=[get_policy(name).name for name in names],
        slots=split_numbers(options.slots or str(trace.header.slots), "--slots"),
        ranks=split_numbers(options.ep or str(trace.header.ranks), "--ep"),
        history=split_numbers(options.history, "--history"),
    )
    if not len(trace):
        raise ConfigError(f"{options.path}: nothing to replay, the trace has no records")
    lines = []
    with progress("planning", lines=False) as report:
        changed = differing(trace)
        for number, case in enumerate(planned, 1):
            lines.append(replayed(trace, case))
            report(number, len(planned), case.config.policy)
    if options.as_json:
        print(json.dumps({"differing": changed, "replayed": [line.to_json() for line in lines]}))
    else:
        terminal = Terminal()
        _print_heading(terminal, options.path, trace)
        terminal.print(_verdict(trace, changed))
        terminal.print()
        terminal.print(_table(lines))
        if any(line.beyond.any() for line in lines):
            terminal.print_faint(
                "* some plans exceed the spare slots or leave a domain, so they cannot run"
            )
        if any(line.case.topology.ranks > trace.header.ranks for line in lines):
            terminal.print_faint(
                "more ranks than recorded: each rank's rows are divided among the new ranks"
            )
    if changed:
        raise typer.Exit(DIFFERS)


def _verdict(trace: Trace, changed: list[int]) -> Text:
    if not changed:
        return Text(f"Replay as recorded: all {counted(len(trace), 'plan')} are equal.")
    first = changed[0]
    return Text(
        f"Replay as recorded: {len(changed)} of {counted(len(trace), 'plan')} differ, the first "
        f"in step {trace.step[first]}, layer {trace.layer[first]}; was it recorded by another "
        "version?",
        "bold red",
    )


def _table(lines: Sequence[Replayed]) -> Grid:
    rows = []
    for line in lines:
        case, means = line.case, line.means()
        rows.append(
            [
                case.config.policy + ("*" if means["beyond"] else ""),
                *(str(case.topology.ranks), str(case.topology.slots), str(case.history or "-")),
                *(f"{means[name]:.3f}" for name in ("before", "after", "worst", "bound")),
                *(f"{means['copies']:.1f}", f"{means['remote']:.1%}"),
            ]
        )
    return make_grid(REPLAY_HEADERS, rows)


# -- place ---------------------------------------------------------------------------------------


class PlaceOptions(TraceOptions):
    """Options of the command; None means as recorded."""

    domain: int | None = option(
        "Consecutive ranks that a fast link joins; replicas stay inside.", "as recorded"
    )
    out: Path | None = option("Write the order of experts of every layer as JSON.", metavar="FILE")
    force: bool = cli.force_option()


@app.command("place", epilog="Example: ultraep trace place run/ --domain 8 --out homes.json")
@cli.with_options
def place(options: PlaceOptions) -> None:
    """Place experts by their history, so that fast-link domains have equal loads.

    The forecast places experts by the first half of the records and shows the busiest domain of
    the second half, over the mean domain. A layer keeps its order unless its forecast is better.
    The file is made from all records. Its lists name the experts in their new order; apply them
    with ultraep.reorder_experts when you load a checkpoint. With one domain there is nothing to
    place: the command says so, writes nothing, and the exit code is 2.
    """
    check_targets(options.out, force=options.force)
    trace = read_trace(options.path)
    domain = trace.topology.domain_size if options.domain is None else options.domain
    layers = place_trace(trace, domain)
    terminal = Terminal()
    terminal.print(Text(f"{verdict(layers.values())}\n"))
    rows = [
        [str(layer), f"{own.recorded:.3f}", f"{own.placed:.3f}", "new" if own.better else "kept"]
        for layer, own in layers.items()
    ]
    terminal.print(make_grid(PLACE_HEADERS, rows))
    if options.out is not None:
        orders = {layer: own.order.tolist() for layer, own in layers.items()}
        content = {"ranks": trace.header.ranks, "domain": domain, "orders": orders}
        write_text(options.out, json.dumps(content) + "\n")
        _print_written(options.out, counted(len(rows), "layer"))


# -- export --------------------------------------------------------------------------------------


class ExportOptions(TraceOptions):
    npz: Path | None = option("Write the whole trace into one file.", metavar="FILE")
    force: bool = cli.force_option()


@app.command("export", epilog="Example: ultraep trace export run/ --npz run.npz")
@cli.with_options
def export(options: ExportOptions) -> None:
    """Write a trace into one file to share."""
    npz = options.npz
    if npz is None or npz.suffix.lower() != ".npz":
        raise ConfigError(f"--npz needs a name that ends in .npz, got {npz}")
    check_targets(npz, force=options.force)
    trace = read_trace(options.path)
    trace.save(npz)
    _print_written(npz, counted(len(trace), "record"))


def _print_written(path: Path, content: str) -> None:
    print(f"{plain(str(path))}: {content}")


# -- crash ---------------------------------------------------------------------------------------


class CrashOptions(cli.Options):
    folder: Path | None = cli.argument(
        "Folder with the flight files of one crash or of several. Default: the folder in "
        "ULTRAEP_FLIGHT, otherwise the one in the temporary directory.",
        "[FOLDER]",
        default=None,
    )


@app.command("crash", epilog="Example: ultraep trace crash flight/")
@cli.with_options
def crash(options: CrashOptions) -> None:
    """Explain a crash or a hang: which ranks wait where and for whom, which ranks are missing.

    Ranks write flight files when an error ends them or another rank. The newest crash comes first.
    """
    folder = options.folder or default_folder()
    folders = crash_folders(folder)
    if not folders:
        raise FileError(f"{folder}: no flight files (rank-00000.json, ...) here or one level below")
    crashes = [read_crash(each) for each in folders[:MOST_CRASHES]]
    terminal = Terminal()
    for each in crashes:
        terminal.print(Text(each.heading()))
        for line in each.explain().splitlines():
            indent = 2 + len(line) - len(line.lstrip())
            terminal.print(Padding(Text(line.lstrip()), (0, 0, 0, indent)))
        terminal.print()
    if len(folders) > MOST_CRASHES:
        terminal.print_faint(f"{len(folders) - MOST_CRASHES} older crashes: name their folder")
