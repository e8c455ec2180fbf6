"""Coverage-guided fuzzing in pure Python: inputs that reach new lines are kept and changed again.

atheris has no wheels for ARM and builds only with clang; `sys.settrace` works everywhere. Only
lines of the package are traced. A run is a function of its seed and of the number of inputs.
"""

from __future__ import annotations

import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from damage import damaged

import ultraep
from ultraep import UltraEPError

PACKAGE = str(Path(ultraep.__file__).parent)
SECONDS = 10  # of CPU time for one input, after which it counts as a hang
ON_A_BUSY_MACHINE = 12  # times as long by the clock
GIGABYTE = 1 << 30  # of memory, for all inputs together
LONGEST = 1 << 16  # bytes of an input that is kept
DIGITS = b"7" * 9999  # int() refuses so many
SPLICED = 0.1  # share of inputs that end like another one
FRESH = 0.5  # share of inputs that are changed from a valid one
NO_MEMORY = re.compile("out of memory|MemoryError|Unable to allocate|can't allocate")
Mutate = Callable[[bytes, random.Random], bytes]


class TooSlow(BaseException):
    """An input takes too long. Not an `Exception`, so that no reader takes it for damage."""


class Coverage:
    """Pairs of successive lines of the files in a folder that were executed."""

    def __init__(self, root: str = PACKAGE) -> None:
        self._root = root
        self.pairs: set[tuple[int, int, int]] = set()
        self._new = False

    def of(self, call: Callable[[], Any]) -> bool:
        """Return whether a call executed a new pair of lines; exceptions pass."""
        before = sys.gettrace()
        self._new = False
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)
        return self._new

    def _enter(self, frame: FrameType, _event: str, _value: Any) -> Any:
        code, pairs = frame.f_code, self.pairs
        if not code.co_filename.startswith(self._root):
            return None
        number, previous = id(code), 0

        def at_line(frame: FrameType, event: str, _value: Any) -> Any:
            nonlocal previous
            if event == "line":
                pair = (number, previous, frame.f_lineno)
                previous = frame.f_lineno
                if pair not in pairs:
                    pairs.add(pair)
                    self._new = True
            return at_line

        return at_line

    @property
    def new(self) -> bool:
        """Whether the last call executed a new pair of lines."""
        return self._new


@dataclass(frozen=True)
class Finding:
    """An input that ended in another way than a reader may."""

    target: str
    number: int
    content: bytes
    problem: str


@dataclass
class Target:
    """A reader: valid inputs, and a function that reads one and raises errors of our tree.

    share: how often it gets an input, compared with others.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    mutate: Mutate = damaged
    share: int = 4
    kept: list[bytes] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds of CPU time

    def step(self, number: int, seed: int, coverage: Coverage) -> Finding | None:
        """Read one changed input; return it if it failed."""
        rng = random.Random(f"{seed} {self.name} {number}")
        old = not self.kept or rng.random() < FRESH
        content = self.mutate(rng.choice(self.seeds if old else self.kept), rng)
        if self.mutate is damaged and rng.random() < SPLICED:
            other = rng.choice((*self.seeds, DIGITS, *self.kept[-9:]))
            at, to = rng.randint(0, len(content)), rng.randint(0, len(other))
            content = content[:at] + other[to:]
        begin = time.process_time()  # the machine may be busy
        problem = outcome(lambda: coverage.of(lambda: self.read(content)))
        spent = time.process_time() - begin
        self.slowest = max(self.slowest, spent)
        if spent > SECONDS and problem in ("read", "refused"):
            problem = f"{problem} after {spent:.1f} s"  # nothing interrupted it
        if coverage.new and len(content) <= LONGEST:
            self.kept.append(content)
        if problem in ("read", "refused"):
            self.ends[problem] += 1
            return None
        self.ends["failed"] += 1
        return Finding(self.name, number, content, problem)


def outcome(read: Callable[[], Any]) -> str:
    """Return "read", "refused", or the description of a failure."""
    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(ON_A_BUSY_MACHINE * SECONDS)
    signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        read()
    except UltraEPError as error:
        text = str(error)
        if NO_MEMORY.search(text):
            return f"takes too much memory: {text}"
        return "refused" if text and len(text.splitlines()) == 1 else f"not one line: {text!r}"
    except (Exception, TooSlow):  # noqa: BLE001  any other exception is a failure
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "read"


def too_slow(*_: object) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def schedule(targets: Sequence[Target], seed: int) -> list[Target]:
    """Return a round: every target as often as its share, shuffled."""
    entries = [target for target in targets for _ in range(target.share)]
    random.Random(seed).shuffle(entries)
    return entries


def limit_memory() -> None:
    """Allow one gigabyte more than this process uses now."""
    with open("/proc/self/status", encoding="ascii") as status:
        taken = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + GIGABYTE, resource.RLIM_INFINITY))
