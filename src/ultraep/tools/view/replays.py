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
from ultraep.policies import get_policy
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.table import Table, overview
from ultraep.trace.read import Trace
from ultraep.trace.replay import Case, cases, plans_of, replayed_plans
from ultraep.trace.schema import Header

MOST_PLANS = 4000  # records that are planned again
MOST_JOBS = 16  # finished jobs included
MOST_WAITING = 4


@dataclass(frozen=True)
class Question:
    """The trace to plan again, and the settings; None keeps the recorded one."""

    trace: str
    policy: str
    slots: int | None = None
    ranks: int | None = None
    history: int = 1
    tolerance: float | None = None


@dataclass(eq=False)
class ReplayJob:
    """A question, its progress, and its answer."""

    number: int
    question: Question
    version: int  # of the trace
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


class Replays:
    """Replays of the traces of a catalogue, one after the other."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue, self._jobs = catalogue, dict[int, ReplayJob]()
        self._lock, self._count = threading.Lock(), 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ultraep replay")

    def ask(self, question: Question) -> ReplayJob:
        """Return the job of a question; start it unless there is one."""
        trace = self._catalogue.trace(question.trace)
        case_of(question, trace.header)  # refuse invalid settings at once
        wanted = question, trace.version
        with self._lock:
            for job in self._jobs.values():
                current = job.state in ("waiting", "running", "done")
                if current and (job.question, job.version) == wanted:
                    return job
            waiting = sum(job.state == "waiting" for job in self._jobs.values())
            if waiting >= MOST_WAITING:
                raise ConfigError(f"{waiting} replays are waiting: wait, or stop one")
            job = ReplayJob(self._count, *wanted)
            self._jobs[job.number], self._count = job, self._count + 1
            over = [job for job in self._jobs.values() if job.state not in ("waiting", "running")]
            for old in over[: max(0, len(self._jobs) - MOST_JOBS)]:
                del self._jobs[old.number]
        self._worker.submit(self._work, job)
        return job

    def job(self, number: int) -> ReplayJob:
        """Return the job of this number."""
        if number not in self._jobs:
            raise ConfigError(f"there is no replay {number}")
        return self._jobs[number]

    def close(self) -> None:
        """Stop all jobs."""
        for job in list(self._jobs.values()):
            job.stop.set()
        self._worker.shutdown(cancel_futures=True)

    def _work(self, job: ReplayJob) -> None:
        try:
            job.state = "running"
            job.answer = self._answer(job)
            job.state = "stopped" if job.stop.is_set() else "done"
        except (UltraEPError, OSError) as error:
            job.error, job.state = str(error), "failed"
        finally:
            if job.state == "running":  # a bug; the executor keeps the exception
                job.error, job.state = "an error of ultraep, please report it", "failed"

    def _answer(self, job: ReplayJob) -> Numbers:
        trace = self._catalogue.trace(job.question.trace)
        table, case = trace.table, case_of(job.question, trace.header)
        records = planned_again(table)
        job.total = len(records)

        def plans() -> Iterator[Plan]:
            keys = map(table.key, records.tolist())
            for plan in plans_of(map(trace.routed, keys), case):
                yield plan
                job.done += 1
                if job.stop.is_set():
                    return

        replayed = replayed_plans(plans(), case)
        records = records[: len(replayed.after)]
        values = {name: getattr(replayed, name) for name in ("before", "after", "copies")}
        for name in ("bytes", "lost", "saved", "cost"):
            values[name] = np.full(len(records), np.nan)
        return {
            "layers": len(np.unique(table.layer[records])),
            "all_layers": len(table.layers[0]),
            "recorded": overview(table.take(records)),
            "replayed": overview(table.take(records, **values)),
            "settings": case.settings(),
            "beyond": int(replayed.beyond.sum()),
        }


def case_of(question: Question, header: Header) -> Case:
    """Return the settings of a question; raise `ConfigError` if they are invalid."""
    return cases(
        Trace(header, {}),
        policies=[get_policy(question.policy).name],
        slots=[header.slots if question.slots is None else question.slots],
        ranks=[header.ranks if question.ranks is None else question.ranks],
        history=[question.history],
        tolerance=question.tolerance,
    )[0]


def planned_again(table: Table, most: int = MOST_PLANS) -> IntArray:
    """Return the records to replan, in order of time: all layers, or some evenly spaced ones."""
    names, place_N = table.layers
    if not len(names):
        raise ConfigError("nothing to replay: the trace has no records")
    keep = max(1, min(len(names), most * len(names) // len(table)))
    chosen = np.linspace(0, len(names) - 1, keep).round().astype(int)
    return np.flatnonzero(np.isin(place_N, chosen))
