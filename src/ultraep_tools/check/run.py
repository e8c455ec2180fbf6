"""Run the levels of a check on this process, alone or as a rank of torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from ultraep.errors import CommunicationError
from ultraep_tools.check import group, layer
from ultraep_tools.check.group import Part, Ranks, group_of, run_part
from ultraep_tools.check.host import check_host
from ultraep_tools.check.report import Finding, Report
from ultraep_tools.check.size import LayerSize
from ultraep_tools.launch.processes import RankPlace

Shown = Callable[[Finding], object]


def check_alone(shown: Shown, failed_hosts: Path | None, *, kernels: bool = True) -> Report:
    """Check this host for itself; if it fails, add it to the file of failing hosts."""
    report = Report(1, check_host(shown, kernels_too=kernels))
    report.ready = "this host can run ultraep"
    report.next_command = "torchrun --nproc-per-node 2 -m ultraep check"
    if report.problems:
        job = os.environ.get("SLURM_JOB_ID")
        path = failed_hosts or (Path(f"ultraep-failed-hosts-{job}.txt") if job else None)
        if path is not None:
            with path.open("a") as file:  # one write of a line: other hosts may write too
                file.write(f"{socket.gethostname()}\n")
    return report


def check_ranks(
    place: RankPlace,
    level: int,
    timeout: float,
    size_for: Callable[[int, bool], LayerSize],
    dispatcher: str,
    shown: Shown,
) -> Report:
    """Check the ranks that torchrun started; the same report on every rank.

    size_for: returns the size of the layer, given the number of ranks and whether they have GPUs.
    """
    report = Report(level)
    try:
        with group_of(place, timeout) as ranks:
            _run(group.PARTS, ranks, report, shown)
            if level >= 3 and not report.problems:
                size = size_for(place.size, ranks.device.type == "cuda")
                _run(layer.parts_of(size, dispatcher, ranks.domain), ranks, report, shown)
            _conclude(report, ranks)
            ranks.meeting.leave()
    except CommunicationError as late:  # a rank did not come
        report.findings.append(Finding("ranks", "not all came", [str(late)]))
        shown(report.findings[-1])
    return report


def _run(parts: Sequence[Part], ranks: Ranks, report: Report, shown: Shown) -> None:
    """Run parts until one has a problem."""
    for part in parts:
        if not report.problems:
            report.findings.append(run_part(part, ranks))
            shown(report.findings[-1])


def _conclude(report: Report, ranks: Ranks) -> None:
    """Write what a verdict says without problems, and what to run next."""
    found = {finding.part: finding.facts for finding in report.findings}
    plane = "mapped memory on" if found.get("mapped memory", {}).get("mapped") else "messages of"
    devices = "GPUs" if ranks.device.type == "cuda" else "CPU ranks"
    report.ready = f"{plane} {ranks.place.size} {devices}"
    report.next_command = "the same with --level 3 and the sizes of your layer"
    if "times" in found and not report.problems:
        gain, idle = found["times"]["gains"]["2.0"], found["times"]["idle_cost"]
        report.ready += f", gain {gain:.2f}x at imbalance 2, idle cost {100 * idle:.1f} %"
        report.next_command = "train; docs/README.md has a page for every framework"
