"""Use the compiled planner once it is on disk, and let one process per host compile it.

Numba takes about half a minute to compile the planner and caches the result on disk. Until then, a
process plans with the `reference` backend, which returns the same plans. A child process compiles
in the background and ends with its parent. It holds a file lock in the cache directory, so that
other processes wait for its result instead of compiling, too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import ModuleType
from typing import BinaryIO

from ultraep.errors import BackendUnavailable

logger = logging.getLogger("ultraep.compile")
LOCK = "ultraep-compile.lock"
CHILD = (
    "import sys; sys.path[:] = sys.argv[1:]; from ultraep.backends.cpu.on_disk import main; main()"
)
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
            on_disk = import_on_disk()
            if not self.loaded and not on_disk.load():
                with _lock(on_disk.cache_folder(), wait=True) or nullcontext():
                    on_disk.call_all()
            self.loaded = True

    def _check(self) -> bool:
        if self._child is not None and self._child.poll() is None:
            return False
        try:
            on_disk = import_on_disk()
            if on_disk.load():
                return True
            if self._child is not None:
                self._give_up(f"compiling the planner failed: exit code {self._child.returncode}")
            else:
                self._start(on_disk.cache_folder())
        except (BackendUnavailable, OSError) as error:
            self._give_up(str(error))
        return False

    def _start(self, folder: str) -> None:
        """Start the child, which inherits the lock, unless another process holds it."""
        lock = _lock(folder, wait=False)
        if lock is None:
            return
        with lock:
            self._child = subprocess.Popen(
                [sys.executable, "-c", CHILD, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock.fileno(),),
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


def import_on_disk() -> ModuleType:
    """Import the `cpu` backend, which needs a directory that numba can write to."""
    try:
        from ultraep.backends.cpu import on_disk
    except RuntimeError as error:
        raise BackendUnavailable(
            f"backend 'cpu' cannot be used: {error}; set NUMBA_CACHE_DIR to a writable directory"
        ) from None
    return on_disk


def _lock(folder: str, *, wait: bool) -> BinaryIO | None:
    """Open and lock the lock file; return None if another process holds it.

    If files cannot be locked, returns an unlocked file: several processes may compile.
    """
    try:
        lock = open(os.path.join(folder, LOCK), "ab")  # noqa: SIM115  the caller closes it
    except OSError:  # another user's file
        return open(os.devnull, "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:  # a network file system without locks
        logger.debug("%s cannot be locked: %s", lock.name, error)
    return lock


PLANNER = CompiledPlanner()
os.register_at_fork(after_in_child=PLANNER.after_fork)
