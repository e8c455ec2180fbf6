"""The supervisor of a soak test: starts runs, takes part in their faults, and collects their ends.

Ranks are forked from a server process that has imported torch. The supervisor kills a rank only if
it has hung, which is a failure of the run.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import simulated_hosts
from simulated_hosts import SimulatedHost
from soak.jobs import (
    FLIGHT,
    MODULE,
    PRELOAD,
    SERVER,
    Fired,
    Job,
    Sample,
    run_job,
    shared_files,
)
from soak.outcomes import STOPPED, UNEXPLAINED, RankEnd, Row, classify, explain
from soak.schedule import DISKS, OF_KERNELS, PLANES, Fault

from ultraep.errors import ConfigError

DISK_BYTES = "512k"
SWEEP = 2.0  # seconds in which another group may remove the files of a dead one
SPARE = 60.0  # seconds beyond all timeouts of a run, after which it has hung
MBIT = 1000
HOST_PAIRS = 3
STEADY_RANKS = 4


@dataclass(frozen=True)
class Settings:
    """Settings of a campaign.

    timeout: of the balancers, in seconds.   jobs: runs at the same time.
    preload: MODULE or MODULE:FUNCTION that the server imports, or calls, before ranks start.
    """

    timeout: float = 6.0
    jobs: int = 6
    device: str = "cpu"
    preload: str = ""

    @property
    def limit(self) -> float:
        """Seconds after which a run has hung: several timeouts may follow each other."""
        return 6 * self.timeout + SPARE


def obstacles(device: str, preload: str) -> dict[str, str]:
    """Return the planes that a campaign leaves out here, with the reason."""
    left_out: dict[str, str] = {}
    if importlib.util.find_spec("triton") is None:
        left_out |= dict.fromkeys(OF_KERNELS, "triton is not installed")
    elif device == "cpu" and not preload:
        reason = (
            "kernels take a minute per run in Triton's interpreter; name the planes to add them"
        )
        left_out |= dict.fromkeys(OF_KERNELS, reason)
    if device == "cuda":
        others = [plane for plane in PLANES if plane != "mapped"]
        left_out |= dict.fromkeys(others, "ranks that share a GPU map each other's memory")
    elif reason := simulated_hosts.obstacle():
        left_out["hosts"] = reason
    return left_out


class Server:
    """Forks processes that have imported torch and the library."""

    def __init__(self, device: str, preload: str = "") -> None:
        if sys.platform != "linux":
            raise ConfigError("python -m soak needs Linux: it forks ranks and reads /proc")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([MODULE])
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            SERVER: "1",
            PRELOAD: preload,
        }
        own |= {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
        own |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if device == "cuda" else {}
        self.stopped = False
        self._sessions: set[int] = set()  # of ranks that run
        before = dict(os.environ)
        os.environ.update(own)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def wait_until_ready(self) -> None:
        """Return when the server has imported everything, which takes seconds."""
        process = self._context.Process(target=os.getpid, daemon=True)
        process.start()
        process.join()

    def start(self, job: Job) -> Rank:
        """Start a rank; raise CancelledError after `stop`."""
        if self.stopped:
            raise CancelledError
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=run_job, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        assert process.pid is not None
        self._sessions.add(process.pid)
        if self.stopped:  # meanwhile, by another thread
            self.end_sessions([process.pid])
        return Rank(process, ours, job.rank, process.pid)

    def end_sessions(self, pids: Sequence[int]) -> list[int]:
        """Kill what is left of these ranks and their children; return what was left."""
        left = []
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with suppress(ProcessLookupError, PermissionError):
                    if int(name) in pids or os.getsid(int(name)) in pids:
                        left.append(int(name))
                        os.kill(int(name), signal.SIGKILL)
        self._sessions.difference_update(pids)
        return left

    def stop(self) -> None:
        """Kill all ranks at once, and the server; no rank can start afterwards."""
        self.stopped = True
        self.end_sessions(list(self._sessions))
        pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.stop()


class Rank(NamedTuple):
    """A process of a run."""

    process: BaseProcess
    pipe: connection.Connection
    rank: int
    pid: int


def receive(pending: dict[Any, Rank], until: float | None = None) -> list[tuple[Rank, Any]]:
    """Wait for messages up to this time; return them, and remove the ranks that have ended."""
    messages, seconds = [], None if until is None else max(0.0, until - time.monotonic())
    for pipe in connection.wait(list(pending), seconds):
        rank = pending[pipe]
        try:
            messages.append((rank, rank.pipe.recv()))
        except (EOFError, ConnectionResetError):
            del pending[pipe]
    return messages


@dataclass
class Run:
    """One run with one fault."""

    server: Server
    fault: Fault
    settings: Settings
    folder: Path
    hosts: Sequence[SimulatedHost] = ()
    ranks: list[Rank] = field(default_factory=list)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    fired: bool = False
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def row(self) -> Row:
        """Run and classify."""
        begin = time.monotonic()
        with _disk(self.folder / "disk", small=self.fault.kind in DISKS) as disk:
            self._start(disk)
            self._watch(begin + self.settings.limit)
        if self.server.stopped:
            raise CancelledError
        outcome, detail = classify(
            self.fault, [*self.ends.values()], fired=self.fired, left=self._left_behind()
        )
        explanation = ""
        if outcome == STOPPED:
            explanation, problem = explain(self.fault, self.folder / FLIGHT)
            if problem:
                outcome, detail = UNEXPLAINED, problem
        errors = {
            end.rank: f"{end.error}: {end.message}" for end in self.ends.values() if end.error
        }
        seconds = round(time.monotonic() - begin, 2)
        return Row(self.fault, outcome, detail, seconds, dict(sorted(errors.items())), explanation)

    def _start(self, disk: Path) -> None:
        fault, size, settings = self.fault, self.fault.ranks, self.settings
        limits = settings.timeout, settings.limit, settings.device
        for rank in range(1 if fault.plane == "in-process" else size):
            host = self.hosts[rank * 2 // size] if self.hosts else None
            job = Job(fault, fault.seed, rank, size, self.folder, disk, *limits, host)
            self.ranks.append(self.server.start(job))

    def _watch(self, deadline: float) -> None:
        """Receive messages until all ranks have ended, or the run has hung."""
        pending = {rank.pipe: rank for rank in self.ranks}
        while pending and time.monotonic() < deadline:
            until = min([deadline, *(when for when, _ in self.later)])
            for rank, message in receive(pending, until):
                self._received(rank, message)
            self._act()
        self._finish(deadline)

    def _received(self, rank: Rank, message: Any) -> None:
        if isinstance(message, Fired):
            self.fired = True
            self._take_part(rank)
            with suppress(BrokenPipeError):
                rank.pipe.send("go on")
        else:
            self.ends[message.rank] = message

    def _take_part(self, rank: Rank) -> None:
        """Do the part of the fault that the rank cannot do itself."""
        fault, now = self.fault, time.monotonic()
        if fault.kind == "stop":
            self.later.append((now + fault.delay, lambda: os.kill(rank.pid, signal.SIGCONT)))
        elif fault.kind in ("lost messages", "delayed messages"):
            self.hosts[1].connect(False)
            if fault.kind == "delayed messages":
                self.later.append((now + fault.delay, lambda: self.hosts[1].connect(True)))

    def _act(self) -> None:
        now = time.monotonic()
        for when, action in [*self.later]:
            if now >= when:
                self.later.remove((when, action))
                with suppress(ProcessLookupError):
                    action()

    def _finish(self, deadline: float) -> None:
        """Wait for the processes; kill what has hung."""
        for rank in self.ranks:
            process = rank.process
            process.join(max(0.0, deadline - time.monotonic()))
            hung = process.is_alive()
            if hung:
                process.kill()
                process.join()
            members = range(self.fault.ranks) if self.fault.plane == "in-process" else [rank.rank]
            for member in members:
                end = self.ends.get(member, RankEnd(member))
                if hung:
                    self.ends[member] = end._replace(hung=True)
                elif member not in self.ends:
                    self.ends[member] = self._lost(member, process.exitcode)
            rank.pipe.close()
        for host in self.hosts:
            host.connect(True)

    def _lost(self, rank: int, code: int | None) -> RankEnd:
        """Describe the end of a process that reported nothing."""
        # The exit code may be lost: threads that start a process poll the processes of all threads.
        if self.fault.kind == "kill" and rank == self.fault.rank and self.fired:
            return RankEnd(rank, killed=True)
        log = self.folder / f"rank{rank}.log"
        last = log.read_text("utf-8", "replace").splitlines()[-1:] if log.exists() else []
        return RankEnd(rank, "ProcessEnded", f"exit code {code} {''.join(last)}")

    def _left_behind(self) -> list[str]:
        pids = [rank.pid for rank in self.ranks]
        until = time.monotonic() + SWEEP
        while shared_files(pids) and time.monotonic() < until:
            time.sleep(0.05)
        left = [f"/dev/shm/{name}" for name in shared_files(pids)]
        return left + [f"process {pid}" for pid in self.server.end_sessions(pids)]


@contextmanager
def _disk(folder: Path, *, small: bool) -> Iterator[Path]:
    """Yield a directory; with `small`, a small file system of its own where that is permitted."""
    folder.mkdir()
    mounted = (
        small
        and os.geteuid() == 0
        and _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "soak", folder)
    )
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
        else:
            folder.chmod(0o755)


def _mount(*arguments: str | Path) -> bool:
    command = ["mount", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


# -- a campaign ----------------------------------------------------------------------------------


class Campaign:
    """Runs faults side by side.

    logs: directory that keeps the logs of failed runs; None: keep none.
    """

    def __init__(self, settings: Settings, logs: Path | None = None) -> None:
        self.settings, self._logs = settings, logs
        self.server = Server(settings.device, settings.preload)
        self._hosts: queue.SimpleQueue[list[SimulatedHost]] = queue.SimpleQueue()
        self._undo = ExitStack()

    def __enter__(self) -> Campaign:
        with self.server:
            self.server.wait_until_ready()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
        self._undo.close()

    def start_steady(self, seed: int, planes: Sequence[str]) -> Steady | None:
        """Start the runs without faults; None: on no plane."""
        planes = [plane for plane in planes if plane != "hosts"]
        if not planes:
            return None
        folder = Path(tempfile.mkdtemp(prefix="ultraep-soak-"))
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        return Steady(self.server, self.settings, seed, planes, folder)

    def start_hosts(self) -> None:
        """Create the simulated hosts."""
        for label in range(min(HOST_PAIRS, self.settings.jobs)):
            pair = simulated_hosts.hosts(2, MBIT, str(label))
            self._hosts.put(self._undo.enter_context(pair))

    def rows(self, faults: Iterable[Fault], until: float) -> Generator[Row, None, None]:
        """Yield the outcomes of all faults as they end; start none after `until`.

        An error, such as a signal, stops the runs: the pool waits for them.
        """
        upcoming, running = iter(faults), set[Future[Row]]()
        with ThreadPoolExecutor(self.settings.jobs) as pool, self.server:
            while True:
                while len(running) < self.settings.jobs and time.monotonic() < until:
                    fault = next(upcoming, None)
                    if fault is None:
                        break
                    running.add(pool.submit(self._run, fault))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()

    def _run(self, fault: Fault) -> Row:
        folder = Path(tempfile.mkdtemp(prefix="ultraep-soak-"))
        hosts = self._hosts.get() if fault.plane == "hosts" else []
        try:
            row = Run(self.server, fault, self.settings, folder, hosts).row()
            if row.detail and self._logs is not None:
                kept = self._logs / f"fault{fault.number}"
                shutil.copytree(folder, kept, dirs_exist_ok=True)
            return row
        finally:
            if hosts:
                self._hosts.put(hosts)
            shutil.rmtree(folder, ignore_errors=True)


class Steady:
    """A group of ranks that train without faults while a campaign runs; their resources."""

    def __init__(
        self, server: Server, settings: Settings, seed: int, planes: Sequence[str], folder: Path
    ) -> None:
        self.samples: dict[int, list[tuple[float, dict[str, float]]]] = defaultdict(list)
        self.ends: dict[int, RankEnd] = {}
        self._limit, limits = settings.limit, (10 * settings.timeout, 1e6, settings.device)
        jobs = [
            Job(None, seed, rank, STEADY_RANKS, folder, folder, *limits, planes=tuple(planes))
            for rank in range(STEADY_RANKS)
        ]
        self.ranks = [server.start(job) for job in jobs]
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        pending = {rank.pipe: rank for rank in self.ranks}
        while pending:
            for rank, message in receive(pending):
                if isinstance(message, Sample):
                    self.samples[rank.rank].append((message.seconds, message.resources))
                else:
                    self.ends[rank.rank] = message

    def stop(self) -> list[RankEnd]:
        """End the ranks after their current run; return how they ended."""
        for rank in self.ranks:
            with suppress(BrokenPipeError):
                rank.pipe.send("stop")
        deadline = time.monotonic() + self._limit
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
                self.ends[rank.rank] = RankEnd(rank.rank, hung=True)
        self._thread.join(5)
        for rank in self.ranks:
            lost = RankEnd(rank.rank, "ProcessEnded", f"exit code {rank.process.exitcode}")
            self.ends.setdefault(rank.rank, lost)
        return [self.ends[rank.rank] for rank in self.ranks]
