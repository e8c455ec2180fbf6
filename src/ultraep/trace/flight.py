"""Flight files: the last passes of every rank of a run, written when it crashes or hangs.

Every rank writes `rank-00000.json`, `rank-00001.json`, ... into one folder (`runtime/flight.py`). A
pass is the forward or the backward pass of one microbatch through one layer, or another meeting of
all ranks, such as the measurement of rates. All ranks run the same passes in the same order, so
passes with the same number belong together. `ultraep trace crash` joins the files.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from ultraep.position import moment
from ultraep.trace.schema import BACKWARD, FORWARD

VARIABLE = "ULTRAEP_FLIGHT"  # environment variable: the folder of all flight files, or "off"
OFF = "off"
FORMAT, VERSION = "ultraep-flight", 1
MEETINGS = ("full state", "data plane", "rates", "speeds")  # of all ranks, outside of a pass
KINDS = *_, MEETING = ("forward", "backward", "recomputed forward", "meeting")
STAGES = FORWARD + BACKWARD + MEETINGS
ORDER = {stage: place for part in (FORWARD, BACKWARD, MEETINGS) for place, stage in enumerate(part)}
# Stages in which a rank only computes. In all others it may wait for other ranks.
COMPUTING = ("plan", "reroute", "experts", "recompute", "experts back")
MISMATCH = "PlanMismatch"
FOLLOWING = ("CommunicationError", MISMATCH)  # errors of a rank that others have caused
ERROR, OTHERS = "error", "another rank failed"  # reasons to write a file


def default_folder() -> Path:
    """Return the folder of all flight files: by the environment, or in the temporary directory."""
    named = os.environ.get(VARIABLE, "").strip()
    if named and named.lower() != OFF:
        return Path(named)
    return Path(tempfile.gettempdir()) / f"ultraep-flight-{os.getuid()}"


class Pass(NamedTuple):
    """One pass of one rank, with the names of the columns in a file.

    number: counted from 1, equal on all ranks.   kind: one of `KINDS`.
    layer, step, microbatch: as in a trace.
    stage, open: the last stage, and whether it has not ended.
    began, since: seconds from the begin of the pass, and from its last event, to the writing.
    loads, plan: digests, equal on all ranks; 0: unknown.
    """

    number: int
    layer: int
    step: int
    kind: str
    stage: str
    open: bool
    began: float
    since: float
    loads: int
    plan: int
    microbatch: int = 0  # older files lack it

    @property
    def place(self) -> tuple[int, int, int]:
        """Orders the positions of ranks in the program."""
        return self.number, ORDER[self.stage], not self.open

    @property
    def waits(self) -> bool:
        """Whether the rank may be waiting for others."""
        return self.open and self.stage not in COMPUTING

    @property
    def where(self) -> str:
        """The microbatch, and its pass."""
        kind = "" if self.kind == MEETING else f", {self.kind}"
        return f"layer {self.layer} ({moment(self.step, self.microbatch)}{kind})"

    def __str__(self) -> str:
        return f"{self.stage!r} of {self.where}"


@dataclass(frozen=True)
class FlightFile:
    """The file of one rank.

    balancer: identifies the group of ranks.   global_rank: of torch.distributed; -1: unknown.
    reason: why the file was written.   written: Unix time.
    errors: of this rank, the oldest first.
    stack: of its main thread, if it wrote because another rank failed.
    named: ranks that its errors of communication name as their cause; older files have none.
    """

    balancer: str
    rank: int
    ranks: int
    global_rank: int
    host: str
    pid: int
    reason: str
    written: float
    errors: tuple[str, ...]
    stack: str
    passes: tuple[Pass, ...]
    named: tuple[int, ...] = ()

    @property
    def last(self) -> Pass | None:
        """The pass with the last event; None: no microbatch has begun."""
        return min(self.passes, key=lambda each: (each.since, -each.number), default=None)

    @property
    def since(self) -> float:
        """Seconds from the last event to the writing."""
        return 0.0 if self.last is None else self.last.since

    @property
    def own_error(self) -> str:
        """The first error that no other rank has caused; empty: none."""
        own = (error for error in self.errors if not error.startswith(FOLLOWING))
        return next(own, "")

    def as_json(self) -> str:
        """Return the content of the file."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record |= {"format": FORMAT, "version": VERSION, "columns": Pass._fields}
        return json.dumps(record)
