"""Replays: plan the loads of a trace again under other settings, in the background.

In a long trace, only some evenly spaced layers are replanned, each with all of its moments, because
policies may use past loads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, UltraEPError
from ultraep.plan import Plan
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.view.table import Table, overview
from ultraep.tools.view.traces import OpenTrace
from ultraep.trace.replay import Case, plans, replayed_plans

MOST_PLANS = 4000  # records that are planned again
MOST_JOBS = 16  # finished jobs included
MOST_WAITING = 4


@dataclass(eq=False)
class ReplayJob:
    """A trace to plan again, the settings, the progress, and the answer."""

    number: int
    trace: OpenTrace
    version: int  # of the trace
    case: Case
    state: str = "waiting"  # running, done, stopped, failed
    done: int = 0
    total: int = 0
    error: str = ""
    answer: Numbers = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def to_json(self) -> Numbers:
        """Return the job as the page receives it."""
        names = ("number", "state", "done", "total", "error", "answer")
        return {name: getattr(self, name) for name in names}

    def run(self) -> None:
        """Plan the records; an error becomes the state "failed"."""
        try:
            self.state = "running"
            self.answer = self._answer()
            self.state = "stopped" if self.stop.is_set() else "done"
        except (UltraEPError, OSError) as error:
            self.error, self.state = str(error), "failed"
        finally:
            if self.state == "running":  # a bug; the executor keeps the exception
                self.error, self.state = "an error of ultraep, please report it", "failed"

    def _answer(self) -> Numbers:
        table = self.trace.table
        records = records_to_replan(table)
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

    def ask(self, trace: OpenTrace, case: Case) -> ReplayJob:
        """Return the job with these settings; start it unless there is one."""
        wanted = trace, trace.version, case
        with self._lock:
            for job in self._jobs.values():
                current = job.state in ("waiting", "running", "done")
                if current and (job.trace, job.version, job.case) == wanted:
                    return job
            waiting = sum(job.state == "waiting" for job in self._jobs.values())
            if waiting >= MOST_WAITING:
                raise ConfigError(f"{waiting} replays are waiting: wait, or stop one")
            job = ReplayJob(self._count, *wanted)
            self._jobs[job.number], self._count = job, self._count + 1
            over = [job for job in self._jobs.values() if job.state not in ("waiting", "running")]
            for old in over[: max(0, len(self._jobs) - MOST_JOBS)]:
                del self._jobs[old.number]
        self._worker.submit(job.run)
        return job

    def job(self, number: int) -> ReplayJob:
        if number not in self._jobs:
            raise ConfigError(f"replay {number} does not exist")
        return self._jobs[number]

    def close(self) -> None:
        for job in list(self._jobs.values()):
            job.stop.set()
        self._worker.shutdown(cancel_futures=True)


def records_to_replan(table: Table, most: int = MOST_PLANS) -> IntArray:
    """Return the records to replan, in order of time: all layers, or some evenly spaced ones."""
    names, place_N = table.layers
    if not len(names):
        raise ConfigError("nothing to replay: the trace has no records")
    keep = max(1, min(len(names), most * len(names) // len(table)))
    chosen = np.linspace(0, len(names) - 1, keep).round().astype(int)
    return np.flatnonzero(np.isin(place_N, chosen))
