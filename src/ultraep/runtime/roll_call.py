"""Roll call: after a failure, find the ranks that are missing, through the group's store.

gloo reports that a connection closed or that time ran out, but not which rank caused it. So every
rank of a communicator over sockets runs a thread that looks into the store of the process group
twice a second. A rank that fails writes a question there. The threads of the other ranks answer
with the number of collective calls that their rank has entered:

    no answer                 the rank died, is stopped, left, or has not joined yet
    fewer calls than here     the rank is alive, and has not reached this call

The first rank to find the cause stores it, so that later failures report the same cause.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

LOOK = 0.5  # seconds between two looks for a question
GRACE = 6.0  # seconds that an answer may take
PAUSE = 0.02  # seconds between two looks for answers
CAUSE = "cause"
NO_STORE = (
    "the store of the process group does not respond (rank 0 hosts it, unless a launcher does)"
)

# By the ranks of a group: its members make communicators in the same order. Never reset, so that
# a store that outlives a group holds no keys of the next one.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


@dataclass
class _Answering:
    """What the thread of a rank needs; it must not keep the communicator alive."""

    store: Any
    rank: int
    calls: int = 0
    closed: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            store = self.store.clone()  # a connection of its own: others may block theirs
            while not self.closed.wait(LOOK):
                if store.check([f"question/{self.rank}"]):
                    store.set(f"answer/{self.rank}", str(self.calls))
                    return
        except RuntimeError:  # the store is gone, so no rank can ask any more
            return


class RollCall:
    """What one rank knows of the others in case of a failure."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        number = next(_numbers[tuple(dist.get_process_group_ranks(group))])
        store = distributed_c10d._get_process_group_store(group)
        prefix = f"ultraep/{number}"
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._answering = _Answering(self._store, rank)
        thread = threading.Thread(target=self._answering.run, daemon=True, name="ultraep roll call")
        self.close = weakref.finalize(self, _end, thread, self._answering.closed)
        if size > 1:
            thread.start()

    def enter(self) -> None:
        """Count a collective call."""
        self._answering.calls += 1

    def missing(self) -> str:
        """Say which ranks are missing; empty if all of them are here. Takes up to some seconds."""
        found: list[str] = []
        thread = threading.Thread(target=self._ask, args=(found,), daemon=True)
        thread.start()  # a store whose host is stopped never returns
        thread.join(GRACE + 1)
        return found[0] if found else NO_STORE

    def _ask(self, found: list[str]) -> None:
        try:
            if not self._store.check([CAUSE]):
                cause = self._cause(self._answers())
                if cause:  # unless another rank was quicker
                    self._store.compare_set(CAUSE, "", cause)
            known = self._store.check([CAUSE])
            found.append(self._store.get(CAUSE).decode() if known else "")
        except RuntimeError:
            return

    def _answers(self) -> dict[int, int]:
        """Collective calls of the other ranks, as far as they answer in time."""
        waiting = [rank for rank in range(self._size) if rank != self._rank]
        for rank in waiting:
            self._store.set(f"question/{rank}", "")
        answers: dict[int, int] = {}
        until = time.monotonic() + GRACE
        while waiting and time.monotonic() < until:
            for rank in [rank for rank in waiting if self._store.check([f"answer/{rank}"])]:
                answers[rank] = int(self._store.get(f"answer/{rank}"))
                waiting.remove(rank)
            time.sleep(PAUSE)
        return answers

    def _cause(self, answers: dict[int, int]) -> str:
        others = [rank for rank in range(self._size) if rank != self._rank]
        gone = [rank for rank in others if rank not in answers]
        behind = [rank for rank, calls in answers.items() if calls < self._answering.calls]
        parts = []
        if gone:
            parts.append(f"no response from {_named(gone)} (died, stopped, left or not there yet)")
        if behind:
            parts.append(f"{_named(behind)} did not reach this call")
        return "; ".join(parts)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _end(thread: threading.Thread, closed: threading.Event) -> None:
    """End a thread before the interpreter does, which would leave it inside of the store."""
    closed.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(LOOK)
