"""Run the levels of a check on this process, alone or as a rank of torchrun."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ultraep.errors import CommunicationError
from ultraep_tools.check import group, layer
from ultraep_tools.check.group import Part, Ranks, group_of, run_part
from ultraep_tools.check.host import check_host
from ultraep_tools.check.report import Finding, Report, listed
from ultraep_tools.check.size import LayerSize
from ultraep_tools.launch.processes import RankPlace
from ultraep_tools.report.words import counted

Shown = Callable[[Finding], object]


def check_alone(shown: Shown, failed_hosts: Path | None) -> Report:
    """Check this host for itself; if it fails, add it to the file of failing hosts."""
    name = socket.gethostname()
    report = Report(1, check_host(shown), f"host {name} can run ultraep")
    if not report.problems:
        report.next_command = "torchrun --nproc-per-node 2 -m ultraep check"
    elif failed_hosts is not None:
        with failed_hosts.open("a") as file:
            with suppress(OSError):  # other hosts may write, too; not all file systems have locks
                fcntl.lockf(file, fcntl.LOCK_EX)
            file.write(f"{name}\n")
    return report


def check_ranks(
    place: RankPlace, timeout: float, size: LayerSize | None, dispatcher: str, shown: Shown
) -> Report:
    """Check the ranks that torchrun started; the same report on every rank.

    size: of the layer of level 3; None: only level 2.
    """
    report = Report(2 if size is None else 3)
    try:
        with group_of(place, timeout) as ranks:
            _run(group.PARTS, ranks, report, shown)
            if size is not None:
                _run(layer.parts_of(size, dispatcher, ranks.domain), ranks, report, shown)
            if not report.problems:
                _conclude(report, ranks)
            ranks.meeting.leave()
    except CommunicationError as late:  # a rank did not come
        report.rank_0_lost = 0 in late.ranks
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
    """Write what the verdict says, and what to run next."""
    facts = {finding.part: finding.facts for finding in report.findings}
    plane = "mapped memory on" if facts["mapped memory"]["mapped"] else "messages between"
    devices = "CPU rank" if ranks.device.type == "cpu" else "rank" if ranks.shared else "GPU"
    hosts = list(dict.fromkeys(ranks.meeting.hosts))
    report.ready = f"{plane} {counted(ranks.place.size, devices)}"
    report.ready += " that share GPUs" if ranks.shared else ""
    report.ready += f" on {listed(hosts)}" if len(hosts) > 1 else ""
    report.next_command = "the same command with --level 3 and the sizes of your layer"
    if "times" in facts:
        times = facts["times"]
        report.ready += f", gain {times['gains']['2.0']:.2f}x at imbalance 2, "
        report.ready += idle_text(times["idle_cost"], times["resolution"])
        report.next_command = "balance your model (docs/clusters.md#change-your-job)"


def idle_text(idle_cost: float, resolution: float) -> str:
    """Return the idle cost, or that it is too small for this run."""
    error = f"{100 * resolution:.1f} %"
    if idle_cost <= resolution:
        return f"idle cost below what this run can tell ({error})"
    return f"idle cost {100 * idle_cost:.1f} % ({error} either way)"
