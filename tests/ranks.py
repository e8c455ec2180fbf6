"""Real processes as ranks of a gloo group, for tests.

    def work(rank, group, number): ...                  # at the top of a module: it is pickled

    results = shared_pool().run(3, work, 42)             # processes that stay between runs
    results = everywhere("gloo", 3, body, 42)            # body(communicator, number)

    @on_ranks(2)
    def test_something(rank, group, tmp_path): ...      # a test whose body runs on every rank

`run` raises `RankError` with the first traceback. `outcomes` returns the end of each rank, for
tests in which ranks are meant to fail. Every run has its own process group. Processes that died or
did not return in time are killed and replaced.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import gc
import inspect
import os
import pickle
import re
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import registered_policy  # noqa: F401
import torch
import torch.distributed as dist
import warm

from ultraep import NothingToBalance
from ultraep.runtime import roll_call
from ultraep.runtime.connect import connect
from ultraep.runtime.local import LocalCommunicator, LocalGroup

TRANSPORTS = ["local", "gloo"]  # threads, processes
# Seconds. Only a failing test waits that long; a busy machine is slow to start processes.
LIMIT = 180.0  # of a run
PATIENCE = 60.0  # with a silent rank, and with processes that end
QUICK = 30.0  # less than a rank needs that waits for its timeout
TIMED_OUT = re.compile(r"waited .* s for|[Tt]imed out")  # errors after a timeout


class RankError(AssertionError):
    """The error of a rank, as text."""


class Outcome(NamedTuple):
    """The end of the work of a rank. `kind` is "result", "error" or "lost"."""

    when: float
    rank: int
    kind: str
    value: Any


class Job(NamedTuple):
    """The work of one rank, and how to join its group."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    size: int
    port: int
    name: str


class Worker:
    """One process that runs jobs."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self.process = warm.start(serve, theirs)
        theirs.close()

    def end(self, patience: float) -> None:
        """Wait for the process, which ends when its pipe is closed; kill it after `patience` s."""
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class RankPool:
    """Processes that stay between runs, started when they are needed."""

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self.workers: dict[int, Worker] = {}  # by rank, for life: torch remembers meshes and places
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.runs = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, size: int, work: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list:
        """`work(rank, group, *args)` on the first `size` processes; results in rank order."""
        outcomes = self.outcomes(size, work, *args, timeout=timeout)
        for outcome in outcomes:
            if outcome.kind != "result":
                others = [f"rank {o.rank}: {o.kind}" for o in outcomes if o.kind != "result"]
                raise RankError(f"rank {outcome.rank}: {outcome.value}\n({', '.join(others)})")
        return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]

    def outcomes(
        self, size: int, work: Callable[..., Any], *args: Any, timeout: float = LIMIT
    ) -> list[Outcome]:
        """Return the end of each rank, in the order in which they ended."""
        assert size <= self.limit
        self._fill(size)
        self.runs += 1
        for rank in range(size):
            job = Job(work, args, rank, size, self.store.port, f"run {self.runs}")
            self.workers[rank].pipe.send_bytes(pickle.dumps(job))
        outcomes = self._collect(size, time.monotonic() + timeout)
        self._dismiss({outcome.rank for outcome in outcomes if outcome.kind == "lost"})
        return outcomes

    def close(self) -> None:
        self._dismiss(set(self.workers), patience=PATIENCE)

    def _fill(self, size: int) -> None:
        self._dismiss({r for r, w in self.workers.items() if not w.process.is_alive()})
        for rank in set(range(size)) - self.workers.keys():
            self.workers[rank] = Worker()

    def _collect(self, size: int, until: float) -> list[Outcome]:
        pending = {self.workers[rank].pipe: rank for rank in range(size)}
        outcomes: list[Outcome] = []
        while pending:
            ready = wait(list(pending), max(until - time.monotonic(), 0))
            outcomes += [receive(pending.pop(pipe), pipe) for pipe in ready]
            if not ready:
                late = "did not come back in time"
                outcomes += [Outcome(until, rank, "lost", late) for rank in pending.values()]
                break
        return sorted(outcomes, key=lambda outcome: outcome.when)

    def _dismiss(self, ranks: set[int], patience: float = 0.0) -> None:
        leaving = [self.workers.pop(rank) for rank in ranks]
        for worker in leaving:
            worker.pipe.close()
        until = time.monotonic() + patience
        for worker in leaving:
            worker.end(max(until - time.monotonic(), 0.0))


def receive(rank: int, pipe: Connection) -> Outcome:
    try:
        when, kind, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return Outcome(time.monotonic(), rank, "lost", "its process ended")
    return Outcome(when, rank, kind, value)


@functools.cache
def shared_pool() -> RankPool:
    """Return the one pool of the test session."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


