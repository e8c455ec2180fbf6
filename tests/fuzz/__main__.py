"""Fuzz readers and the planner, and write a log with counts, coverage and findings.

    python -m fuzz --minutes 10 --seed 1                       # each kind for half of the time
    python -m fuzz --files 100000 --plans 1000000 --log fuzz.txt

Run it with `src` and `tests` on PYTHONPATH; `make fuzz` does. Inputs that fail are written to
build/fuzz. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from threading import Event

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first imported
os.environ["ULTRAEP_RATES"] = "row=1000000,copy=1,each=0,layer=0"  # the same plans everywhere

import quick_interpreter
import torch

from fuzz.guided import Coverage, Finding, Target, limit_memory, outcome, schedule
from ultraep.backends import wait_until_compiled
from ultraep.tools.report.rows import cpu_device, versions

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ("files", "plans")
MOST_SHOWN = 20  # findings of a kind
Step = Callable[[int], Finding | None]


stopped = Event()  # by SIGTERM or Ctrl-C: the log tells how far the run came


def numbers(most: int | None, seconds: float | None) -> Iterator[int]:
    """Yield 0, 1, ... up to a count, until the time is over, or until the run is stopped."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    for number in count():
        if number == most or time.monotonic() >= end or stopped.is_set():
            return
        yield number


def fuzz_files(seed: int, amount: Iterator[int], folder: Path) -> tuple[list[Finding], list[str]]:
    """Read changed inputs; files count, settings and texts come on top."""
    from fuzz.readers import targets

    coverage, all_targets, findings = Coverage(), targets(folder), []
    for target in all_targets:
        for valid in target.seeds:
            ended = outcome(lambda t=target, v=valid: coverage.of(lambda: t.read(v)))
            if ended != "read":
                findings.append(Finding(target.name, -1, valid, f"a valid input is {ended}"))
    at_start = len(coverage.pairs)
    limit_memory()
    order, number = schedule(all_targets, seed), 0
    for _ in amount:
        while True:  # up to the next file
            target = order[number % len(order)]
            finding = target.step(number, seed, coverage)
            findings += [] if finding is None else [finding]
            number += 1
            if target.name.startswith("file "):
                break
    return findings, _lines_of(all_targets, coverage, at_start)


def _lines_of(targets: list[Target], coverage: Coverage, at_start: int) -> list[str]:
    groups: dict[str, Counter[str]] = {}
    for target in targets:
        groups.setdefault(target.name.split(" ")[0], Counter()).update(target.ends)
    inputs = [
        f"{name}: {sum(ends.values()):,} inputs, "
        + ", ".join(f"{end} {number:,}" for end, number in sorted(ends.items()))
        for name, ends in groups.items()
    ]
    kept = sum(len(target.kept) for target in targets)
    slowest = max(targets, key=lambda target: target.slowest)
    return [
        f"{len(targets)} targets; valid inputs reach {at_start:,} pairs of lines, all inputs "
        f"{len(coverage.pairs):,}; {kept:,} inputs were kept",
        *inputs,
        f"slowest input: {slowest.slowest:.2f} s of CPU time, {slowest.name}",
    ]


def fuzz_plans(seed: int, amount: Iterator[int], _: Path) -> tuple[list[Finding], list[str]]:
    from fuzz.plans import Counts, check_plan

    counts = Counts()
    findings = _all("plan", lambda number: check_plan(seed, number, counts), amount)
    return findings, counts.lines()


def _all(name: str, check: Callable[[int], None], amount: Iterator[int]) -> list[Finding]:
    findings = []
    for number in amount:
        try:
            check(number)
        except Exception:  # noqa: BLE001  any exception is a finding
            if stopped.is_set():  # a signal may have ended the ranks, too
                break
            findings.append(Finding(name, number, b"", traceback.format_exc()))
    return findings


def save(findings: list[Finding]) -> None:
    """Write the inputs that failed, with what happened."""
    folder = ROOT / "build" / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        name = f"{finding.target}-{finding.number}".replace("/", "_").replace(" ", "_")
        (folder / f"{name}.input").write_bytes(finding.content)
        (folder / f"{name}.txt").write_text(finding.problem)


def shown(findings: list[Finding]) -> list[str]:
    lines = [f"findings: {len(findings)}"]
    for finding in findings[:MOST_SHOWN]:
        last = (finding.problem.strip().splitlines() or [""])[-1]
        lines.append(f"  {finding.target}, input {finding.number}: {last[:160]}")
    return lines


def run(options: argparse.Namespace) -> int:
    """Run all kinds that have a count or a time; return the number of findings."""
    total, report = 0, _heading(options)
    for kind in options.only:
        most = getattr(options, kind)
        seconds = None if options.minutes is None else 60 * options.minutes / len(options.only)
        if most is None and seconds is None:
            continue
        print(f"{kind} ...", file=sys.stderr, flush=True)
        begin, cpu = time.monotonic(), time.process_time()
        with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
            here = Path.cwd()
            amount = _Counted(numbers(most, seconds))
            findings, lines = FUZZ[kind](options.seed, amount, Path(folder))
            os.chdir(here)
        spent = f"{time.monotonic() - begin:.0f} s, {time.process_time() - cpu:.0f} s of CPU time"
        section = ["", f"{kind}: {amount.count:,} in {spent}", *lines, *shown(findings)]
        print("\n".join(section), flush=True)
        report += section
        if options.log is not None:
            options.log.write_text("\n".join(report) + "\n")
        save(findings)
        total += len(findings)
    return total


class _Counted:
    """An iterator that counts what it yields."""

    def __init__(self, values: Iterator[int]) -> None:
        self._values, self.count = values, 0

    def __iter__(self) -> Iterator[int]:
        for value in self._values:
            self.count += 1
            yield value


def _fast_folder() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _heading(options: argparse.Namespace) -> list[str]:
    amounts = [
        f"--{kind} {getattr(options, kind)}" for kind in options.only if getattr(options, kind)
    ]
    minutes = [] if options.minutes is None else [f"--minutes {options.minutes:g}"]
    if options.only != list(KINDS):
        minutes.append(f"--only {','.join(options.only)}")
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    today = datetime.now(UTC).date().isoformat()
    return [
        " ".join(["python -m fuzz", f"--seed {options.seed}", *minutes, *amounts]),
        f"{today}, {cpu_device()}",
        f"Python {sys.version.split()[0]}, {packages}",
    ]


FUZZ = {"files": fuzz_files, "plans": fuzz_plans}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of all inputs (default: 1)")
    parser.add_argument("--minutes", type=float, help="time of all kinds together")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, metavar="N", help=f"number of {kind}")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write counts and findings here")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS))
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    quick_interpreter.install()
    wait_until_compiled()
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    logging.getLogger("ultraep").setLevel(logging.ERROR)  # some policies ignore speeds
    sys.exit(run(options) > 0)


if __name__ == "__main__":
    main()
