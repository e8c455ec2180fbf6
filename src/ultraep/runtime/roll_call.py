"""Finds the ranks that are missing after a failure of torch.distributed.

gloo reports that a connection closed or timed out, but not which rank caused it. So every rank runs
a thread that polls the store of the process group twice a second (`RollCall`). A rank that fails
writes a question there. The threads of the other ranks answer with the number of collective calls
that their rank has entered, and the seconds since it entered the last one:

    no answer                 the rank died, is stopped, left, or has not joined yet
    fewer calls than here     the rank is alive, and has not reached this call
    as many calls             the rank has reached this call, perhaps too late

A rank that waits for other ranks elsewhere is not the cause as long as another rank is missing. So
a part of a group whose ranks all wait asks the whole group. The first rank to find the cause stores
it, so that later failures report the same cause. A group and its parts store one cause.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ultraep.runtime.flight import write_for_others

POLL = 0.5  # seconds between two polls for a question
GRACE = 6.0  # seconds to wait for answers
PAUSE = 0.02  # seconds between two polls for answers
CAUSE = "cause"
NO_STORE = (
    "the store of the process group does not respond (rank 0 hosts it, unless a launcher does)"
)

# By the ranks of a group: its members create communicators in the same order. Never reset, so that
# a store that outlives a group holds no keys of the next one.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


@dataclass
class _Answering:
    """The state of the thread that answers; it must not keep the communicator alive."""

    store: Any
    rank: int
    waiting: threading.Event  # set while this rank waits in a call, also of a part of the group
    calls: int = 0
    entered: float = 0.0  # when the last call began
    closed: threading.Event = field(default_factory=threading.Event)

    def waited(self) -> float:
        """Seconds since the last collective call began."""
        return time.monotonic() - self.entered

    def run(self) -> None:
        try:
            store = self.store.clone()  # a separate connection: other threads may block theirs
            pings = 0
            while not self.closed.wait(POLL):
                if (asked := store.add(f"ping/{self.rank}", 0)) > pings:
                    pings = asked
                    store.set(f"pong/{self.rank}", str(pings))
                if store.check([f"question/{self.rank}"]):
                    answer = _Answer(self.calls, self.waited(), self.waiting.is_set())
                    store.set(f"answer/{self.rank}", json.dumps(answer))
                    write_for_others()
                    return
        except RuntimeError:  # the store is gone, so no rank can ask any more
            return


class Cause(NamedTuple):
    """Why a call failed: the missing ranks, counted as in errors, and what is known of them."""

    text: str = ""
    ranks: Sequence[int] = ()


class _Answer(NamedTuple):
    """The collective calls of a rank, seconds since the last one began, whether it waits now."""

    calls: int
    waited: float
    waiting: bool


class RollCall:
    """Finds the missing ranks after a failure.

    names, first_rank: of the ranks, and the number of rank 0, for errors.
    whole: the roll call of the group that this group is a part of.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        first_rank: int = 0,
        whole: RollCall | None = None,
    ) -> None:
        self._rank, self._size, self._names = dist.get_rank(group), len(names), names
        self._first_rank, self._whole = first_rank, whole
        number = next(_numbers[tuple(dist.get_process_group_ranks(group))])
        store = distributed_c10d._get_process_group_store(group)
        prefix = f"ultraep/{number}"
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._causes: Any = self._store if whole is None else whole._causes
        self._waiting: threading.Event = threading.Event() if whole is None else whole._waiting
        self._answering = _Answering(self._store, self._rank, self._waiting)
        thread = threading.Thread(target=self._answering.run, daemon=True, name="ultraep roll call")
        self.close = weakref.finalize(self, _end, thread, self._answering.closed)
        if self._size > 1:
            thread.start()

    def enter(self, *, counted: bool) -> None:
        """Note that this rank waits in a call; count it if it is collective."""
        self._waiting.set()
        if counted:
            self._answering.calls += 1
            self._answering.entered = time.monotonic()

    def leave(self) -> None:
        """Note that the call has ended."""
        self._waiting.clear()

    def missing(self) -> Cause:
        """Return which ranks are missing. May take some seconds."""
        return self._in_time(self._ask) or Cause(NO_STORE)

    def dead(self) -> Cause:
        """Return which ranks do not answer; unlike `missing`, no rank takes it for a failure."""
        return self._in_time(self._ping) or Cause()

    def _ping(self) -> Cause:
        others = [rank for rank in range(self._size) if rank != self._rank]
        pings = {rank: self._store.add(f"ping/{rank}", 1) for rank in others}
        until = time.monotonic() + GRACE
        while pings and time.monotonic() < until:
            for rank, number in [*pings.items()]:
                pong = f"pong/{rank}"
                if self._store.check([pong]) and int(self._store.get(pong)) >= number:
                    del pings[rank]
            time.sleep(PAUSE)
        dead = sorted(pings)
        text = f"{self._listed(dead)} died, or left" if dead else ""
        return Cause(text, [self._first_rank + rank for rank in dead])

    def note(self, ranks: Sequence[int]) -> None:
        """Store that this rank gave up because of others, unless a cause is stored."""
        if ranks:
            listed = ", ".join(map(str, ranks))
            text = f"{self._names[self._rank]} gave up, because of rank {listed}"
            self._in_time(lambda: self._store_cause(Cause(text, ranks)))

    def _store_cause(self, cause: Cause) -> None:
        """Store a cause, unless another rank has stored one."""
        self._causes.compare_set(CAUSE, "", json.dumps(cause))

    def _in_time(self, work: Callable[[], Any]) -> Any:
        """Return the result of work with the store; None if its host is stopped or gone."""
        results: list[Any] = []

        def safely() -> None:
            with suppress(RuntimeError):
                results.append(work())

        thread = threading.Thread(target=safely, daemon=True)
        thread.start()
        thread.join(GRACE + 2)
        return results[0] if results else None

    def _ask(self) -> Cause:
        if not self._causes.check([CAUSE]):
            cause = self._find()
            if cause.text:
                self._store_cause(cause)
        known = self._causes.check([CAUSE])
        return Cause(*json.loads(self._causes.get(CAUSE))) if known else Cause()

    def _answers(self) -> dict[int, _Answer]:
        """Return the answers of the ranks that answer in time."""
        waiting = [rank for rank in range(self._size) if rank != self._rank]
        for rank in waiting:
            self._store.set(f"question/{rank}", "")
        answers: dict[int, _Answer] = {}
        until = time.monotonic() + GRACE
        while waiting and time.monotonic() < until:
            for rank in [rank for rank in waiting if self._store.check([f"answer/{rank}"])]:
                answers[rank] = _Answer(*json.loads(self._store.get(f"answer/{rank}")))
                waiting.remove(rank)
            time.sleep(PAUSE)
        return answers

    def _find(self) -> Cause:
        answers = self._answers()
        gone = [rank for rank in range(self._size) if rank not in (self._rank, *answers)]
        behind = [rank for rank, other in answers.items() if other.calls < self._answering.calls]
        late = [rank for rank in behind if not answers[rank].waiting]
        if not gone and not late:
            cause = Cause() if self._whole is None else self._whole._find()
            if cause.text:
                return cause
            late = behind
        parts = []
        if gone:
            parts.append(
                f"no response from {self._listed(gone)} (died, stopped, left or not there yet)"
            )
        if late:
            parts.append(f"{self._listed(late)} did not reach this call")
        if not parts:
            return self._last_to_enter(answers)
        return Cause("; ".join(parts), [self._first_rank + rank for rank in gone + late])

    def _last_to_enter(self, answers: dict[int, _Answer]) -> Cause:
        """Return the rank that entered this call last, if it made another rank wait."""
        waited = {rank: answer.waited for rank, answer in answers.items()}
        waited[self._rank] = self._answering.waited()
        first, last = max(waited, key=waited.__getitem__), min(waited, key=waited.__getitem__)
        late = waited[first] - waited[last]
        if late < waited[first] / 2 or first == last:
            return Cause()
        text = f"{self._names[last]} entered this call {late:.1f} s after {self._names[first]}"
        return Cause(text, [self._first_rank + last])

    def _listed(self, ranks: list[int]) -> str:
        plural = "s" * (len(ranks) > 1)
        names = (self._names[rank].removeprefix("rank ") for rank in ranks)
        return f"rank{plural} {', '.join(names)}"


def _end(thread: threading.Thread, closed: threading.Event) -> None:
    """End the thread before the interpreter does, which would leave it inside of the store."""
    closed.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(POLL)
