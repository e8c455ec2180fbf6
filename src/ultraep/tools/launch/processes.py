"""Ranks as processes of this machine: they start, report events and a result, and all end.

Every rank has a pipe to this process. It receives its job through the pipe and sends back events,
then a result or an error. A rank ends by itself when its pipe closes, however this process ended.
`torch.multiprocessing` would import torch in this process, too, and reports no events.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ultraep.errors import CommunicationError, ConfigError, UltraEPError

GRACE = 3.0  # seconds for a rank to close what it has open
LAST_WORDS = 2.0  # seconds to hear from the other ranks why one of them failed
MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in its group. `store`: a file through which the ranks find each other."""

    rank: int
    size: int
    local: int  # number on its host
    store: str | None = None  # None: torchrun has set the environment

    @classmethod
    def of_torchrun(cls) -> RankPlace | None:
        """The place that torchrun gave to this process, if it did."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if rank >= size:
            raise ConfigError(f"RANK is {rank} in the environment, but WORLD_SIZE {size}")
        return cls(rank, size, _number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else rank)


def _number(variable: str, least: int) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or not least <= int(text) < MOST_RANKS:
        raise ConfigError(
            f"{variable} must lie between {least} and {MOST_RANKS - 1} in the environment, "
            f"got {text!r}"
        )
    return int(text)


class Failure(NamedTuple):
    """Why a rank did not finish. `weight`: how likely it is the cause and no consequence."""

    rank: int
    words: str
    weight: int


class Finished(NamedTuple):
    """The result of a rank's work."""

    result: Any


class Rank:
    """One process."""

    def __init__(self, number: int, folder: Path, keep: Sequence[int] = ()) -> None:
        self.number, self.log = number, folder / f"rank{number}.log"
        self.pipe, theirs = Pipe()
        code = f"from ultraep.tools.launch.processes import live; live({theirs.fileno()})"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno(), *keep],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which stops the ranks
            )
        theirs.close()

    def lost(self) -> Failure:
        """Describe how a rank ended whose pipe is closed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS)
        code, words = self.process.returncode, self.log.read_text("utf-8", "replace").splitlines()
        how = (
            f"ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with {code}"
        )
        last = f": {words[-1]}" if words else ""
        return Failure(self.number, f"process {self.process.pid} {how}{last}", 2)


def run_ranks(
    work: str, job: Any, ranks: int, tell: Callable[[Any], None], keep: Sequence[int] = ()
) -> Any:
    """Start the ranks, pass on their events, and return the result of rank 0.

    work: "package.module:function", called as `function(place, job, tell)` by every rank. The
        module is imported there, and not here.
    keep: descriptors that the ranks hold open as long as they live.
    """
    with tempfile.TemporaryDirectory(prefix="ultraep-ranks-") as folder:
        started: list[Rank] = []
        try:
            for number in range(ranks):
                started.append(Rank(number, Path(folder), keep))
            for rank in started:
                place = RankPlace(rank.number, ranks, rank.number, f"{folder}/store")
                with suppress(BrokenPipeError):  # it is dead already; its pipe will say so
                    rank.pipe.send_bytes(pickle.dumps((work, place, job)))
            return collect(started, tell)
        finally:
            stop(started)


def stop(ranks: list[Rank]) -> None:
    """End all processes; they have a moment to close their traces."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    until = time.monotonic() + GRACE
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        rank.pipe.close()


def collect(ranks: list[Rank], tell: Callable[[Any], None]) -> Any:
    """Receive from all ranks until each has finished, or one of them has failed."""
    pending = {rank.pipe: rank for rank in ranks}
    results: dict[int, Any] = {}
    while pending:
        for rank, message in receive(pending, None):
            if isinstance(message, Failure):
                del pending[rank.pipe]
                raise_cause(message, pending)
            elif isinstance(message, Finished):
                results[rank.number] = message.result
                del pending[rank.pipe]
            else:
                tell(message)
    return results[0]


def receive(pending: dict[Connection, Rank], timeout: float | None) -> Iterator[tuple[Rank, Any]]:
    """Events, results and failures of the ranks that have sent something, or have ended."""
    for pipe in wait(list(pending), timeout):
        assert isinstance(pipe, Connection)
        rank = pending[pipe]
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            message = rank.lost()
        yield rank, message


def raise_cause(first: Failure, pending: dict[Connection, Rank]) -> NoReturn:
    """Raise what went wrong: the first failure may only be the consequence of another one."""
    failures, until = [first], time.monotonic() + LAST_WORDS
    while pending and first.weight < 2 and time.monotonic() < until:
        for rank, message in receive(pending, max(0.0, until - time.monotonic())):
            if isinstance(message, Failure):
                failures.append(message)
            if isinstance(message, Failure | Finished):
                del pending[rank.pipe]
    cause = max(failures, key=lambda failure: failure.weight)
    raise CommunicationError(f"rank {cause.rank} failed, all others were stopped: {cause.words}")


def environment() -> dict[str, str]:
    """One thread for every rank, and the same modules as here."""
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"
    return os.environ | own


# -- in the process of a rank --------------------------------------------------------------------


def live(descriptor: int) -> None:
    """Run one rank: receive the job, do it, and send the result."""
    stop_on_sigterm()
    pipe = Connection(descriptor)
    work, place, job = pickle.loads(pipe.recv_bytes())
    threading.Thread(target=leave_with, args=(pipe,), daemon=True).start()
    module, _, function = work.partition(":")
    number = place.rank

    def tell(message: Any) -> None:
        pipe.send_bytes(pickle.dumps(message))

    try:
        tell(Finished(getattr(import_module(module), function)(place, job, tell)))
    except CommunicationError as error:
        tell(Failure(number, str(error), 0))
        sys.exit(1)
    except (UltraEPError, RuntimeError, OSError, MemoryError) as error:
        traceback.print_exc()
        tell(Failure(number, f"{type(error).__name__}: {error}", weight_of(error)))
        sys.exit(1)


def weight_of(error: Exception) -> int:
    """Return 0 for a lost connection, which torch raises as RuntimeError: rarely the cause."""
    return 0 if isinstance(error, RuntimeError) and "onnection" in str(error) else 1


def leave_with(pipe: Connection) -> None:
    """Wait until the pipe is closed, then end this process."""
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def stop_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception, so that traces are closed."""

    def stop_now(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop_now)
