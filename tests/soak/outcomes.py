"""How a run ended: classification of faults, and of resources that grow.

    survived      all numbers are right
    stopped       every rank that could report an error named the rank of the fault and a stage
    unnamed       a rank stopped with an error that does not name both
    unexplained   `ultraep trace crash` does not name the rank that was killed or stopped
    hang          a rank did not end by itself
    wrong number  a loss or gradient differs from the twin
    leak          shared memory or processes were left behind, or resources grow over time
    not injected  the run ended before the stage of the fault began

Failures are unnamed, unexplained, hang, wrong number and leak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from soak.schedule import Fault

from ultraep.errors import FileError
from ultraep_tools.crash import crash_folders, read_crash

SURVIVED, STOPPED, UNNAMED, HANG = "survived", "stopped", "unnamed", "hang"
WRONG, LEAK, NOT_INJECTED, UNEXPLAINED = "wrong number", "leak", "not injected", "unexplained"
FAILURES = (UNNAMED, UNEXPLAINED, HANG, WRONG, LEAK)
OUTCOMES = (SURVIVED, STOPPED, NOT_INJECTED, *FAILURES)
EXPLAINED = ("kill", "stop")  # faults whose rank the flight recorder must name
STORE = "store of the process group does not respond (rank 0"
# A resource leaks if its trend over the run exceeds this, in its own unit.
ALLOWED_GROWTH = {
    "rss": 24.0,  # MiB
    "gpu": 16.0,
    "handles": 4.0,
    "threads": 4.0,
    "shared memory": 2.0,
    "children": 2.0,
}
WARM_UP = 0.3  # part of the samples that are left out: caches fill
FEWEST_SAMPLES = 10


class RankEnd(NamedTuple):
    """The end of one rank. An empty `error` means that all numbers were right.

    ranks, place: that the error names, see `UltraEPError`.
    killed, hung: as the supervisor saw it; killed: by the fault.
    """

    rank: int
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()
    place: str = ""
    killed: bool = False
    hung: bool = False


@dataclass(frozen=True)
class Row:
    """The outcome of one fault."""

    fault: Fault
    outcome: str
    detail: str = ""
    seconds: float = 0.0
    errors: dict[int, str] = field(default_factory=dict)
    explanation: str = ""


def classify(
    fault: Fault, ends: Sequence[RankEnd], *, fired: bool, left: Sequence[str]
) -> tuple[str, str]:
    """Return the outcome of a run and what is wrong with it.

    left: files and processes that the run left behind.
    """
    hung = [str(end.rank) for end in ends if end.hung]
    if hung:
        return HANG, f"ranks {', '.join(hung)} did not end"
    for end in ends:
        if end.error == "WrongNumber":
            return WRONG, end.message
    if left:
        return LEAK, f"left behind: {', '.join(left)}"
    errors = [end for end in ends if end.error]
    if not fired:
        if errors:
            return UNNAMED, f"stopped before the fault: {errors[0].error}: {errors[0].message}"
        return NOT_INJECTED, ""
    if not errors and not any(end.killed for end in ends):
        return SURVIVED, ""
    for end in errors:
        missing = _unnamed(fault, end)
        if missing:
            return UNNAMED, f"rank {end.rank} does not name {missing}: {end.error}: {end.message}"
    return STOPPED, ""


def _unnamed(fault: Fault, end: RankEnd) -> str:
    """Return what the error of a rank fails to name."""
    if end.error == "InjectedError" and end.rank == fault.rank:
        return ""  # the user's own error, with its traceback
    culprits = culprits_of(fault, end.rank)
    # Without the store of rank 0, a rank cannot find out who else is missing.
    if not culprits.intersection(end.ranks) and STORE not in end.message:
        return f"rank {', '.join(map(str, sorted(culprits)))}"
    return "" if end.place else "a stage"


def explain(fault: Fault, folder: Path) -> tuple[str, str]:
    """Return the explanation of the flight recorder, and what is wrong with it."""
    try:
        crash = read_crash(crash_folders(folder)[0])
    except (FileError, IndexError) as error:
        return "", f"no flight files: {error}" if fault.kind in EXPLAINED else ""
    explanation = crash.explain()
    if fault.kind in EXPLAINED and crash.culprits != [fault.rank]:
        return explanation, f"the flight recorder names ranks {crash.culprits}: {explanation}"
    return explanation, ""


def culprits_of(fault: Fault, observer: int) -> set[int]:
    """Return the ranks of which an error should name one."""
    if fault.kind == "stop" and fault.rank == observer:
        return set(range(fault.ranks))  # it finds that others have left, because of itself
    if fault.kind not in ("lost messages", "delayed messages"):
        return {fault.rank}
    # A rank may wait for a rank of its own host that waits for the other host.
    return set(range(fault.ranks)) - {observer}


def growing(samples: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, tuple[float, float]]:
    """Return growth over the run and value at the end of each resource that grows too much.

    samples: seconds and resources of one rank. The trend is the median slope of all pairs.
    """
    return {
        name: (growth, last)
        for name, (growth, last) in trends(samples).items()
        if growth > ALLOWED_GROWTH[name]
    }


def trends(samples: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, tuple[float, float]]:
    """Return the growth over the run by its trend, and the value at the end, of all resources."""
    kept = samples[int(len(samples) * WARM_UP) :]
    if len(kept) < FEWEST_SAMPLES:
        return {}
    kept = kept[:: max(1, len(kept) // 200)]
    duration = kept[-1][0] - kept[0][0]
    return {
        name: (
            median((b[1][name] - a[1][name]) / (b[0] - a[0]) for a, b in combinations(kept, 2))
            * duration,
            kept[-1][1][name],
        )
        for name in kept[0][1]
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of the report: kinds of faults by outcome."""
    shown = [o for o in OUTCOMES if o in (SURVIVED, STOPPED) or any(r.outcome == o for r in rows)]
    kinds = list(dict.fromkeys(row.fault.kind for row in rows))
    lines = [[kind, *_counts([r for r in rows if r.fault.kind == kind], shown)] for kind in kinds]
    return ["fault", "runs", *shown], [*lines, ["all", *_counts(rows, shown)]]


def _counts(rows: Sequence[Row], shown: Sequence[str]) -> list[str]:
    return [str(len(rows)), *(str(sum(r.outcome == o for r in rows)) for o in shown)]


def as_record(row: Row) -> dict[str, Any]:
    """Return a row as JSON: the fault, then how its run ended."""
    record: dict[str, Any] = {**vars(row.fault), "outcome": row.outcome, "seconds": row.seconds}
    if row.errors:
        record["errors"] = row.errors
    if row.explanation:
        record["explanation"] = row.explanation
    return record | ({"detail": row.detail} if row.detail else {})
