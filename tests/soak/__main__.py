"""Train small models with injected faults, and report how every run ends.

make soak                                            # 100 faults, some minutes
make soak OPTIONS='--seed 7 --minutes 120'
make soak OPTIONS='--seed 7 --only 17 --logs failed' # repeat a fault
"""

import argparse
import json
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from soak.outcomes import ALLOWED_GROWTH, FAILURES, OUTCOMES, STOPPED, SURVIVED, Row, growth
from soak.run import Campaign, Run, obstacles
from soak.schedule import KINDS, PLANES, draw_fault, draw_faults

from ultraep_tools.report.words import counted

FAULTS = 100
EXITS = """\
Exit codes: 0 all runs passed; 1 a run failed: an error that does not name rank and stage, a hang,
a wrong number or a leak; 2 wrong option; 130 interrupted.
"""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m soak",
        description=__doc__,
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=natural, default=0, help="seed of all faults, models, sizes (default 0)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--faults", type=natural, help=f"number of faults (default {FAULTS})")
    length.add_argument("--minutes", type=float, help="start runs for this time")
    add("--only", type=natural, nargs="+", metavar="N", help="repeat the faults of these numbers")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND",
        help=f"kinds of faults (default all: {', '.join(KINDS)})")  # fmt: skip
    add("--planes", nargs="+", choices=PLANES, metavar="PLANE",
        help=f"data planes (default all that are possible here: {', '.join(PLANES)})")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default cpu)")
    add("--json", type=Path, metavar="FILE", help="write one record per fault")
    add("--logs", type=Path, metavar="DIR", help="keep logs and flight files of failed runs")
    options = parser.parse_args(words)
    check(parser, options)
    return options


def natural(text: str) -> int:
    if int(text) < 0:
        raise ValueError
    return int(text)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what cannot run here; fill in the data planes."""
    if sys.platform != "linux":
        parser.error("needs Linux: it forks ranks and reads /proc")
    left_out = obstacles(options.device)
    for plane, reason in left_out.items():
        print(f"data plane {plane!r} is left out: {reason}")
    repeated = {draw_fault(options.seed, number).plane for number in options.only or ()}
    for plane in left_out.keys() & {*(options.planes or ()), *repeated}:
        parser.error(f"the data plane {plane!r} is not possible here: {left_out[plane]}")
    options.planes = options.planes or [plane for plane in PLANES if plane not in left_out]
    if not any(set(KINDS[kind].planes) & set(options.planes) for kind in options.kinds):
        parser.error(f"no kind in --kinds is possible on the planes {', '.join(options.planes)}")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: {options.json.parent} is not a directory")


def main() -> int:
    options = parse()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        return run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def interrupt(*_: Any) -> None:
    """Raise KeyboardInterrupt, once: what follows must be cleaned up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(options: argparse.Namespace) -> int:
    """Run the campaign and print its report; return the exit code."""
    begin, until, number = time.monotonic(), float("inf"), options.faults or FAULTS
    faults = draw_faults(options.seed, options.kinds, options.planes)
    if options.only:
        faults, number = (draw_fault(options.seed, n) for n in options.only), len(options.only)
    elif options.minutes:
        until, number = begin + 60 * options.minutes, None
    rows: list[Row] = []
    steady: Run | None = None
    with Campaign(options.device, options.logs) as campaign:
        planes = [plane for plane in options.planes if plane not in ("hosts", "in-process")]
        if planes and not options.only:
            steady = campaign.start_steady(options.seed, planes)
        for row in campaign.rows(islice(faults, number), until):
            rows.append(row)
            done = f"{len(rows)}/{number}" if number else f"{len(rows)}"
            print(f"{done:>9} {time.monotonic() - begin:>6.0f} s  {row}", flush=True)
        if steady is not None:
            campaign.end_steady(steady)
    print_faults(rows)
    problems = [] if steady is None else check_steady(steady)
    if options.json is not None:
        records = sorted((row.as_record() for row in rows), key=lambda record: record["number"])
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    passed, verdict = judge(rows, problems, options.seed)
    print(verdict)
    return 0 if passed else 1


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(box=None, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(soft_wrap=True).print(table)


def print_faults(rows: list[Row]) -> None:
    shown = [name for name in OUTCOMES if any(row.outcome == name for row in rows)]
    counts = Counter((row.fault.kind, row.outcome) for row in rows)
    kinds = [kind for kind in KINDS if any(row.fault.kind == kind for row in rows)]
    print()
    print_table(["fault", *shown], [[k, *(counts[k, name] for name in shown)] for k in kinds])


def check_steady(steady: Run) -> list[str]:
    """Print how resources of the runs without faults grew; return what is wrong with these runs."""
    problems = []
    for rank, end in sorted(steady.ends.items()):
        if end.hung or end.error:
            what = "hung" if end.hung else f"{end.error}: {end.message}"
            problems.append(f"rank {rank} of the runs without faults: {what}")
    by_rank = {rank: growth(samples) for rank, samples in steady.samples.items()}
    largest = {name: max(grown[name] for grown in by_rank.values()) for name in by_rank.get(0, ())}
    for name, grown in largest.items():
        if grown > ALLOWED_GROWTH[name]:
            problems.append(f"leak without faults: {name} of a rank grew by {grown:.1f}")
    shown = ", ".join(f"{name} {grown:+.1f}" for name, grown in largest.items())
    count = counted(len(steady.samples[0]), "training")
    print(f"\n{count} without faults; largest growth: {shown or 'too few to measure it'}")
    print(*problems, sep="\n")
    return problems


def judge(rows: list[Row], problems: list[str], seed: int) -> tuple[bool, str]:
    """Return whether the campaign passed, and the verdict in one line."""
    counts = Counter(row.outcome for row in rows)
    failed = [row.fault.number for row in rows if row.outcome in FAILURES]
    if not failed and not problems:
        ends = [f"{counts[SURVIVED]} survived", f"{counts[STOPPED]} stopped with names"]
        ends += [f"{counts[name]} {name}" for name in OUTCOMES[2:] if counts[name]]
        return True, f"Passed: {counted(len(rows), 'fault')}, {', '.join(ends)}, no failure"
    what = [counted(counts[name], name) for name in FAILURES if counts[name]]
    what += [counted(len(problems), "problem") + " without faults"] if problems else []
    only = f"--seed {seed} --only {' '.join(map(str, sorted(failed)))} --logs failed"
    again = shlex.quote(only if failed else shlex.join(sys.argv[1:]))
    return False, f"FAILED: {', '.join(what)}; repeat with: make soak OPTIONS={again}"


if __name__ == "__main__":
    sys.exit(main())
