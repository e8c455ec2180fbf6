"""The harness of all benchmarks: options, sections, tables, and one row per measured number.

A benchmark calls `main` with its sections and scales. A section passes lines to `bench.table`; a
line is a case with its values. The report prints tables and stores one `Row` per number with
device, versions, command and date.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from measured import MeasuredNumber as Row
from measured import as_json, cpu_device, hash_of_inputs, versions
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from timing import Clock, Gpu, Host, free, on_gpu, print_progress

from ultraep.backends import select
from ultraep.errors import UltraEPError
from ultraep.files.writing import write_text

# What a section needs: a CPU; a GPU or a CPU; a GPU, or at toy size Triton's interpreter; a GPU.
CPU, ANY, KERNELS, CARD = "cpu", "any", "kernels", "card"
ROOT = Path(__file__).resolve().parent.parent
WIDTH, DIGITS = 120, 5  # characters of a table, digits of a number in it

Case = Mapping[str, str | int | float]
Section = Callable[[Any], None]
Extra = Mapping[str, tuple[Callable[[str], Any], str]]  # type and help of options


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured quantity: name, unit, heading and format, and how samples are combined."""

    name: str
    unit: str
    head: str
    form: str = ".4f"
    combine: Callable[[Sequence[float]], float] = fmean


# None: not measured in this case; printed as a dash and not stored.
Values = Mapping[Metric, float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a case and its measured values."""

    case: Case
    values: Values
    routes: str = ""  # digest of the plan


class Samples:
    """Repeated measurements, grouped by case."""

    def __init__(self) -> None:
        self._of_case: dict[tuple[tuple[str, str | int | float], ...], list[Values]] = {}

    def add(self, case: Case, values: Values) -> None:
        self._of_case.setdefault(tuple(case.items()), []).append(values)

    def lines(self) -> list[Line]:
        """One line per case, in the order of the first samples."""
        return [Line(dict(case), _combined(samples)) for case, samples in self._of_case.items()]


def installed(module: str) -> bool:
    """Return whether a module can be imported; `a.b` may be missing where a folder `a` exists."""
    parent = module.partition(".")[0]
    return find_spec(parent) is not None and find_spec(module) is not None


def _combined(samples: Sequence[Values]) -> Values:
    combined: dict[Metric, float | None] = {}
    for metric in samples[0]:
        known = [value for sample in samples if (value := sample[metric]) is not None]
        combined[metric] = metric.combine(known) if known else None
    return combined


class Mismatch(Exception):
    """A result differs from the expected one, or a device is unsuitable."""


class Report:
    """Prints the tables of a benchmark and stores its rows."""

    def __init__(self, benchmark: str, argv: Sequence[str], *, device: str | None = None) -> None:
        select()  # compiles the planner on a new machine, before anything is timed
        self.rows: list[Row] = []
        self.benchmark = benchmark
        self.section = ""  # set before lines are added
        self.device = device or cpu_device()
        self.versions = versions()
        self.command = command(argv)
        self.script = argv[0]
        self.date = datetime.now(UTC).date().isoformat()
        self.console = Console(width=WIDTH, highlight=False)

    def header(self) -> None:
        """Print command, date, device and versions."""
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        for text in (self.command, f"{self.date}, {self.device}", packages):
            self.console.print(text, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """Print a remark under a table."""
        self.console.print(text, markup=False)

    def add(self, title: str, lines: Sequence[Line]) -> None:
        """Print the lines as one table and store a row for every number."""
        for line in lines:
            for metric, value in line.values.items():
                if value is not None:
                    self.rows.append(self._row(line, metric, value))
        names = list(dict.fromkeys(name for line in lines for name in line.case))
        same = [name for name in names if len({line.case.get(name) for line in lines}) == 1]
        heading = [title, *(f"{name} {lines[0].case[name]}" for name in same)]
        with self.console.capture() as printed:
            self.console.print(_table(lines, [name for name in names if name not in same]))
        rows = [row.rstrip() for row in printed.get().splitlines()]
        self.console.print("", "; ".join(heading), *rows, sep="\n", markup=False, soft_wrap=True)

    def write(self, path: Path | None) -> None:
        """Write all rows as a JSON list, one row per line, replacing an older file at the end."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, as_json(self.rows))

    def _row(self, line: Line, metric: Metric, value: float) -> Row:
        name = f"{self.benchmark}/{self.section}" if self.section else self.benchmark
        rounded = float(f"{value:.7g}")
        run = (self.device, self.versions, self.command, self.date)
        hashes = hash_of_inputs(line.case, self.script), line.routes
        return Row(name, dict(line.case), metric.name, rounded, metric.unit, *run, *hashes)


def _table(lines: Sequence[Line], shown: Sequence[str]) -> Table:
    """The named cases and all metrics; repeated values of the first column are left out."""
    metrics = list(dict.fromkeys(metric for line in lines for metric in line.values))
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name in shown:
        table.add_column(name, no_wrap=True)
    for metric in metrics:
        table.add_column(metric.head, justify="right", no_wrap=True)
    cells = [[str(line.case.get(name, "-")) for name in shown] for line in lines]
    grouped = any(above[:1] == below[:1] for above, below in pairwise(cells))
    for i, line in enumerate(lines):
        repeats = grouped and i and cells[i][0] == cells[i - 1][0]
        if grouped and i and not repeats:
            table.add_section()
        names = ["", *cells[i][1:]] if repeats else cells[i]
        table.add_row(*names, *(_shown(line.values.get(metric), metric) for metric in metrics))
    return table


def _shown(value: float | None, metric: Metric) -> str:
    """Format a value as its metric says, with fewer decimals for large numbers."""
    if value is None:
        return "-"
    text = format(value, metric.form)
    whole, _, decimals = text.partition(".")
    places = max(1, DIGITS - len(whole.lstrip("-0")))
    return format(value, f".{places}f") if places < len(decimals) else text


@dataclass(frozen=True)
class Bench:
    """The report, scale, clock and options that all sections of a benchmark share."""

    report: Report
    scale: Any
    clock: Clock
    options: argparse.Namespace

    @property
    def on_gpu(self) -> bool:
        return isinstance(self.clock, Gpu)

    def table(self, title: str, lines: Sequence[Line]) -> None:
        """Print the lines and write all rows so far, so that a later failure loses nothing."""
        self.report.add(title, lines)
        self.report.write(self.options.json)

    def run(self, sections: Mapping[str, Section], names: Sequence[str]) -> None:
        """Run these sections, also after a failed one; then raise if any has failed."""
        caught: list[type[Exception]] = [RuntimeError, ImportError, Mismatch, UltraEPError]
        if installed("triton"):
            caught.append(import_module("triton.errors").TritonError)
        failures = []
        for name in names:
            print_progress(name)
            self.report.section = name
            try:
                sections[name](self)
            except tuple(caught) as error:
                traceback.print_exc()
                failures.append(f"{name}: {error!r}")
            free()
        print_progress("done")
        if failures:
            raise SystemExit("\n".join(failures))
        if not self.report.rows:
            raise SystemExit("none of these sections can run on this machine")


def command(argv: Sequence[str]) -> str:
    """The command from the root of the project; files elsewhere are reduced to their names.

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


def options_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--toy", action="store_true", help="tiny sizes for CI; takes seconds")
    size.add_argument("--quick", action="store_true", help="fewer sizes and seeds")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write all measured numbers to this file"
    )
    return parser


def comma_list(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the type of an option `A,B`: a subset of the known names, in their order."""
    all_names = list(known)

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in all_names]:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; choose from {', '.join(all_names)}"
            )
        return [name for name in all_names if name in chosen]

    return names


