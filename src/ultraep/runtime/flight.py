"""Flight recorder: the last passes of a rank in memory, written to a file when an error ends it.

A pass is the forward or backward pass of one microbatch through one layer, or another meeting of
all ranks. Every event stores a few integers in a ring that was allocated once. The file of a rank
is written when

    a stage, or a comparison with other ranks, raises
    an exception ends the program (`sys.excepthook`, chained)
    another rank of the group has failed: the thread of a roll call looks for that, so a rank that
        hangs writes, too
    the process receives SIGUSR1, unless the program uses this signal itself

`ultraep trace crash` joins the files (`ultraep.tools.crash`). ULTRAEP_FLIGHT names their folder, or
is "off".
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from ultraep.arrays import digest_of
from ultraep.errors import CommunicationError, FileError
from ultraep.files.writing import write_text
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import Plan
from ultraep.trace.flight import (
    ERROR,
    KINDS,
    OFF,
    OTHERS,
    SIGNAL,
    STAGES,
    VARIABLE,
    FlightFile,
    Pass,
    default_folder,
)

PASSES = 256  # in the ring
# Words of a pass. AROUND: the stage around the current one, or -1. Times are nanoseconds.
NUMBER, LAYER, STEP, KIND, STAGE, OPEN, AROUND, BEGAN, CHANGED, LOADS, PLAN, WIDTH = range(12)
FORWARD_PASS, BACKWARD_PASS, RECOMPUTED_PASS, MEETING = range(len(KINDS))
INDEX = {stage: index for index, stage in enumerate(STAGES)}
MOST_ERRORS = 8  # in a file: the first and the last ones
REPEATED = 1.0  # seconds in which the same error is not written again
STACK_PAUSE = 0.05  # seconds in which a stack arrives
MOST_STACK = 1 << 16  # bytes

logger = logging.getLogger(__name__)


class Flight:
    """The ring of one rank: an observer of stages, and a sink of plans.

    balancer: identifies the group of ranks in file names.
    """

    def __init__(self, balancer: str, rank: int, ranks: int) -> None:
        self._balancer, self._rank, self._ranks = balancer, rank, ranks
        self._words = array("q", bytes(8 * PASSES * WIDTH))
        self._number = 0
        self.errors: list[str] = []
        self._named: set[int] = set()  # by errors of communication, as their cause
        self._noted_at = -1  # the last event before the last error
        self._written_at = 0.0
        self._lock = threading.Lock()
        _flights[id(self)] = self
        _listen()

    def close(self) -> None:
        """Write nothing from now on."""
        _flights.pop(id(self), None)

    # As an observer:

    def begin(self, stage: str, microbatch: MicrobatchInfo) -> None:
        words, number = self._words, microbatch.flight_pass
        at, now = number % PASSES * WIDTH, time.monotonic_ns()
        if words[at] != number or (microbatch.in_backward and words[at + KIND] != BACKWARD_PASS):
            kind = RECOMPUTED_PASS if microbatch.recomputed else FORWARD_PASS
            kind = BACKWARD_PASS if microbatch.in_backward else kind
            at = self._new(kind, microbatch.layer, microbatch.step, now)
            microbatch.flight_pass = self._number
        elif words[at + OPEN]:
            words[at + AROUND] = words[at + STAGE]
        words[at + STAGE] = INDEX[stage]
        words[at + OPEN], words[at + CHANGED] = 1, now

    def end(self, _stage: str, microbatch: MicrobatchInfo) -> None:
        words, number = self._words, microbatch.flight_pass
        at = number % PASSES * WIDTH
        if words[at] == number:
            around = words[at + AROUND]
            if around < 0:
                words[at + OPEN] = 0
            else:
                words[at + STAGE], words[at + AROUND] = around, -1
            words[at + CHANGED] = time.monotonic_ns()

    def planned(self, microbatch: MicrobatchInfo, plan: Any) -> None:
        """Store digests, unless they are known; a plan on a device comes again, on the host."""
        at = microbatch.flight_pass % PASSES * WIDTH
        if not self._words[at + PLAN]:
            self.note_plan(microbatch, plan)

    def note_plan(self, microbatch: MicrobatchInfo, plan: Any) -> None:
        """Store the digests of a plan that is on the host."""
        words, number = self._words, microbatch.flight_pass
        at = number % PASSES * WIDTH
        if words[at] == number and isinstance(plan, Plan):
            words[at + LOADS] = digest_of(plan.loads)
            words[at + PLAN] = digest_of(plan.replicas, plan.quotas)

    def sent(self, *_: object) -> None:
        """Nothing to store."""

    # As a sink:

    def took(self, *_: object) -> None:
        """Nothing to store."""

    def passed(self, *_: object) -> None:
        """Nothing to store."""

    # Outside of microbatches:

    def meet(self, what: str, layer: int, step: int) -> Callable[[], None]:
        """Note that all ranks meet outside of a pass; return a function that ends the meeting."""
        words, at = self._words, self._new(MEETING, layer, step, time.monotonic_ns())
        number, words[at + STAGE], words[at + OPEN] = self._number, INDEX[what], 1

        def end() -> None:
            if words[at] == number:
                words[at + OPEN], words[at + CHANGED] = 0, time.monotonic_ns()

        return end

    def failed(self, error: BaseException) -> None:
        """Note an error and write the file; the same error at an outer place changes nothing."""
        last_event = max(self._words[CHANGED::WIDTH])
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

    def _new(self, kind: int, layer: int, step: int, now: int) -> int:
        """Begin a pass in the ring; return its place."""
        words, number = self._words, self._number + 1
        at = number % PASSES * WIDTH
        words[at] = 0  # invalid until it is complete, for a thread that writes
        words[at + LAYER], words[at + STEP], words[at + KIND] = layer, step, kind
        words[at + OPEN], words[at + AROUND], words[at + LOADS], words[at + PLAN] = 0, -1, 0, 0
        words[at + BEGAN] = words[at + CHANGED] = now
        words[at] = self._number = number
        return at

    def _file(self, reason: str, stack: str) -> FlightFile:
        words, now = self._words[:], time.monotonic_ns()
        rows = (words[at : at + WIDTH] for at in range(0, len(words), WIDTH))
        passes = [
            Pass(
                number=row[NUMBER],
                layer=row[LAYER],
                step=row[STEP],
                kind=KINDS[row[KIND]],
                stage=STAGES[row[STAGE]],
                open=bool(row[OPEN]),
                began=(now - row[BEGAN]) / 1e9,
                since=(now - row[CHANGED]) / 1e9,
                loads=row[LOADS],
                plan=row[PLAN],
            )
            for row in rows
            if row[NUMBER]
        ]
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
            passes=tuple(sorted(passes)),
            named=tuple(sorted(self._named)),
        )


def flight_of(balancer: int, rank: int, ranks: int) -> Flight | None:
    """Return the flight recorder of a rank; None if the environment switches it off."""
    if os.environ.get(VARIABLE, "").strip().lower() == OFF:
        return None
    return Flight(f"{balancer:016x}", rank, ranks)


def note_failure(observers: Iterable[object], error: BaseException | None) -> None:
    """Note an error in the flight recorder, if there is one."""
    if error is not None:
        for observer in observers:
            if isinstance(observer, Flight):
                observer.failed(error)


class NotingFailures:
    """A block whose error is noted in the flight recorder."""

    def __init__(self, observers: Iterable[object]) -> None:
        self._observers = observers

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        note_failure(self._observers, error)


def note_plan(observers: Iterable[object], microbatch: MicrobatchInfo, plan: Any) -> None:
    """Note a plan before ranks compare their plans."""
    for observer in observers:
        if isinstance(observer, Flight):
            observer.note_plan(microbatch, plan)


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
_registered: list[int] = []  # signals that this module handles


def write_for_others() -> None:
    """Write the files of all balancers of this process, because another rank has failed."""
    for flight in _all():
        if not flight.errors:
            flight.write(OTHERS)


def _all() -> list[Flight]:
    references = _flights.valuerefs()  # at once: other threads create balancers
    return [flight for reference in references if (flight := reference()) is not None]


@cache
def _listen() -> None:
    """Start the thread that writes files while the main thread hangs, once in a process."""
    ask, asked = os.pipe()
    for descriptor in (ask, asked):
        os.set_blocking(descriptor, False)
    if _signal_is_free():
        # Its handler is C code: it runs while the main thread waits in a collective.
        faulthandler.register(signal.SIGUSR1, file=asked, all_threads=False)
        _registered.append(signal.SIGUSR1)
    else:
        logger.info("SIGUSR1 has a handler: call balancer.flight.write() there")
    previous = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for flight in _all():
            flight.failed(error)
        previous(kind, error, trace)

    sys.excepthook = note
    threading.Thread(target=_answer, args=(ask,), daemon=True, name="ultraep flight").start()


def _signal_is_free() -> bool:
    """Whether SIGUSR1 has its default action, as far as this process can find out."""
    if not hasattr(faulthandler, "register") or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        return False
    with suppress(OSError):  # handlers of C code, such as faulthandler's own
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> signal.SIGUSR1 - 1 & 1:
                return False
    return True


def _forget() -> None:
    """In a forked child: give the signal back, until the child creates a balancer itself."""
    while _registered:
        faulthandler.unregister(_registered.pop())
    _flights.clear()
    _listen.cache_clear()


os.register_at_fork(after_in_child=_forget)


def _answer(ask: int) -> None:
    """Write files on request."""
    poll = select.poll()
    poll.register(ask, select.POLLIN)
    while True:
        poll.poll()
        time.sleep(STACK_PAUSE)
        stack = os.read(ask, MOST_STACK).decode("utf-8", "replace")
        for flight in _all():
            flight.write(SIGNAL, stack)
