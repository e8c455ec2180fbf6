"""One record of what is measured, one run of its sections, for every benchmark of the project.

A benchmark fills a `Report` with lines, a case and what was measured in it. The report prints them
as tables and keeps one `Row` per number, which carries all that is needed to read it alone or to
measure it again: device, versions, command and date.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from timing import Clock, Gpu, Host, free, on_gpu, tell

from ultraep.backends import wait_until_compiled
from ultraep.errors import UltraEPError
from ultraep.files.writing import write_text
from ultraep.tools.report.rows import MeasuredNumber as Row
from ultraep.tools.report.rows import as_json, cpu_device, versions

QUEUED = 2_000_000  # cycles: a millisecond in which a kernel is queued before the device gets to it

ROOT = Path(__file__).resolve().parent.parent
WIDTH, DIGITS = 120, 5  # of a printed table, of a number in it

Item = TypeVar("Item")
Case = Mapping[str, str | int | float]
Parts = dict[str, Any]  # that become a case


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured quantity: name and unit, head and form in a table, and how many become one."""

    name: str
    unit: str
    head: str
    form: str = ".4f"
    combine: Callable[[Sequence[float]], float] = fmean


# What a case does not have is None: shown as a dash, and not recorded.
Values = Mapping[Metric, float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a case, and what was measured in it."""

    case: Case
    values: Values


class Samples:
    """Measurements of the same case, again and again, and of many cases."""

    def __init__(self) -> None:
        self._of_case: dict[tuple[tuple[str, str | int | float], ...], list[Values]] = {}

    def add(self, case: Case, values: Values) -> None:
        self._of_case.setdefault(tuple(case.items()), []).append(values)

    def lines(self) -> list[Line]:
        """One line for every case, in the order of their first samples."""
        return [Line(dict(case), _combined(found)) for case, found in self._of_case.items()]


def _combined(samples: Sequence[Values]) -> Values:
    together: dict[Metric, float | None] = {}
    for metric in samples[0]:
        known = [value for sample in samples if (value := sample[metric]) is not None]
        together[metric] = metric.combine(known) if known else None
    return together


class Mismatch(Exception):
    """A device, or what arrived, is not what it should be."""


class Report:
    """Collects what a benchmark measures: tables to read, rows to keep."""

    def __init__(self, benchmark: str, argv: Sequence[str], *, device: str | None = None) -> None:
        wait_until_compiled()  # so that no time is that of the reference backend
        self.rows: list[Row] = []
        self.benchmark = benchmark
        self.section = ""  # of the benchmark, to be set before lines are added
        self.device = device or cpu_device()
        self.versions = versions()
        self.command = command(argv)
        self.date = datetime.now(UTC).date().isoformat()
        self.console = Console(width=WIDTH, highlight=False)

    def header(self) -> None:
        """Print once what holds for all tables."""
        known = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        for text in (self.command, f"{self.date}, {self.device}", known):
            self.console.print(text, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """Print a remark under a table."""
        self.console.print(text, markup=False)

    def add(self, title: str, lines: Sequence[Line]) -> None:
        """Print the lines as one table, and keep a row for every number in it."""
        for line in lines:
            for metric, value in line.values.items():
                if value is not None:
                    self.rows.append(self._row(line.case, metric, value))
        names = list(dict.fromkeys(name for line in lines for name in line.case))
        same = [name for name in names if len({line.case.get(name) for line in lines}) == 1]
        heading = [title, *(f"{name} {lines[0].case[name]}" for name in same)]
        with self.console.capture() as printed:
            self.console.print(_table(lines, [name for name in names if name not in same]))
        rows = [row.rstrip() for row in printed.get().splitlines()]
        self.console.print("", "; ".join(heading), *rows, sep="\n", markup=False, soft_wrap=True)

    def write(self, path: Path | None) -> None:
        """Write all rows as a JSON list, one row a line; an older file stays whole until then."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, as_json(self.rows))

    def _row(self, case: Case, metric: Metric, value: float) -> Row:
        name = f"{self.benchmark}/{self.section}" if self.section else self.benchmark
        rounded, known = (
            float(f"{value:.7g}"),
            (self.device, self.versions, self.command, self.date),
        )
        return Row(name, dict(case), metric.name, rounded, metric.unit, *known)


def _table(lines: Sequence[Line], shown: Sequence[str]) -> Table:
    """The named cases and all metrics; in the first column what repeats is not said again."""
    metrics = list(dict.fromkeys(metric for line in lines for metric in line.values))
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name in shown:
        table.add_column(name, no_wrap=True)
    for metric in metrics:
        table.add_column(metric.head, justify="right", no_wrap=True)
    cells = [[str(line.case.get(name, "-")) for name in shown] for line in lines]
    grouped = any(one[:1] == two[:1] for one, two in pairwise(cells))
    for i, line in enumerate(lines):
        repeats = grouped and i and cells[i][0] == cells[i - 1][0]
        if grouped and i and not repeats:
            table.add_section()
        names = ["", *cells[i][1:]] if repeats else cells[i]
        table.add_row(*names, *(_shown(line.values.get(metric), metric) for metric in metrics))
    return table


def _shown(value: float | None, metric: Metric) -> str:
    """As the metric says, with fewer decimals where the number is large."""
    if value is None:
        return "-"
    text = format(value, metric.form)
    whole, _, decimals = text.partition(".")
    room = max(1, DIGITS - len(whole.lstrip("-0")))
    return format(value, f".{room}f") if room < len(decimals) else text


@dataclass(frozen=True, slots=True)
class Bench:
    """What all sections of a benchmark share: where lines go, how much is measured, and where."""

    report: Report
    scale: Any
    clock: Clock
    json: Path | None = None

    @classmethod
    def of(
        cls, name: str, argv: Sequence[str], scale: Any, clock: Clock, json: Path | None
    ) -> Self:
        """A benchmark of kernels: with a report that names their device and its host."""
        report = Report(name, argv, device=f"{clock.name}; host {cpu_device()}")
        report.header()
        return cls(report, scale, clock, json)

    def table(self, title: str, lines: Sequence[Line]) -> None:
        """Print the lines and write all rows so far: what fails later takes nothing away."""
        self.report.add(title, lines)
        self.report.write(self.json)

    def run(self, sections: Mapping[str, Callable[[Any], None]], names: Sequence[str]) -> None:
        """These sections, also those behind one that fails; then an error if one did."""
        from triton.errors import TritonError

        failures = []
        for name in names:
            tell(name)
            self.report.section = name
            try:
                sections[name](self)
            except (RuntimeError, ImportError, TritonError, Mismatch, UltraEPError) as error:
                traceback.print_exc()
                failures.append(f"{name}: {error!r}")
            free()
        tell("done")
        if failures:
            raise SystemExit("\n".join(failures))
        if not self.report.rows:
            raise SystemExit("nothing of it could be measured here")


def command(argv: Sequence[str]) -> str:
    """The command from the root of the project; of files elsewhere, only their names.

    >>> command([str(ROOT / "benchmarks" / "bench_plan.py"), "--trace", "/data/trace.npz"])
    'python benchmarks/bench_plan.py --trace trace.npz'
    """
    return " ".join(["python", *(_portable(argument) for argument in argv)])


def _portable(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if path.is_absolute() or ".." in path.parts:
        whole = path.resolve()
        value = whole.relative_to(ROOT).as_posix() if whole.is_relative_to(ROOT) else path.name
    return option + equals + value


def progress(items: Iterable[Item], label: str, total: float | None = None) -> Iterable[Item]:
    """The same items, with a bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    quiet: dict[str, Any] = {"transient": True, "disable": not console.is_terminal}
    # No refreshing by itself: that would be a thread that disturbs what is timed.
    return track(items, label, total=total, console=console, auto_refresh=False, **quiet)


def common_options(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--toy", action="store_true", help="tiny sizes, a few seconds, for CI")
    size.add_argument("--quick", action="store_true", help="fewer sizes and seeds, half a minute")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all rows to this file")


def section_option(parser: argparse.ArgumentParser, known: Iterable[str]) -> None:
    """`--only A,B`: some of these sections, in the order in which they are known."""
    every = list(known)

    def sections(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in every]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown sections {', '.join(unknown)}; known are {', '.join(every)}"
            )
        return [name for name in every if name in names]

    parser.add_argument(
        "--only", type=sections, default=every, metavar="A,B", help=", ".join(every)
    )


def run_sections(
    name: str,
    argv: Sequence[str],
    about: str | None,
    sections: Mapping[str, Callable[[Any], None]],
    scales: Mapping[str, Any],
) -> None:
    """A whole program: the sections that are asked for, on a GPU, or tiny ones without.

    scales: how much is measured if `toy`, `quick` and `full`; each has `rounds`.
    """
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    common_options(parser)
    section_option(parser, sections)
    options = parser.parse_args(argv[1:])
    gpu = on_gpu(toy=options.toy)
    scale = scales["toy" if options.toy else "quick" if options.quick else "full"]
    clock = Gpu(scale.rounds, QUEUED) if gpu else Host(1, 0)
    Bench.of(name, argv, scale, clock, options.json).run(sections, options.only)
