"""`ultraep check`: does balancing work on these machines, and what does it gain?"""

from __future__ import annotations

import json
import os
import textwrap
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ultraep.errors import ConfigError
from ultraep.files.writing import write_text
from ultraep_tools.check.size import LayerSize, sizes_in
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option, refuse_options
from ultraep_tools.cli.terminal import Terminal, make_grid
from ultraep_tools.launch.processes import RankPlace
from ultraep_tools.outputs import check_targets
from ultraep_tools.sim.model import load_model

if TYPE_CHECKING:
    from ultraep_tools.check.report import Finding, Report

EXAMPLE = (
    "Example: ultraep check\n\n"
    "Example: torchrun --nproc-per-node 8 -m ultraep check --json check.json\n\n"
    "Example: torchrun --nproc-per-node 8 -m ultraep check --level 3 --model qwen3-235b"
)
FAILED = 1  # exit code
WIDTH = 80
SIZES = ("hidden", "ffn", "experts", "top_k", "tokens")
DEFAULTS = {"cpu": (256, 512, 0, 2, 1024), "cuda": (4096, 1536, 128, 8, 4096)}
PER_RANK = 4  # experts, if their number is 0


class CheckOptions(cli.Options):
    level: int | None = option(
        "1: this host. 2: the ranks that torchrun started. 3: also a layer of your size.",
        "1 alone, 2 under torchrun",
        metavar="1|2|3",
    )
    model: str | None = option("Sizes of a preset (`ultraep advise --presets`).", metavar="NAME")
    checkpoint: Path | None = option(
        "Sizes in the config.json of a checkpoint.", flags="--from", metavar="DIR"
    )
    hidden: int | None = option("Width of the model.", "256; 4096 on GPUs")
    ffn: int | None = option("Hidden width of an expert.", "512; 1536 on GPUs")
    experts: int | None = option("Experts of a layer.", "4 per rank; 128 on GPUs")
    top_k: int | None = option("Experts per token.", "2; 8 on GPUs")
    tokens: int | None = option("Tokens per rank.", "1024; 4096 on GPUs")
    dispatcher: str | None = option(
        "Rows through deepep, or the dispatcher that a function of yours returns for (group, "
        "size).",
        "the data plane",
        metavar="deepep|MODULE:FUNCTION",
    )
    timeout: float = option("Seconds that a part waits for a rank.", default=60.0)
    failed_hosts: Path | None = option(
        "Level 1: add this host to FILE if it fails; then `srun --exclude=./FILE`.",
        "in a Slurm job, ultraep-failed-hosts-JOB.txt",
        metavar="FILE",
    )
    json: Path | None = option("Write everything that was found.", metavar="FILE")
    force: bool = cli.force_option()


@cli.with_options
def command(options: CheckOptions) -> None:
    """Check whether balancing works on these machines, and what it gains.

    Alone, it checks this host (half a minute). Under torchrun it checks the group: versions,
    domains, mapped memory, bandwidths, slow ranks (two minutes). With --level 3 it also compares
    and times one layer of your size. The last lines are the verdict and the next command.

    Exits with code 0 if the verdict is "Ready", otherwise with 1.
    """
    place = RankPlace.of_torchrun()
    level = options.level or (1 if place is None else 2)
    _check(options, level, place)
    first = place is None or place.rank == 0 or level == 1
    failed_hosts, job = options.failed_hosts, os.environ.get("SLURM_JOB_ID")
    if level == 1 and job and failed_hosts is None:
        failed_hosts = Path(f"ultraep-failed-hosts-{job}.txt")
    check_targets(failed_hosts, force=True)
    path = options.json if place is None or place.rank == 0 else None
    check_targets(path, force=options.force)
    terminal = Terminal(width=WIDTH)
    shown = partial(print_finding, terminal) if first else (lambda _: None)
    if first:
        terminal.print(f"Level {level}: loading torch")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # missing ranks are named below
    from ultraep_tools.check.run import check_alone, check_ranks

    if level == 1 or place is None:
        report = check_alone(shown, failed_hosts)
    else:
        size = _size(options, place.size) if level == 3 else None
        report = check_ranks(place, options.timeout, size, options.dispatcher or "", shown)
    if first or report.rank_0_lost:
        _print_verdict(report, terminal, path)
        if report.problems:  # torchrun would end rank 0 if another rank failed first
            _report_to_torchrun(report.verdict)
            raise typer.Exit(FAILED)


