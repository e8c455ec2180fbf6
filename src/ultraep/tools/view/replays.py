"""Replays: a trace planned again under another policy, slots, ranks or memory, in the background.

Large traces are planned again for some of their layers, evenly spread: policies with a memory need
all moments of a layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, UltraEPError
from ultraep.plan import Plan
from ultraep.policies import get_policy
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.table import Table, overview
from ultraep.tools.view.traces import OpenTrace
from ultraep.trace.read import Trace
from ultraep.trace.replay import Case, cases, plans_of, replayed_plans
from ultraep.trace.schema import Header

MOST_PLANS = 4000  # records that are planned again
MOST_JOBS = 16  # that are kept
MOST_WAITING = 4


@dataclass(frozen=True)
class Question:
    """What to plan again, and how; None: as recorded."""

    trace: int
    policy: str
    slots: int | None = None
    ranks: int | None = None
    history: int = 1
    tolerance: float | None = None


@dataclass(eq=False)
class ReplayJob:
    """A question, how far it is, and its answer."""

    number: int
    question: Question
    state: str = "waiting"  # running, done, stopped, failed
    done: int = 0
    total: int = 0
    error: str = ""
    answer: Numbers = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def told(self) -> Numbers:
        """As the page has it."""
        names = ("number", "state", "done", "total", "error", "answer")
        question = asdict(self.question)
        return {name: getattr(self, name) for name in names} | {"question": question}


class Replays:
    """Questions about the traces of a catalogue; one is worked on at a time."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue, self._jobs = catalogue, dict[int, ReplayJob]()
        self._lock, self._count = threading.Lock(), 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ultraep replay")

    def ask(self, question: Question) -> ReplayJob:
        """Begin to work on it, or find the answer that is there."""
        trace = self._catalogue.trace(question.trace)
        case_of(question, trace.header)  # what cannot be planned is refused at once
        if not trace.complete:
            raise ConfigError("the trace is still being read: ask again when all ranks were read")
        with self._lock:
            for job in self._jobs.values():
                if job.question == question and job.state in ("waiting", "running", "done"):
                    return job
            waiting = sum(job.state == "waiting" for job in self._jobs.values())
            if waiting >= MOST_WAITING:
                raise ConfigError(f"{waiting} replays are waiting already: wait, or stop one")
            job = ReplayJob(self._count, question)
            self._jobs[job.number], self._count = job, self._count + 1
            self._forget()
        self._worker.submit(self._work, job)
        return job

    def job(self, number: int) -> ReplayJob:
        """The job of this number."""
        if number not in self._jobs:
            raise ConfigError(f"replay {number}: there is none of this number")
        return self._jobs[number]

    def close(self) -> None:
        """Stop all work."""
        for job in list(self._jobs.values()):
            job.stop.set()
        self._worker.shutdown(cancel_futures=True)

    def _forget(self) -> None:
        over = [job for job in self._jobs.values() if job.state not in ("waiting", "running")]
        for job in over[: max(0, len(self._jobs) - MOST_JOBS)]:
            del self._jobs[job.number]

    def _work(self, job: ReplayJob) -> None:
        try:
            job.state = "running"
            job.answer = self._answer(job)
            job.state = "stopped" if job.stop.is_set() else "done"
        except (UltraEPError, OSError) as error:
            job.error, job.state = str(error), "failed"
        finally:
            if job.state == "running":  # a bug is told in the page, too; the thread tells the rest
                job.error, job.state = "an error of the program: see its terminal", "failed"

    def _answer(self, job: ReplayJob) -> Numbers:
        trace = self._catalogue.trace(job.question.trace)
        table, case = trace.table, case_of(job.question, trace.header)
        records = planned_again(table)
        job.total = len(records)
        replayed = replayed_plans(self._plans(job, case, trace, records), case)
        records = records[: len(replayed.after)]
        unknown = dict.fromkeys(("bytes", "lost", "saved", "cost"), np.full(len(records), np.nan))
        known = {name: getattr(replayed, name) for name in ("before", "after", "copies")}
        line = asdict(replayed.line)
        del line["case"]
        return {
            "layers": np.unique(table.layer[records]).tolist(),
            "all_layers": len(table.layers[0]),
            "recorded": overview(table.take(records)),
            "replayed": overview(table.take(records, **known, **unknown)),
            "line": case.told() | line,
        }

    def _plans(
        self, job: ReplayJob, case: Case, trace: OpenTrace, records: IntArray
    ) -> Iterator[Plan]:
        keys = map(trace.table.key, records.tolist())
        for plan in plans_of(map(trace.routed, keys), case):
            yield plan
            job.done += 1
            if job.stop.is_set():
                return


def case_of(question: Question, header: Header) -> Case:
    """Return how to plan; `ConfigError` if that is impossible."""
    return cases(
        Trace(header, {}),
        policies=[get_policy(question.policy).name],
        slots=[header.slots if question.slots is None else question.slots],
        ranks=[header.ranks if question.ranks is None else question.ranks],
        history=[question.history],
        tolerance=question.tolerance,
    )[0]


def planned_again(table: Table, most: int = MOST_PLANS) -> IntArray:
    """Return records in the order of time: of all layers, or of some, evenly spread."""
    names, place_N = table.layers
    if not len(names):
        raise ConfigError("nothing to replay: the trace has no records")
    keep = max(1, min(len(names), most * len(names) // len(table)))
    chosen = np.linspace(0, len(names) - 1, keep).round().astype(int)
    return np.flatnonzero(np.isin(place_N, chosen))
