"""Use the compiled planner once it is on disk, and let one process per host compile it.

Numba takes about half a minute to compile the planner and caches the result on disk. Until then, a
process plans with the `reference` backend, which returns the same plans. A child process of the
first rank of a host compiles in the background and ends with its parent. Only one process at a time
compiles: it locks a file in the cache directory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from types import ModuleType

from ultraep.errors import BackendUnavailable

logger = logging.getLogger("ultraep.compile")
LOCK = "ultraep-compile.lock"
CHILD = (
    "import sys; sys.path[:] = sys.argv[1:]; from ultraep.backends import compiling as c; c.run()"
)
NICENESS = 5  # compiling in the background yields to the ranks of this host
POLL_INTERVAL = 0.5  # seconds between two checks for the compiled planner
FALLBACK = "planning with the slower reference backend, which gives the same plans"


class CompiledPlanner:
    """Whether this process can use the compiled planner, and the child process that compiles it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.loaded = self._unavailable = False
        self._next_check = 0.0
        self._child: subprocess.Popen[bytes] | None = None

    def ready(self) -> bool:
        """Return whether the compiled planner can be used now; otherwise, let it be compiled."""
        if self.loaded or self._unavailable or time.monotonic() < self._next_check:
            return self.loaded
        if self._mutex.acquire(blocking=False):
            try:
                self.loaded = self.loaded or self._check()
                self._next_check = time.monotonic() + POLL_INTERVAL
            finally:
                self._mutex.release()
        return self.loaded

    def wait(self) -> None:
        """Load the compiled planner, compiling it here if no other process is doing so."""
        with self._mutex:
            if not self.loaded:
                load_or_compile()
            self.loaded = True

    def _check(self) -> bool:
        ended = self._child is not None and self._child.poll() is not None
        try:
            cpu = import_cpu()
            if cpu.complete.exists():
                cpu.load()
                return True
            if self._child is None and os.environ.get("LOCAL_RANK", "0") == "0":
                self._start()
        except (BackendUnavailable, OSError) as error:
            self._give_up(str(error))
        if ended and self._child is not None:
            self._give_up(f"compiling the planner failed: exit code {self._child.returncode}")
        return False

    def _start(self) -> None:
        command = [sys.executable, "-c", CHILD, *sys.path]
        nothing = subprocess.DEVNULL
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing
        )
        logger.info("compiling the planner in the background; %s", FALLBACK)

    def _give_up(self, reason: str) -> None:
        self._unavailable = True
        logger.warning("%s; %s", reason, FALLBACK)

    def after_fork(self) -> None:
        """Keep the child process of the parent from outliving it."""
        self._mutex = threading.Lock()
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()


def import_cpu() -> ModuleType:
    """Import the `cpu` backend, which needs a directory that numba can write to."""
    try:
        from ultraep.backends import cpu
    except RuntimeError as error:
        raise BackendUnavailable(
            f"backend 'cpu' cannot be used: {error}; set NUMBA_CACHE_DIR to a writable directory"
        ) from None
    return cpu


def load_or_compile() -> None:
    """Load the planner; compile it if no other process does."""
    cpu = import_cpu()
    if cpu.complete.exists():
        cpu.load()
        return
    with ExitStack() as stack:
        with suppress(OSError):  # another user's file, or a file system without locks
            fcntl.flock(stack.enter_context(open(cpu.cache_folder / LOCK, "ab")), fcntl.LOCK_EX)
        if not cpu.complete.exists():
            logger.info("compiling the planner, which takes a while; later runs load it from disk")
        cpu.load()
        with suppress(OSError):
            cpu.complete.touch()


def run() -> None:
    """Compile the planner, in a child process whose parent may end at any time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICENESS)
    load_or_compile()


def _end_with_parent() -> None:
    """Wait until the parent closes its end of the pipe to stdin, which its death does too."""
    os.read(0, 1)
    os._exit(1)


PLANNER = CompiledPlanner()
os.register_at_fork(after_in_child=PLANNER.after_fork)
