"""Run a function on ranks that are processes of this machine, with events and clean shutdown.

Every rank has a pipe to this process. It receives its job through the pipe and sends back events,
then a result or an error. A rank exits when its pipe closes, however this process ended.
`torch.multiprocessing` would import torch in this process as well, and reports no events.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from ultraep.errors import CommunicationError, ConfigError, UltraEPError
from ultraep_tools.imports import import_in_child

GRACE = 3.0  # seconds for a rank to close its files
CAUSE_WAIT = 2.0  # seconds to wait for other ranks' errors after the first one
MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank in its group. `store`: the file through which ranks connect."""

    rank: int
    size: int
    local: int  # rank on its host
    store: str | None = None  # None: torchrun set the environment

    @classmethod
    def of_torchrun(cls) -> RankPlace | None:
        """Return the position that torchrun set in the environment, if it did."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK" if "LOCAL_RANK" in os.environ else "RANK")
        try:
            rank, size, local = (int(os.environ[name]) for name in names)
        except ValueError:
            rank, size, local = 0, 0, 0
        if not (0 <= rank < size < MOST_RANKS and local >= 0):
            values = " ".join(f"{name}={os.environ[name][:20]!r}" for name in dict.fromkeys(names))
            raise ConfigError(
                f"the environment has {values}, which is no rank; start the ranks with torchrun, "
                "or unset these variables"
            )
        return cls(rank, size, local)


class Failure(NamedTuple):
    """The failure of a rank; `lost`: of a connection, which is rarely the cause."""

    rank: int
    text: str
    lost: bool = False


class Finished(NamedTuple):
    """The result of a rank's work."""

    result: Any


class Rank:
    """The process of one rank."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.log = number, folder / f"rank{number}.log"
        self.pipe, theirs = Pipe()
        code = f"from ultraep_tools.launch.processes import run_rank; run_rank({theirs.fileno()})"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the ranks
            )
        theirs.close()

    def receive(self) -> Any:
        """Return the next message; a `Failure` if the process ended."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._lost()

    def _lost(self) -> Failure:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CAUSE_WAIT)
        code, lines = self.process.returncode, self.log.read_text("utf-8", "replace").splitlines()
        signalled = code is not None and code < 0
        end = f"ended by {signal.Signals(-code).name}" if signalled else f"ended with {code}"
        last = f": {lines[-1]}" if lines else ""
        return Failure(self.number, f"process {self.process.pid} {end}{last}")


def run_ranks(work: str, job: Any, ranks: int, report: Callable[[Any], None]) -> Any:
    """Start the ranks, report their events, and return the result of rank 0.

    work: "package.module:function", called as `function(place, job, report)` by every rank. Only
        the ranks import the module.
    """
    with tempfile.TemporaryDirectory(prefix="ultraep-ranks-") as folder:
        started: list[Rank] = []
        try:
            for number in range(ranks):
                started.append(Rank(number, Path(folder)))
            for rank in started:
                place = RankPlace(rank.number, ranks, rank.number, f"{folder}/store")
                with suppress(BrokenPipeError):  # `collect` reports a rank that ended already
                    rank.pipe.send((work, place, job))
            return collect(started, report)
        finally:
            stop(started)


def stop(ranks: list[Rank]) -> None:
    """End all processes, with a moment to close their traces."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        rank.pipe.close()


def collect(ranks: list[Rank], report: Callable[[Any], None]) -> Any:
    """Receive messages until all ranks have finished; return the result of rank 0.

    After a failure, wait a moment for other failures: the first may be a consequence of another.
    """
    pending = {rank.pipe: rank for rank in ranks}
    result, failures, deadline = None, list[Failure](), math.inf
    while pending and time.monotonic() < deadline:
        for pipe in wait(list(pending), deadline - time.monotonic() if failures else None):
            assert isinstance(pipe, Connection)
            message = pending[pipe].receive()
            if not isinstance(message, Failure | Finished):
                if not failures:
                    report(message)
                continue
            rank = pending.pop(pipe)
            if isinstance(message, Failure):
                failures.append(message)
                deadline = min(deadline, time.monotonic() + CAUSE_WAIT)
            elif rank.number == 0:
                result = message.result
    if failures:
        cause = min(failures, key=lambda failure: failure.lost)
        raise CommunicationError(f"rank {cause.rank} failed, all others were stopped: {cause.text}")
    return result


def environment() -> dict[str, str]:
    """Return the environment of a rank: one thread, and the modules of this process."""
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"
    return os.environ | own


# -- in the process of a rank --------------------------------------------------------------------


def run_rank(descriptor: int) -> None:
    signal.signal(signal.SIGTERM, stop_now)
    pipe = Connection(descriptor)
    work, place, job = pipe.recv()
    threading.Thread(target=exit_with, args=(pipe,), daemon=True).start()
    module, _, function = work.partition(":")
    import_in_child()
    try:
        pipe.send(Finished(getattr(import_module(module), function)(place, job, pipe.send)))
    except (UltraEPError, RuntimeError, OSError, MemoryError) as error:
        traceback.print_exc()
        lost = isinstance(error, RuntimeError) and "onnection" in str(error)  # as torch raises it
        lost |= isinstance(error, CommunicationError)
        pipe.send(Failure(place.rank, f"{type(error).__name__}: {error}", lost))
        sys.exit(1)


def exit_with(pipe: Connection) -> None:
    """Wait until the pipe closes, then end this process."""
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def stop_now(number: int, _: Any) -> None:
    """Turn a signal into SystemExit, so that traces are closed."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
