"""`ultraep trace info | replay | export`: what a run recorded, and what else it could have been."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text
from typer import Argument, Option

from ultraep.config import Rates
from ultraep.errors import ConfigError
from ultraep.files.writing import check_targets, is_stream
from ultraep.policies import get_policy
from ultraep.tools.cli import render
from ultraep.tools.cli.lists import names_in, numbers_in
from ultraep.tools.cli.options import Force
from ultraep.tools.cli.progress import track_planning
from ultraep.tools.cli.terminal import (
    Grid,
    count,
    describe_topology,
    make_console,
    make_grid,
    plain,
)
from ultraep.trace.export import timeline_of, write_csv, write_timeline
from ultraep.trace.read import Trace, read_trace
from ultraep.trace.replay import Line, cases, differing
from ultraep.trace.replay import replay as replay_case

DIFFERS = 1  # exit code of a replay that finds other plans than those recorded
MB = 1e6

app = typer.Typer(
    no_args_is_help=True,
    help="Look into a trace of a run, plan it again, hand it to other programs.",
    epilog="Record with ULTRAEP_TRACE=FOLDER or Balancer(..., record=FOLDER), then: "
    "ultraep trace info FOLDER",
)

Source = Annotated[
    Path,
    Argument(
        metavar="PATH", help="Folder of a trace, or a file that `ultraep trace export --npz` wrote."
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print only JSON.")]


# -- info ----------------------------------------------------------------------------------------


@app.command("info", epilog="Example: ultraep trace info run/")
def info(path: Source, as_json: AsJson = False) -> None:
    """Print what is in a trace: loads before and after, copies, bytes, seconds, what is missing."""
    trace = read_trace(path)
    if as_json:
        print(json.dumps(_facts(trace), indent=2))
        return
    console = make_console()
    console.print(_heading(str(path), trace))
    if len(trace):
        console.print(_layers(trace))
        console.print(_stages(trace))
    for note in _notes(trace):
        console.print(Text(note, render.FAINT))


def _heading(name: str, trace: Trace) -> Text:
    header = trace.header
    sizes = [count(len(trace), "record"), *describe_topology(trace.topology)]
    lines = [f"{name}: {', '.join(sizes)}"]
    policies = " and ".join(np.unique(trace.policy).tolist()) or header.policy
    lines.append(f"policy {policies}, tolerance {header.tolerance:g}, recorded {header.created}")
    lines += _decisions(trace)
    if len(trace):
        steps, tokens = trace.steps, trace.rank_loads.sum(axis=1).mean()
        lines.append(
            f"{count(len(steps), 'step')}, {steps[0]} to {steps[-1]}; "
            f"{tokens:,.0f} routed tokens per microbatch"
        )
    if header.note:
        lines.append(header.note)
    return Text("\n".join(lines) + "\n")


def _decisions(trace: Trace) -> list[str]:
    """By which rates plans were made, and how many of them copy nothing for that."""
    if trace.header.objective != "time":
        return []
    named: dict[tuple[int, ...], list[int]] = {}
    for layer in trace.layers.tolist():
        for numbers in np.unique(trace.of_layer(layer).rates, axis=0).tolist():
            named.setdefault(tuple(numbers), []).append(layer)
    lines = []
    for numbers, layers in named.items():
        rates = "no rates, planned for balance"
        if any(numbers):
            rates = f"{Rates.from_numbers(numbers)} picoseconds"
        lines.append(f"objective time, layers {', '.join(map(str, layers))}: {rates}")
    alone = int(trace.left_alone.sum())
    return [*lines, f"{count(alone, 'record')} left alone: no copies would pay"] if lines else []


def _layers(trace: Trace) -> Grid:
    grid = make_grid(
        *("layer", "records", "before\nmean", "before\nworst", "after\nmean", "after\nworst"),
        *("copies\nmean", "MB moved\nmean"),
        padding=(0, 1, 0, 0),
    )
    named = [(str(layer), trace.of_layer(layer)) for layer in trace.layers.tolist()]
    for name, part in [*named, ("all", trace)] if len(named) > 1 else named:
        before, after = part.imbalance_before, part.imbalance_after
        values = (before.mean(), before.max(), after.mean(), after.max())
        grid.add_row(
            *(name, f"{len(part):,}", *(f"{value:.3f}" for value in values)),
            *(f"{part.num_copies.mean():.1f}", f"{part.bytes_moved.sum(axis=1).mean() / MB:.2f}"),
        )
    return grid


def _stages(trace: Trace) -> Text:
    """Seconds of the slowest rank, mean over records."""
    slowest = 1e3 * trace.seconds.max(axis=1).mean(axis=0)
    shown = [
        f"{stage} {value:.3f}"
        for stage, value in zip(trace.header.stages, slowest.tolist(), strict=True)
        if value > 0
    ]
    known = ", ".join(shown) or "none were recorded"
    return Text(f"\nms of the slowest rank, mean: {known}")


def _notes(trace: Trace, lines: Sequence[Line] = ()) -> Iterator[str]:
    """What to know of a replay, and what is missing in the trace."""
    if any(line.beyond for line in lines):
        yield "* plans beyond the spare slots or domains, to compare with and not to run"
    if any(line.case.topology.ranks > trace.header.ranks for line in lines):
        yield "more ranks than recorded: the tokens of a rank are dealt out in turn"
    if trace.dropped:
        yield (
            f"{trace.dropped:,} records or additions were dropped: they came faster than they "
            "could be written"
        )
    if trace.left_out:
        yield f"{count(trace.left_out, 'record')} left out: not all ranks have them"
    if not len(trace):
        yield "nothing was recorded, or nothing that all ranks have"


def _facts(trace: Trace) -> dict[str, Any]:
    """All that `info` shows, as JSON has it."""
    empty = not len(trace)
    return {
        "header": asdict(trace.header),
        "records": len(trace),
        "steps": len(trace.steps),
        "layers": trace.layers.tolist(),
        "imbalance_before": None if empty else float(trace.imbalance_before.mean()),
        "imbalance_after": None if empty else float(trace.imbalance_after.mean()),
        "copies": None if empty else float(trace.num_copies.mean()),
        "bytes_moved": int(trace.bytes_moved.sum()),
        "dropped": trace.dropped,
        "left_out": trace.left_out,
    }


# -- replay --------------------------------------------------------------------------------------

Policies = Annotated[
    str, Option(metavar="NAME,...", help="Policies to plan with; `ultraep env` lists them.")
]
SlotCounts = Annotated[
    str | None,
    Option(metavar="N,...", help="Spare slots per rank.", show_default="as recorded"),
]
Sizes = Annotated[
    str | None,
    Option(
        "--ep",
        metavar="N,...",
        help="Ranks of the group, a divisor or multiple of the recorded number: neighbouring ranks "
        "are merged, or their tokens dealt out.",
        show_default="as recorded",
    ),
]
Windows = Annotated[
    str, Option(metavar="N,...", help="Past microbatches of a layer for eplb, lplb and flashlb.")
]
Tolerance = Annotated[
    float | None,
    Option(help="How far above the mean the fullest rank may stay.", show_default="as recorded"),
]


@app.command(
    "replay", epilog="Example: ultraep trace replay run/ --policy none,eplb,ultraep --slots 1,2"
)
def replay(
    path: Source,
    policy: Policies = "none,quota,ultraep",
    slots: SlotCounts = None,
    ep: Sizes = None,
    history: Windows = "1",
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """Plan a trace again, under any policies, slots, group sizes and memories of the past.

    First it is planned as it was recorded: the plans must be the same ones, bit for bit. Exit code
    1 says that they are not.
    """
    trace = read_trace(path)
    wanted = cases(
        trace,
        policies=[get_policy(name).name for name in names_in(policy, "--policy")],
        slots=[trace.header.slots] if slots is None else numbers_in(slots, "--slots"),
        ranks=[trace.header.ranks] if ep is None else numbers_in(ep, "--ep"),
        history=numbers_in(history, "--history"),
        tolerance=tolerance,
    )
    if not len(trace):
        raise ConfigError(f"{path}: nothing to replay, the trace has no records")
    stderr = make_console(stderr=True)
    with stderr.status("planning as it was recorded ..."):
        wrong = differing(trace)
    shown = track_planning(wanted, len(wanted) * len(trace))
    lines = [replay_case(trace, case) for case in shown]
    if as_json:
        print(json.dumps({"differing": wrong, "replayed": [_record(line) for line in lines]}))
    else:
        _report(str(path), trace, wrong, lines)
    if wrong:
        raise typer.Exit(DIFFERS)


def _report(name: str, trace: Trace, wrong: list[int], lines: Sequence[Line]) -> None:
    console = make_console()
    console.print(_heading(name, trace))
    console.print(_verdict(trace, wrong))
    console.print()
    console.print(_lines(lines))
    for note in _notes(trace, lines):
        console.print(Text(note, render.FAINT))


def _verdict(trace: Trace, wrong: list[int]) -> Text:
    if not wrong:
        plans = count(len(trace), "recorded plan")
        return Text(f"Planned again as recorded: exactly the {plans}.")
    first = wrong[0]
    past = any(get_policy(str(name)).needs_history for name in np.unique(trace.policy))
    why = "was it recorded by another version?"
    if past and (trace.dropped or trace.left_out):
        why = "the policy places by the past, and records of it are missing."
    return Text(
        f"Planned again as recorded: {len(wrong)} of {count(len(trace), 'plan')} differ, the first "
        f"in step {trace.step[first]}, layer {trace.layer[first]}; {why}",
        render.OVERFULL,
    )


def _lines(lines: Sequence[Line]) -> Grid:
    grid = make_grid(
        *("policy", "EP", "slots", "history", "before\nmean", "after\nmean", "after\nworst"),
        *("bound\nmean", "copies\nmean", "remote\nmean"),
        padding=(0, 1, 0, 0),
    )
    for line in lines:
        case = line.case
        grid.add_row(
            case.config.policy + ("*" if line.beyond else ""),
            *(str(case.topology.ranks), str(case.topology.slots), str(case.history or "-")),
            *(f"{value:.3f}" for value in (line.before, line.after, line.worst, line.bound)),
            *(f"{line.copies:.1f}", f"{line.remote:.1%}"),
        )
    return grid


def _record(line: Line) -> dict[str, Any]:
    return line.case.settings() | {
        "imbalance_before": line.before,
        "imbalance_after": line.after,
        "imbalance_worst": line.worst,
        "lower_bound": line.bound,
        "copies": line.copies,
        "remote_share": line.remote,
        "beyond_limits": line.beyond,
    }


# -- export --------------------------------------------------------------------------------------

Csv = Annotated[Path | None, Option("--csv", metavar="FILE", help="A table, one line per record.")]
Perfetto = Annotated[
    Path | None,
    Option(
        "--perfetto", metavar="FILE", help="A timeline for ui.perfetto.dev or chrome://tracing."
    ),
]
Npz = Annotated[
    Path | None, Option("--npz", metavar="FILE", help="All of it in one file, to share.")
]


@app.command("export", epilog="Example: ultraep trace export run/ --csv run.csv --npz run.npz")
def export(
    path: Source,
    to_csv: Csv = None,
    to_perfetto: Perfetto = None,
    to_npz: Npz = None,
    force: Force = False,
) -> None:
    """Write a trace for other programs."""
    if to_npz is not None and to_npz.suffix.lower() != ".npz":
        raise ConfigError(f"--npz needs a name that ends in .npz, got {to_npz}")
    writers = (
        (to_csv, write_csv),
        (to_perfetto, lambda trace, path: write_timeline(path, timeline_of(trace))),
        (to_npz, Trace.save),
    )
    wanted = [(target, write) for target, write in writers if target is not None]
    if not wanted:
        raise ConfigError("name what to write: --csv, --perfetto or --npz")
    check_targets((to_csv, "table"), (to_perfetto, "timeline"), (to_npz, "trace"), force=force)
    trace = read_trace(path)
    for target, write in wanted:
        write(trace, target)
        if not is_stream(target):
            print(f"{plain(str(target))}: {count(len(trace), 'record')}")
