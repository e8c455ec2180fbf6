"""How a run ended: classification of faults, and of resources that grow.

    survived       all numbers are right
    stopped        every rank that could report an error named the rank of the fault and a stage
    not injected   the run ended before the stage of the fault began
    unnamed error  an error does not name both, or `ultraep trace crash` names another rank
    hang           a rank did not end by itself
    wrong number   a loss or gradient differs from the twin
    leak           shared memory or processes were left behind, or resources grow over time

The last four are failures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from soak.schedule import Fault

from ultraep.errors import FileError
from ultraep_tools.crash import crash_folders, read_crash

SURVIVED, STOPPED, NOT_INJECTED = "survived", "stopped", "not injected"
UNNAMED, HANG, WRONG, LEAK = "unnamed error", "hang", "wrong number", "leak"
FAILURES = (UNNAMED, HANG, WRONG, LEAK)
OUTCOMES = (SURVIVED, STOPPED, NOT_INJECTED, *FAILURES)
EXPLAINED = ("kill", "stop")  # faults whose rank the flight recorder must name
STORE = "store of the process group does not respond (rank 0"
# A resource leaks if it grows by more than this, in its own unit.
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
    fault: Fault
    outcome: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.outcome:<13} {self.fault}" + (f": {self.detail}" if self.detail else "")

    def as_record(self) -> dict[str, Any]:
        """Return a row for JSON: the fault, then how its run ended."""
        record = {"benchmark": "soak", **vars(self.fault), **vars(self)}
        return {name: value for name, value in record.items() if name != "fault" and value != ""}


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


def misexplained(fault: Fault, folder: Path) -> str:
    if fault.kind not in EXPLAINED:
        return ""
    try:
        crash = read_crash(crash_folders(folder)[0])
    except (FileError, IndexError) as error:
        return f"no flight files: {error}"
    wrong = crash.culprits != [fault.rank]
    return f"trace crash names ranks {crash.culprits}: {crash.explain()}" if wrong else ""


def culprits_of(fault: Fault, observer: int) -> set[int]:
    """Return the ranks of which an error should name one."""
    if fault.kind == "stop" and fault.rank == observer:
        return set(range(fault.ranks))  # it finds that others have left, because of itself
    if fault.kind not in ("lost messages", "delayed messages"):
        return {fault.rank}
    # A rank may wait for a rank of its own host that waits for the other host.
    return set(range(fault.ranks)) - {observer}


def growth(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return how much every resource of a rank grew from the first third to the last, in medians.

    Samples of the warm-up do not count. Of few samples the result is empty.
    """
    kept = samples[int(len(samples) * WARM_UP) :]
    third = len(kept) // 3
    if len(kept) < FEWEST_SAMPLES:
        return {}
    ends = kept[:third], kept[-third:]
    first, last = ({n: median(s[n] for s in part) for n in kept[0]} for part in ends)
    return {name: last[name] - first[name] for name in last}
