"""The supervisor of a soak test: starts runs, takes part in their faults, and collects their ends.

Ranks are forked from a server process that has imported torch. One loop polls all runs. The
supervisor kills a rank only if it has hung, which is a failure of the run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe, connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import simulated_hosts
import warm
from simulated_hosts import SimulatedHost
from soak.jobs import FLIGHT, TIMEOUT, Fired, Job, Sample, run_job, shared_files, time_limit
from soak.outcomes import STOPPED, UNNAMED, RankEnd, Row, classify, misexplained
from soak.schedule import OF_KERNELS, PLANES, Fault

POLL = 0.05  # seconds between looks at the runs
SWEEP = 2.0  # seconds in which another group may remove the files of a dead one
MBIT = 1000
STEADY_RANKS = 4
RUNS_PER_CORE = 3  # most runs wait
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ULTRAEP_FLIGHT": "off",  # its thread would not survive a fork; ranks turn it on
    "ULTRAEP_RATES": "row=1000000,copy=1,each=0,layer=0",  # replicas cost next to nothing
}
OF_DEVICE = {
    "cpu": {"TRITON_INTERPRET": "1"},
    "cuda": {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
}


def obstacles(device: str) -> dict[str, str]:
    """Return the planes that cannot run here, with the reason."""
    if device == "cuda":
        others = [plane for plane in PLANES if plane != "mapped"]
        return dict.fromkeys(others, "ranks that share a GPU map each other's memory")
    left_out = {}
    if importlib.util.find_spec("triton") is None:
        left_out |= dict.fromkeys(OF_KERNELS, "triton is not installed")
    if reason := simulated_hosts.obstacle():
        left_out["hosts"] = reason
    return left_out


class Rank(NamedTuple):
    """A process of a run."""

    number: int
    process: BaseProcess
    pipe: connection.Connection


class Run:
    """One run: its ranks, and how they end. Without a fault it goes on until `stop`."""

    def __init__(
        self,
        fault: Fault | None,
        size: int,
        folder: Path,
        device: str,
        *,
        seed: int = 0,
        hosts: Sequence[SimulatedHost] = (),
        planes: Sequence[str] = (),
    ) -> None:
        self.fault, self.size, self.folder, self.hosts = fault, size, folder, hosts
        self.device, self.fired = device, False
        self.begin = time.monotonic()
        self.deadline = self.begin + time_limit(device) if fault else float("inf")
        self.swept = float("inf")  # when files that are left in shared memory count as a leak
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.ends: dict[int, RankEnd] = {}
        self.samples: dict[int, list[dict[str, float]]] = defaultdict(list)
        self.pids: list[int] = []
        self.alive: list[Rank] = []
        folder.mkdir()
        for number in range(1 if self.in_threads else size):
            host = hosts[number * 2 // size] if hosts else None
            seed = fault.seed if fault else seed
            self._start(Job(fault, seed, number, size, folder, device, host, tuple(planes)))

    @property
    def in_threads(self) -> bool:
        return self.fault is not None and self.fault.plane == "in-process"

    def _start(self, job: Job) -> None:
        ours, theirs = Pipe()
        process = warm.start(run_job, job, theirs)
        theirs.close()
        self.pids.append(process.pid)
        self.alive.append(Rank(job.rank, process, ours))

    def stop(self) -> None:
        """End after the current training, or count as hung."""
        for rank in self.alive:
            with suppress(BrokenPipeError):
                rank.pipe.send("stop")
        self.deadline = time.monotonic() + 10 * time_limit(self.device)

    def poll(self) -> None:
        """Receive messages, notice ends of processes, and do what is due; kill what has hung."""
        for rank in [*self.alive]:
            ended = not rank.process.is_alive()  # read first: its last message may be in the pipe
            with suppress(EOFError, ConnectionResetError):
                while rank.pipe.poll():
                    self._receive(rank, rank.pipe.recv())
            if ended:
                self.alive.remove(rank)
                for number in range(self.size) if self.in_threads else [rank.number]:
                    self.ends.setdefault(number, self._lost(number, rank.process.exitcode))
        now = time.monotonic()
        for when, action in [*self.later]:
            if now >= when:
                self.later.remove((when, action))
                with suppress(ProcessLookupError):
                    action()
        if now >= self.deadline:
            for rank in self.alive:
                self.ends[rank.number] = RankEnd(rank.number, hung=True)
                rank.process.kill()

    def _receive(self, rank: Rank, message: Any) -> None:
        if isinstance(message, Fired):
            self.fired = True
            self._take_part(rank)
            with suppress(BrokenPipeError):
                rank.pipe.send("go on")
        elif isinstance(message, Sample):
            self.samples[message.rank].append(message.resources)
        else:
            self.ends[message.rank] = message

    def _take_part(self, rank: Rank) -> None:
        """Do the part of the fault that the rank cannot do itself."""
        kind = self.fault.kind
        until = time.monotonic() + self.fault.delay * TIMEOUT[self.device]
        if kind == "stop":
            self.later.append((until, lambda: os.kill(rank.process.pid, signal.SIGCONT)))
        elif kind in ("lost messages", "delayed messages"):
            self.hosts[1].connect(False)
            if kind == "delayed messages":
                self.later.append((until, lambda: self.hosts[1].connect(True)))

    def _lost(self, rank: int, code: int | None) -> RankEnd:
        """Describe the end of a process that reported nothing."""
        if self.fault and self.fault.kind == "kill" and rank == self.fault.rank and self.fired:
            return RankEnd(rank, killed=True)
        log = self.folder / f"rank{rank}.log"
        last = log.read_text("utf-8", "replace").splitlines()[-1:] if log.exists() else []
        return RankEnd(rank, "ProcessEnded", f"exit code {code} {''.join(last)}")

    # -- end -------------------------------------------------------------------------------------

    def ended(self) -> bool:
        """Whether all processes have ended, and their files are gone or had time to go."""
        if self.alive:
            return False
        self.swept = min(self.swept, time.monotonic() + SWEEP)
        return not shared_files(self.pids) or time.monotonic() > self.swept

    def row(self) -> Row:
        """Classify the run."""
        left = [f"/dev/shm/{name}" for name in shared_files(self.pids)]
        left += [f"process {pid}" for pid in end_sessions(self.pids)]
        ends = [self.ends[rank] for rank in sorted(self.ends)]
        outcome, detail = classify(self.fault, ends, fired=self.fired, left=left)
        if outcome == STOPPED:
            detail = misexplained(self.fault, self.folder / FLIGHT)
            outcome = UNNAMED if detail else STOPPED
        return Row(self.fault, outcome, detail, round(time.monotonic() - self.begin, 2))


def end_sessions(pids: Sequence[int]) -> list[int]:
    """Kill what is left of these ranks and their children; return what was left."""
    left = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(name)) in pids:
                left.append(int(name))
                os.kill(int(name), signal.SIGKILL)
    return left


class Campaign:
    """Runs faults side by side. On exit, all processes and hosts are removed.

    logs: directory that keeps the logs of failed runs; None: keep none.
    """

    def __init__(self, device: str, logs: Path | None = None) -> None:
        self._device, self._logs = device, logs
        self._jobs = RUNS_PER_CORE * len(os.sched_getaffinity(0))
        self._running: list[Run] = []
        self._free_hosts: list[list[SimulatedHost]] = []
        self._pairs = 0
        self._undo = ExitStack()
        os.environ.update(ENVIRONMENT | OF_DEVICE[device])
        warm.preload("soak.warm_up")

    def __enter__(self) -> Campaign:
        folder = tempfile.TemporaryDirectory(prefix="ultraep-soak-", ignore_cleanup_errors=True)
        self._folder = Path(self._undo.enter_context(folder))
        return self

    def __exit__(self, *error: object) -> None:
        ranks = [rank for run in self._running for rank in run.alive]
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join(5)
        server = getattr(forkserver._forkserver, "_forkserver_pid", None)
        if server is not None:
            os.kill(server, signal.SIGKILL)  # ranks that start just now die with it
        self._undo.close()

    def start_steady(self, seed: int, planes: Sequence[str]) -> Run:
        """Start the trainings without faults, on these planes in turns."""
        folder = self._folder / "steady"
        self._running.append(
            Run(None, STEADY_RANKS, folder, self._device, seed=seed, planes=planes)
        )
        return self._running[-1]

    def end_steady(self, steady: Run) -> None:
        steady.stop()
        while steady.alive:
            self._wait()

    def rows(self, faults: Iterable[Fault], until: float) -> Iterator[Row]:
        """Yield the outcomes of all faults as they end; start none after `until`."""
        faults, running = iter(faults), list[Run]()
        while True:
            while len(running) < self._jobs and time.monotonic() < until:
                fault = next(faults, None)
                if fault is None:
                    break
                running.append(self._start(fault))
            if not running:
                return
            self._wait()
            for run in [run for run in running if run.ended()]:
                running.remove(run)
                yield self._finish(run)

    def _start(self, fault: Fault) -> Run:
        hosts = self._hosts() if fault.plane == "hosts" else []
        folder = self._folder / f"fault{fault.number}"
        self._running.append(Run(fault, fault.ranks, folder, self._device, hosts=hosts))
        return self._running[-1]

    def _hosts(self) -> list[SimulatedHost]:
        if self._free_hosts:
            return self._free_hosts.pop()
        self._pairs += 1
        return self._undo.enter_context(simulated_hosts.hosts(2, MBIT, str(self._pairs)))

    def _wait(self) -> None:
        time.sleep(POLL)
        for run in self._running:
            run.poll()

    def _finish(self, run: Run) -> Row:
        row = run.row()
        self._running.remove(run)
        if run.hosts:
            run.hosts[1].connect(True)
            self._free_hosts.append(list(run.hosts))
        if row.detail and self._logs is not None:
            shutil.copytree(run.folder, self._logs / run.folder.name, dirs_exist_ok=True)
        shutil.rmtree(run.folder, ignore_errors=True)
        return row