def on_ranks(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function `body(rank, group, ...)` into a test that runs on every rank of a pool.

    A failure on any rank fails the test. Fixtures and parameters are sent to the ranks.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            shared_pool().run(size, run_body, body.__module__, body.__name__, arguments)

        _, _, *parameters = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(parameters)
        return test

    return decorate


def run_body(rank: int, group: Any, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(import_module(module), name).__wrapped__(rank, group, **arguments)


def everywhere(
    transport: str, size: int, body: Callable[..., Any], *args: Any, timeout: float = PATIENCE
) -> list:
    """Return the results of `body(communicator, *args)` on all ranks, over any transport."""
    if transport == "local":
        return LocalGroup(size, timeout=timeout).run(lambda comm: body(comm, *args))
    return shared_pool().run(size, on_communicator, body, args, timeout)


def on_communicator(rank, group, body, args, timeout):
    comm = connect(group, timeout=timeout)
    try:
        return body(comm, *args)
    finally:
        comm.close()


def set_timeout(comm: Any, seconds: float) -> None:
    """Shorten the timeout of a connected rank: connecting may take long on a busy machine."""
    if isinstance(comm, LocalCommunicator):
        comm._group.timeout = seconds
    else:
        comm._timeout = seconds


def meet(folder: Path, rank: int, size: int) -> None:
    """Wait until all ranks have arrived, without sending messages."""
    (folder / str(rank)).touch()
    until = time.monotonic() + PATIENCE
    while len(list(folder.iterdir())) < size:
        assert time.monotonic() < until, "not all ranks came"
        time.sleep(0.001)


def serve(pipe: Connection) -> None:
    """Run one job after the other, until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    roll_call.POLL, roll_call.GRACE = 0.1, 2.0  # ranks that died are named sooner
    while True:
        try:
            pickled = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(do(pickled))
        gc.collect()  # a communicator in a traceback keeps its sockets open, and others waiting
        if dist.is_initialized():
            dist.destroy_process_group()


def do(pickled: bytes) -> bytes:
    """Run a job; return when and how it ended, pickled."""
    try:
        job = pickle.loads(pickled)
        roll_call._numbers.clear()  # jobs have stores of their own, and ranks may fail alone
        with warnings.catch_warnings():
            for action, message, category in warning_filters():
                warnings.filterwarnings(action, message, getattr(builtins, category))
            warnings.simplefilter("ignore", NothingToBalance)  # some have no slots
            result = job.work(job.rank, join(job), *job.args)
        return pickle.dumps((time.monotonic(), "result", result))
    except BaseException:  # noqa: BLE001  whatever it was, the test wants to read it
        return pickle.dumps((time.monotonic(), "error", traceback.format_exc()))


@functools.cache
def warning_filters() -> list[tuple[str, str, str]]:
    """The filters of the tests: action, regular expression, category."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    lines = project["tool"]["pytest"]["ini_options"]["filterwarnings"]
    filters = ((line + "::").split(":") for line in lines)
    return [(action, message, category or "Warning") for action, message, category, *_ in filters]


def join(job: Job) -> dist.ProcessGroup:
    store = dist.PrefixStore(job.name, dist.TCPStore("127.0.0.1", job.port))
    limit = timedelta(seconds=LIMIT)  # a shorter run is ended by its pool, not by its group
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)
    # A rank with little to do must not leave while others still connect: they would fail.
    if store.add("joined", 1) == job.size:
        store.set("all joined", "yes")
    store.wait(["all joined"], limit)
    return dist.group.WORLD
