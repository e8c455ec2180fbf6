"""The ranks as processes of this machine: how they start, what they tell, and that none stays.

Every rank has a pipe to this process. Down it comes its job, up come events, then a result or an
error. A rank whose pipe is closed, since this process has ended however it did, leaves by itself.
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
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ultraep.errors import CommunicationError, UltraEPError
from ultraep.tools.launch.place import RankPlace

GRACE = 3.0  # seconds for a rank to close what it has open
LAST_WORDS = 2.0  # seconds to hear from the other ranks why one of them failed


class Failure(NamedTuple):
    """Why a rank did not finish. `weight`: how likely it is the cause and no consequence."""

    rank: int
    words: str
    weight: int


class Finished(NamedTuple):
    """What the work of a rank came to."""

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
                start_new_session=True,  # Ctrl-C is for this process; it tells them
            )
        theirs.close()

    def lost(self) -> Failure:
        """What to say about a rank whose pipe is closed."""
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
    """Start the ranks, pass on what they tell, and return the result of rank 0.

    work: "package.module:function", called as `function(place, job, tell)` by every rank. The
        module is imported there, and not here.
    keep: descriptors that the ranks hold open as long as they live.
    """
    with tempfile.TemporaryDirectory(prefix="ultraep-ranks-") as name:
        folder = Path(name)
        with started(ranks, folder, keep) as them:
            for rank in them:
                place = RankPlace(rank.number, ranks, rank.number, f"{name}/store")
                with suppress(BrokenPipeError):  # it is dead already; its pipe will say so
                    rank.pipe.send_bytes(pickle.dumps((work, place, job)))
            return collect(them, tell)


@contextmanager
def started(count: int, folder: Path, keep: Sequence[int] = ()) -> Iterator[list[Rank]]:
    """So many processes, which are gone afterwards."""
    them: list[Rank] = []
    try:
        for number in range(count):
            them.append(Rank(number, folder, keep))
        yield them
    finally:
        stop(them)


def stop(them: list[Rank]) -> None:
    """End all processes: they may close their traces, but not take long."""
    for rank in them:
        if rank.process.poll() is None:
            rank.process.terminate()
    until = time.monotonic() + GRACE
    for rank in them:
        try:
            rank.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        rank.pipe.close()


def collect(them: list[Rank], tell: Callable[[Any], None]) -> Any:
    """Listen to all ranks until each has come to its end, or one of them has failed."""
    pending = {rank.pipe: rank for rank in them}
    results: dict[int, Any] = {}
    while pending:
        for pipe in wait(list(pending)):
            assert isinstance(pipe, Connection)
            said = listen(pending[pipe])
            if isinstance(said, Failure):
                fail(said, [rank for other, rank in pending.items() if other is not pipe])
            elif isinstance(said, Finished):
                results[pending.pop(pipe).number] = said.result
            else:
                tell(said)
    return results[0]


def listen(rank: Rank) -> Any:
    """An event, a result, or a failure."""
    try:
        said = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return rank.lost()
    return said


def fail(first: Failure, others: list[Rank]) -> NoReturn:
    """Raise what went wrong. The first to tell may only have noticed that another one is gone."""
    failures, until = [first], time.monotonic() + LAST_WORDS
    pending = {rank.pipe: rank for rank in others}
    while pending and first.weight < 2 and time.monotonic() < until:
        for pipe in wait(list(pending), max(0.0, until - time.monotonic())):
            assert isinstance(pipe, Connection)
            said = listen(pending[pipe])
            if isinstance(said, Failure):
                failures.append(said)
            if isinstance(said, Failure | Finished):
                del pending[pipe]
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
    """The life of a rank."""
    stop_on_sigterm()
    pipe = Connection(descriptor)
    work, place, job = pickle.loads(pipe.recv_bytes())
    threading.Thread(target=leave_with, args=(pipe,), daemon=True).start()
    module, _, function = work.partition(":")
    number = place.rank

    def tell(said: Any) -> None:
        pipe.send_bytes(pickle.dumps(said))

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
    """A lost connection is a plain RuntimeError of torch, and rarely the cause."""
    return 0 if isinstance(error, RuntimeError) and "onnection" in str(error) else 1


def leave_with(pipe: Connection) -> None:
    """Wait until the pipe is closed, which no message comes through any more; then end."""
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
