"""Flight recorder: the last passes of a rank in memory, written to a file when an error ends it.

A pass is the forward or backward pass of one microbatch through one layer (`ultraep.passes`), or
another meeting of all ranks. It is here from its begin on, so a file shows the stage in which a
rank hangs. The file of a rank is written when

    a layer, forward or backward, or a comparison with other ranks raises
    an exception ends the program (`sys.excepthook`, chained)
    another rank of the group has failed: the thread of a roll call looks for that, so a rank that
        hangs writes, too, with the stack of its main thread

`ultraep trace crash` joins the files. ULTRAEP_FLIGHT names their folder, or is "off".
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from functools import cache
from pathlib import Path
from types import TracebackType

from ultraep.errors import CommunicationError, FileError
from ultraep.files.writing import write_text
from ultraep.passes import Passes, PassRecord
from ultraep.position import Position
from ultraep.trace.flight import (
    ERROR,
    MEETING,
    OFF,
    OTHERS,
    VARIABLE,
    FlightFile,
    Pass,
    default_folder,
)

PASSES = 256  # that are kept
MOST_ERRORS = 8  # in a file: the first and the last ones
REPEATED = 1.0  # seconds in which the same error is not written again

logger = logging.getLogger(__name__)


class Flight:
    """The last passes of one rank.

    balancer: identifies the group of ranks in file names.
    """

    def __init__(self, balancer: str, rank: int, ranks: int) -> None:
        self._balancer, self._rank, self._ranks = balancer, rank, ranks
        self._passes: deque[PassRecord] = deque(maxlen=PASSES)
        self._count = 0
        self.errors: list[str] = []
        self._named: set[int] = set()  # by errors of communication, as their cause
        self._noted_at = -1.0  # the last event before the last error
        self._written_at = 0.0
        self._lock = threading.Lock()
        _flights[id(self)] = self
        _note_exceptions()

    def close(self) -> None:
        """Write nothing from now on."""
        _flights.pop(id(self), None)

    def add(self, record: PassRecord) -> None:
        """Add a pass that begins."""
        self._count += 1
        record.number = self._count
        self._passes.append(record)

    def meet(self, what: str, place: Position) -> PassRecord:
        """Add a meeting of all ranks outside of a pass; call `at("")` of it when it ends."""
        passes = Passes(place.layer, place.step, microbatch=place.microbatch)
        meeting = PassRecord(passes, MEETING)
        self.add(meeting)
        meeting.at(what)
        return meeting

    def failed(self, error: BaseException) -> None:
        """Note an error and write the file; the same error at an outer place changes nothing."""
        events = (record.timeline[-1][1] for record in [*self._passes] if record.timeline)
        last_event = max(events, default=0.0)
        if last_event == self._noted_at:
            return
        self._noted_at, text = last_event, f"{type(error).__name__}: {error}"
        if self.errors[-1:] == [text] and time.monotonic() < self._written_at + REPEATED:
            return
        self.errors.append(text)
        if isinstance(error, CommunicationError):
            self._named.update(error.ranks)
        if len(self.errors) > MOST_ERRORS:
            del self.errors[MOST_ERRORS // 2]
        self.write(ERROR)

    def write(self, reason: str, stack: str = "") -> Path | None:
        """Write the file of this rank and return its path; None if it cannot be written."""
        with self._lock:
            try:
                path = _folder(self._balancer) / f"rank-{self._rank:05d}.json"
                write_text(path, self._file(reason, stack).as_json())
                self._written_at = time.monotonic()
            except (FileError, OSError) as error:
                logger.warning("rank %d: no flight file: %s", self._rank, error)
                return None
        logger.error(
            "rank %d (%s): last passes in %s; join the ranks with: ultraep trace crash %s",
            *(self._rank, reason, path, path.parent),
        )
        return path

    def _file(self, reason: str, stack: str) -> FlightFile:
        records = [*self._passes]  # at once: the main thread may go on
        passes = [_pass(record) for record in records if record.timeline]
        return FlightFile(
            balancer=self._balancer,
            rank=self._rank,
            ranks=self._ranks,
            global_rank=_global_rank(),
            host=socket.gethostname(),
            pid=os.getpid(),
            reason=reason,
            written=time.time(),
            errors=tuple(self.errors),
            stack=stack,
            passes=tuple(passes),
            named=tuple(sorted(self._named)),
        )


def flight_of(balancer: int, rank: int, ranks: int) -> Flight | None:
    """Return the flight recorder of a rank; None if the environment switches it off."""
    if os.environ.get(VARIABLE, "").strip().lower() == OFF:
        return None
    return Flight(f"{balancer:016x}", rank, ranks)


def _pass(record: PassRecord) -> Pass:
    timeline, now = record.timeline[:], record.clock()
    loads, plan = record.plan_digests()
    return Pass(
        number=record.number,
        layer=record.layer,
        step=record.step,
        kind=record.kind,
        stage=next(stage for stage, _ in reversed(timeline) if stage),
        open=bool(timeline[-1][0]),
        began=now - timeline[0][1],
        since=now - timeline[-1][1],
        loads=loads,
        plan=plan,
        microbatch=record.microbatch,
    )


def _folder(balancer: str) -> Path:
    """Create and return the folder of one group of ranks; refuse a folder of another user."""
    parent = default_folder()
    folder = parent / balancer
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.environ.get(VARIABLE):
        status = parent.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise FileError(f"{parent}: not a folder of this user; set {VARIABLE} to a folder")
    return folder


def _global_rank() -> int:
    rank = os.environ.get("RANK", "")  # as torchrun sets it
    return int(rank) if rank.isdecimal() else -1


# -- the process ---------------------------------------------------------------------------------

_flights: weakref.WeakValueDictionary[int, Flight] = weakref.WeakValueDictionary()


def write_for_others() -> None:
    """Write the files of all balancers of this process, because another rank has failed."""
    stack = _stack_of_main_thread()
    for flight in _all():
        if not flight.errors:
            flight.write(OTHERS, stack)


def _stack_of_main_thread() -> str:
    """Return where the main thread is, the innermost frame first, as faulthandler writes it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [(f.f_code, line) for f, line in traceback.walk_stack(frame)] if frame else []
    return "".join(f'  File "{c.co_filename}", line {line} in {c.co_name}\n' for c, line in frames)


def _all() -> list[Flight]:
    references = _flights.valuerefs()  # at once: other threads create balancers
    return [flight for reference in references if (flight := reference()) is not None]


@cache
def _note_exceptions() -> None:
    """Write files when an exception ends the program; called once in a process."""
    previous = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for flight in _all():
            flight.failed(error)
        previous(kind, error, trace)

    sys.excepthook = note


os.register_at_fork(after_in_child=_flights.clear)