def _check(options: CheckOptions, level: int, place: RankPlace | None) -> None:
    """Refuse wrong options before torch is loaded."""
    if level not in (1, 2, 3):
        raise ConfigError(f"--level must be 1, 2 or 3, got {level}")
    if level > 1 and place is None:
        raise ConfigError(
            f"--level {level} checks ranks: start it with "
            f"torchrun --nproc-per-node 2 -m ultraep check --level {level}"
        )
    if level > 1:
        refuse_options(options, ("failed_hosts",), "only level 1 writes failing hosts")
    if level < 3:
        reason = f"level {level} runs no layer of your size"
        refuse_options(options, ("model", *SIZES, "dispatcher"), reason)
        if options.checkpoint is not None:
            raise ConfigError(f"{reason}; remove --from")
    if options.model is not None and options.checkpoint is not None:
        raise ConfigError("pass --model or --from, not both")
    if not options.timeout > 0:
        raise ConfigError(f"--timeout must be positive, got {options.timeout}")


def _size(options: CheckOptions, ranks: int) -> LayerSize:
    """Return the size from the options, the preset or checkpoint, and the defaults."""
    import torch

    sizes = dict(zip(SIZES, DEFAULTS["cuda" if torch.cuda.is_available() else "cpu"], strict=True))
    sizes["experts"] = sizes["experts"] or PER_RANK * ranks
    if options.model is not None:
        model = load_model(options.model)
        shape = model.width, model.expert_width, model.experts, model.top_k
        sizes |= dict(zip(SIZES, shape, strict=False))
    elif options.checkpoint is not None:
        sizes |= sizes_in(options.checkpoint)
    sizes |= cli.set_options(options, SIZES)
    size = LayerSize(**sizes)
    if size.experts % ranks:
        raise ConfigError(f"{size.experts} experts do not divide evenly over {ranks} ranks")
    return size


def _report_to_torchrun(verdict: str) -> None:
    """Let torchrun end its own report of a failed rank with the verdict."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": verdict, "timestamp": int(time.time())}
        failure = {"message": {"message": verdict, "extraInfo": details}}
        write_text(Path(path), json.dumps(failure))


# -- output --------------------------------------------------------------------------------------


def print_finding(terminal: Terminal, finding: Finding) -> None:
    state = "FAIL" if finding.problems else "slow" if finding.warnings else "ok"
    seconds = f" ({finding.seconds:.1f} s)" if finding.seconds >= 1 else ""
    lines = [f"{state:<5}{finding.part:<15}{finding.summary}{seconds}".rstrip()]
    lines += [f"{'':<20}- {text}" for text in (*finding.problems, *finding.warnings)]
    _print_lines(terminal, lines)
    if finding.table:
        headers, *rows = finding.table
        terminal.print(make_grid(headers, rows))
    _print_lines(terminal, [f"{'':<20}note: {text}" for text in finding.notes])


def _print_lines(terminal: Terminal, lines: list[str]) -> None:
    for line in lines:
        terminal.print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 22), soft_wrap=True)


def _print_verdict(report: Report, terminal: Terminal, path: Path | None) -> None:
    lines = [report.verdict, f"Next: {report.next_command}"]
    if path is not None:
        found = {"verdict": report.verdict, "ready": not report.problems, **asdict(report)}
        write_text(path, json.dumps(found, indent=2) + "\n")
        lines.append(f"Details, for a bug report: {path}")
    terminal.print()
    for line in lines:
        terminal.print(textwrap.fill(line, WIDTH), soft_wrap=True)