def main(
    name: str,
    about: str | None,
    sections: Mapping[str, Section],
    scales: Mapping[str, Any],
    *,
    needs: str | Mapping[str, str] = CPU,
    usual: Sequence[str] | None = None,
    extra: Extra | None = None,
) -> None:
    """Run a benchmark: parse its options, then measure the selected sections.

    scales: sizes by name: `toy`, `quick` and `full`, the default.
    needs: `CPU`, `ANY`, `KERNELS` or `CARD`, for all sections or by name.
    usual: sections that run without `--only`; None: all.
    extra: type and help of further options; an option named like a field of the scale sets it.
    """
    parser = options_parser(about)
    if len(sections) > 1:
        only = comma_list(sections)
        parser.add_argument(
            "--only",
            type=only,
            metavar="A,B",
            help=f"run only these sections: {', '.join(sections)}",
        )
    for option, (kind, text) in (extra or {}).items():
        parser.add_argument(f"--{option}", type=kind, help=text)
    options = parser.parse_args()
    scale = scales["toy" if options.toy else "quick" if options.quick else "full"]
    for option in extra or {}:
        value = getattr(options, option)
        if value is not None and hasattr(scale, option):
            scale = replace(scale, **{option: value})
    names = getattr(options, "only", None) or list(usual or sections)
    need_of = {n: needs if isinstance(needs, str) else needs.get(n, CPU) for n in names}
    clock = _clock(set(need_of.values()), scale, toy=options.toy)
    bench = Bench(Report(name, sys.argv, device=clock.device_name), scale, clock, options)
    bench.report.header()
    runs = [n for n in names if _runs_here(need_of[n], bench)]
    for skipped in (n for n in names if n not in runs):
        bench.report.note(f"{skipped}: needs a GPU")
    bench.run(sections, runs)


def _clock(needs: set[str], scale: Any, *, toy: bool) -> Clock:
    if needs == {CPU}:
        return Host(name="")
    if on_gpu(toy=toy or bool(needs & {CPU, ANY})):
        return Gpu(getattr(scale, "rounds", 21))
    return Host(1, 0, name="Triton interpreter" if needs - {CPU, ANY} else "")


def _runs_here(need: str, bench: Bench) -> bool:
    return need in (CPU, ANY) or bench.on_gpu or (need == KERNELS and bench.options.toy)
