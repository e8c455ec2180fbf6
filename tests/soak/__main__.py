"""`python -m soak`: train with injected faults, and report how every run ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ultraep.errors import ConfigError
from ultraep.files.writing import write_text
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option, refuse_options, split_names, split_ranges
from ultraep_tools.cli.terminal import Terminal, progress
from ultraep_tools.launch.processes import stop_on_sigterm
from ultraep_tools.outputs import check_targets
from ultraep_tools.report.words import counted

if TYPE_CHECKING:
    from soak.outcomes import Row
    from soak.run import Campaign, Settings, Steady
    from soak.schedule import Fault

EXAMPLE = (
    "Example: python -m soak --seed 7 --minutes 5 --json soak.json\n\n"
    "Example: python -m soak --seed 7 --faults 1000 --only 17   # repeat one fault of that campaign"
)
FAULTS = 100
FAILED = 1  # exit code


class SoakOptions(cli.Options):
    seed: int = option("Seed of all faults, models and sizes.", default=0)
    minutes: float | None = option("Minutes after which no run starts.", "no limit")
    faults: int | None = option("Number of faults.", f"{FAULTS}; no limit with --minutes")
    schedule: Path | None = option(
        "Inject the faults in this file instead of drawing them.", metavar="FILE"
    )
    save_schedule: Path | None = option("Write the faults to a schedule file.", metavar="FILE")
    only: str | None = option("Run only the faults with these numbers.", "all", metavar="N,N-N,...")
    kinds: str | None = option("Inject only faults of these kinds.", "all", metavar="NAME,...")
    planes: str | None = option(
        "Run only on these data planes.", "all that are possible and fast here", metavar="NAME,..."
    )
    device: str = option("Device of the ranks.", default="cpu", metavar="cpu|cuda")
    timeout: float | None = option(
        "Timeout of the balancers, in seconds. A run that ends by no timeout has hung.",
        "6; 30 with --device cuda",
    )
    jobs: int = option("Runs at the same time. Most of them wait.", default=6)
    no_steady: bool = cli.switch(
        "Do not train without faults beside the campaign: memory over time is not measured.",
        "--no-steady",
    )
    preload: str = option(
        "A function that makes the ranks ready, called once before they are forked.",
        "none",
        default="",
        metavar="MODULE:FUNCTION",
    )
    json: Path | None = option("Write one record per fault as JSON.", metavar="FILE")
    logs: Path | None = option("Keep the logs of failed runs in this directory.", metavar="DIR")
    force: bool = cli.force_option()


@cli.with_options
def command(options: SoakOptions) -> None:
    """Train with injected faults, and report how every run ends.

    Exits with code 1 if a run hangs, gets a wrong number, leaks, or stops with an error that does
    not name the rank of the fault and a stage.
    """
    if options.faults is not None and options.faults < 1:
        raise ConfigError(f"--faults must be at least 1, got {options.faults}")
    if options.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {options.jobs}")
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"--minutes must be positive, got {options.minutes}")
    check_targets(
        (options.json, "benchmark"), (options.save_schedule, "schedule"), force=options.force
    )
    from soak.outcomes import FAILURES
    from soak.run import Campaign

    stop_on_sigterm()  # so that hosts and disks are removed
    settings, terminal = _settings(options), Terminal()
    faults, planes = _faults(options, settings, terminal)
    begin = time.monotonic()
    until = begin + 60 * options.minutes if options.minutes is not None else float("inf")
    rows: list[Row] = []
    with Campaign(settings, options.logs) as campaign:
        steady = None if options.no_steady else campaign.start_steady(options.seed, planes)
        _run(campaign, faults, until, rows)
        problems = [] if steady is None else _end(steady, terminal)
    failures = [row for row in rows if row.outcome in FAILURES]
    _report(terminal, rows, failures, time.monotonic() - begin, options)
    for problem in problems:
        terminal.print(problem, soft_wrap=True)
    if options.json is not None:
        _write(options.json, rows)
    if failures or problems:
        raise typer.Exit(FAILED)


def _settings(options: SoakOptions) -> Settings:
    from soak.run import Settings

    if options.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {options.device!r}")
    timeout = options.timeout or (30.0 if options.device == "cuda" else 6.0)
    if not 1 <= timeout <= 3600:
        raise ConfigError(f"--timeout must lie in 1..3600 s, got {timeout}")
    return Settings(timeout, options.jobs, options.device, options.preload)


def _faults(
    options: SoakOptions, settings: Settings, terminal: Terminal
) -> tuple[Iterator[Fault] | list[Fault], list[str]]:
    """Return the faults to inject, and the planes of runs without faults."""
    from soak import schedule
    from soak.run import obstacles

    left_out = obstacles(settings.device, settings.preload)
    planes = _chosen(options.planes, "--planes", tuple(schedule.PLANES), left_out)
    for plane in [plane for plane in left_out if plane not in planes and options.planes is None]:
        terminal.print_notes(f"data plane {plane!r} is left out: {left_out[plane]}")
    faults: list[Fault]
    if options.schedule is not None:
        refuse_options(options, ("faults", "kinds"), "--schedule has the faults")
        _, faults = schedule.read_schedule(options.schedule)
    else:
        kinds = _chosen(options.kinds, "--kinds", tuple(schedule.possible_kinds(planes)), {})
        numbers = count() if options.faults is None and options.minutes is not None else None
        drawn = (
            schedule.draw_fault(options.seed, number, settings.timeout, planes, kinds)
            for number in numbers or range(options.faults or FAULTS)
        )
        if numbers is not None:
            refuse_options(
                options, ("only", "save_schedule"), "a campaign without --faults has no end"
            )
            return drawn, planes
        faults = list(drawn)
    if options.only is not None:
        wanted = split_ranges(options.only, "--only")
        faults = [fault for fault in faults if fault.number in wanted]
        if not faults:
            raise ConfigError(f"no fault has a number in --only {options.only}")
    if options.save_schedule is not None:
        schedule.write_schedule(options.save_schedule, options.seed, faults)
    return faults, planes


def _chosen(
    text: str | None, flag: str, names: Sequence[str], left_out: dict[str, str]
) -> list[str]:
    """Return the names in an option, or all names that are not left out."""
    if text is None:
        return [name for name in names if name not in left_out]
    chosen = split_names(text, flag)
    for name in chosen:
        if name not in names:
            raise ConfigError(f"{flag} must be among {', '.join(names)}, got {name!r}")
    return list(chosen)


def _run(
    campaign: Campaign,
    faults: Iterator[Fault] | list[Fault],
    until: float,
    rows: list[Row],
) -> None:
    """Run all faults, adding to `rows`. A signal ends the campaign and kills its ranks."""
    total = len(faults) if isinstance(faults, list) else None
    begin = time.monotonic()
    if not isinstance(faults, list) or any(fault.plane == "hosts" for fault in faults):
        campaign.start_hosts()
    with progress("faults") as report, closing(campaign.rows(faults, until)) as outcomes:
        for row in outcomes:
            rows.append(row)
            expected = total or max(
                len(rows), int(len(rows) * (until - begin) / (time.monotonic() - begin))
            )
            report(len(rows), expected, f"{row.outcome:<12} {row.fault}")


def _end(steady: Steady, terminal: Terminal) -> list[str]:
    """End the runs without faults; print their resources and return what is wrong."""
    from soak.outcomes import ALLOWED_GROWTH, growing, trends

    problems = []
    for end in steady.stop():
        if end.error or end.hung:
            what = "hung" if end.hung else f"{end.error}: {end.message}"
            problems.append(f"rank {end.rank} of the run without faults: {what}")
    rows = []
    for rank, samples in sorted(steady.samples.items()):
        for name, (growth, last) in growing(samples).items():
            problems.append(
                f"leak: {name} of rank {rank} grew by {growth:.1f} to {last:.1f} in "
                f"{samples[-1][0]:.0f} s, at most {ALLOWED_GROWTH[name]:g} are allowed"
            )
        cells = [f"{last:.0f} ({growth:+.1f})" for growth, last in trends(samples).values()]
        rows.append([str(rank), str(len(samples)), *cells])
    if rows and len(rows[0]) > 2:
        names = list(steady.samples[0][0][1])
        heading = "Runs without faults: resources at the end, and growth by their trend"
        terminal.print_table(["rank", "runs", *names], rows, heading)
    return problems


def _report(
    terminal: Terminal, rows: list[Row], failures: list[Row], seconds: float, options: SoakOptions
) -> None:
    from soak.outcomes import table

    if rows:
        headers, lines = table(rows)
        heading = f"{counted(len(rows), 'fault')} in {seconds:.0f} s, seed {options.seed}"
        terminal.print_table(headers, lines, heading)
    for row in failures:
        terminal.print(f"{row.outcome}: {row.fault}: {row.detail}", soft_wrap=True)
    if failures:
        numbers = ",".join(str(row.fault.number) for row in failures)
        again = f"--schedule {options.schedule}" if options.schedule else f"--seed {options.seed}"
        most = max(row.fault.number for row in failures) + 1
        count_ = "" if options.schedule else f" --faults {max(most, options.faults or 0)}"
        terminal.print(
            f"repeat with: python -m soak {again}{count_} --only {numbers}", soft_wrap=True
        )


def _write(path: Path, rows: list[Row]) -> None:
    """Write one record per line, in the order of the faults."""
    from soak.outcomes import as_record

    records = [as_record(row) for row in sorted(rows, key=lambda row: row.fault.number)]
    lines = ",\n".join(json.dumps({"benchmark": "soak", **record}) for record in records)
    write_text(path, f"[\n{lines}\n]\n")


if __name__ == "__main__":
    typer.run(command)
