"""Use the compiled planner once it is on disk, and let one process per host compile it.

Numba takes about half a minute to compile the planner and caches the result on disk. Until then, a
process plans with the `reference` backend, which returns the same plans. A child process compiles
in the background and ends with its parent. It holds a file lock in the cache directory, so that
other processes wait for its result instead of compiling, too.
"""

from __future__ import annotations

import atexit
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

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("ultraep.compile")
LOCK = "ultraep-compile.lock"
CHILD = (
    "import sys; sys.path[:] = sys.argv[1:]; from ultraep.backends.cpu.on_disk import main; main()"
)
POLL_INTERVAL = 0.5  # seconds between two checks for the compiled planner
SHORT_RUN = 2.0  # seconds; shorter commands do not compile
FALLBACK = "planning with the slower reference backend, which gives the same plans"


class CompiledPlanner:
    """Whether this process can use the compiled planner, and the child process that compiles it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.loaded = self._unavailable = False
        self._compile_from: float | None = None  # monotonic time; None before the first check
        self._next_check = 0.0
        self._logged = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._of_parent: subprocess.Popen[bytes] | None = None  # after a fork

    def ready(self) -> bool:
        """Return whether the compiled planner can be used now. Does not wait for a compiler."""
        if self.loaded or self._unavailable:
            return self.loaded
        with self._mutex:
            if not self.loaded and time.monotonic() >= self._next_check:
                self.loaded = self._check()
                self._next_check = time.monotonic() + POLL_INTERVAL
            return self.loaded

    def request(self) -> None:
        """Compile in the background, starting now, unless the planner is on disk."""
        self._compile_from = self._next_check = 0.0
        self.ready()

    def wait(self) -> None:
        """Load the compiled planner, compiling it here if no other process is doing so."""
        with self._mutex:
            if not self.loaded:
                self.stop()
                on_disk = import_on_disk()
                if not on_disk.load():
                    with _lock(on_disk.cache_folder(), wait=True) or nullcontext():
                        on_disk.call_all()
                self.loaded = True

    def stop(self) -> None:
        """End the child process. Functions compiled so far stay on disk."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()  # waits, and closes the pipe
            self._child = None

    def _check(self) -> bool:
        if self._child is not None:
            return self._has_ended(self._child)
        try:
            on_disk = import_on_disk()
        except BackendUnavailable as error:
            logger.warning("%s; %s", error, FALLBACK)
            self._unavailable = True
            return False
        if self._compile_from is None:
            self._compile_from = time.monotonic() + SHORT_RUN
            if on_disk.load():
                return True
        if time.monotonic() < self._compile_from:
            self._log("the planner is not compiled on this machine yet (backend cpu compiles it)")
            return False
        lock = _lock(on_disk.cache_folder(), wait=False)
        if lock is None:
            self._log("another process is compiling the planner")
            return False
        with lock:
            return on_disk.load() or self._start(lock)

    def _start(self, lock: BinaryIO) -> bool:
        """Start the child, which inherits the lock. Return True if this process must compile."""
        if getattr(sys, "frozen", False):  # sys.executable is the application
            return True
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", CHILD, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=() if fcntl is None else (lock.fileno(),),
            )
        except OSError as error:
            logger.warning("cannot compile the planner in the background: %s", error)
            return True
        self._log("compiling the planner in the background")
        return False

    def _log(self, state: str) -> None:
        if state != self._logged:
            self._logged = state
            logger.info("%s; %s", state, FALLBACK)

    def _has_ended(self, child: subprocess.Popen[bytes]) -> bool:
        code = child.poll()
        if code is None:
            return False
        child.communicate()
        self._child = None
        if code:
            logger.warning("compiling the planner in the background failed: exit code %d", code)
        return True

    def after_fork(self) -> None:
        """Leave the child process to the parent; this process polls the lock instead."""
        self._mutex = threading.Lock()
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            self._of_parent, self._child = self._child, None


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
    if fcntl is None:
        return open(os.devnull, "ab")
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
atexit.register(PLANNER.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PLANNER.after_fork)
