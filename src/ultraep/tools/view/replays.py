"""Replays: plan the loads of a trace again under other settings, in the background.

In a long trace, only some evenly spaced layers are replanned, each with all of its moments, because
policies may use past loads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.plan import Plan
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.view.catalogue import message_of
from ultraep.tools.view.table import Table, overview, records_to_replan
from ultraep.tools.view.traces import OpenTrace
from ultraep.trace.replay import Case, plans, replayed_plans

MOST_JOBS = 16  # finished jobs included
MOST_WAITING = 4


@dataclass(eq=False)
class ReplayJob:
    """A trace to plan again, the settings, and the progress."""

    number: int
    trace: OpenTrace
    version: int  # of the trace
    case: Case
    done: int = 0
    total: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    future: Future[Numbers] = field(default_factory=Future)

    @property
    def state(self) -> str:
        if not self.future.done():
            return "running" if self.future.running() else "waiting"
        if self.future.exception() is not None:
            return "failed"
        return "stopped" if self.stop.is_set() else "done"

    def to_json(self) -> Numbers:
        """Return the job as the page receives it."""
        facts = {"number": self.number, "state": self.state, "done": self.done, "total": self.total}
        error = self.future.exception() if self.future.done() else None
        answer = self.future.result() if self.future.done() and error is None else {}
        return facts | {"error": message_of(error) if error else "", "answer": answer}

    def run(self) -> Numbers:
        """Plan the records and return the answer."""
        table = self.trace.table
        records = records_to_replan(table.layer)
        self.total = len(records)
        replayed = replayed_plans(self._plans(table, records), self.case)
        records = records[: len(replayed.after)]
        values = {name: getattr(replayed, name) for name in ("before", "after", "copies")}
        for name in ("bytes", "lost", "saved", "cost"):
            values[name] = np.full(len(records), np.nan)
        return {
            "layers": len(np.unique(table.layer[records])),
            "all_layers": len(table.layers[0]),
            "recorded": overview(table.take(records)),
            "replayed": overview(table.take(records, **values)),
            "settings": self.case.settings(),
            "beyond": int(replayed.beyond.sum()),
        }

    def _plans(self, table: Table, records: IntArray) -> Iterator[Plan]:
        keys = map(table.key, records.tolist())
        for plan in plans(map(self.trace.planned, keys), self.case):
            yield plan
            self.done += 1
            if self.stop.is_set():
                return


class Replays:
    """All replays; one runs at a time."""

    def __init__(self) -> None:
        self._jobs: dict[int, ReplayJob] = {}
        self._lock, self._count = threading.Lock(), 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ultraep replay")

    def start(self, trace: OpenTrace, case: Case) -> ReplayJob:
        """Return the job with these settings; start it unless it exists."""
        settings = trace, trace.version, case
        with self._lock:
            states = {job: job.state for job in self._jobs.values()}
            for job, state in states.items():
                usable = state in ("waiting", "running", "done")
                if usable and (job.trace, job.version, job.case) == settings:
                    return job
            waiting = list(states.values()).count("waiting")
            if waiting >= MOST_WAITING:
                raise ConfigError(f"{waiting} replays are waiting: wait, or stop one")
            ended = [job.number for job in states if job.future.done()]
            for number in ended[: max(0, len(states) + 1 - MOST_JOBS)]:
                del self._jobs[number]
            job = self._jobs[self._count] = ReplayJob(self._count, *settings)
            self._count += 1
            job.future = self._worker.submit(job.run)
        return job

    def job(self, number: int) -> ReplayJob:
        if number not in self._jobs:
            raise ConfigError(f"replay {number} does not exist, or is no longer stored")
        return self._jobs[number]

    def close(self) -> None:
        for job in list(self._jobs.values()):
            job.stop.set()
        self._worker.shutdown()  # a job that waits plans one record
