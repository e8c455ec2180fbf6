"""Files in shared memory that the ranks of one group map, and their removal.

All files of a group share a prefix, and one of them is its control file. Every rank holds a shared
lock on the control file while it lives; the kernel releases it however the rank ends. A process
that can lock it exclusively knows that the whole group is gone, in whatever container it ran. The
last rank that closes, or the next group that starts, then removes the files of that group.

`multiprocessing.shared_memory` and torch's shared tensors do not replace this: neither reserves its
pages (a full /dev/shm crashes the first write), and neither removes the files of a killed group.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import mmap
import os
import re
import secrets
import sys

FOLDER = "/dev/shm"

logger = logging.getLogger(__name__)


def new_prefix() -> str:
    """Return a prefix for the files of a new group."""
    return f"{FOLDER}/ultraep-{os.getpid()}-{secrets.token_hex(4)}"


def free_bytes() -> int:
    """Return the free bytes in the folder; a file system without a limit reports no blocks."""
    stats = os.statvfs(FOLDER)
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else sys.maxsize


def sweep() -> None:
    """Remove the files of groups of which no process is alive."""
    for path in glob.glob(f"{glob.escape(FOLDER)}/ultraep-*-control"):
        if re.fullmatch(r"ultraep-\d+-[0-9a-f]{8}-control", os.path.basename(path)):
            _remove_abandoned(path)


class Files:
    """The files of one group, opened by one of its ranks. Errors are `OSError`."""

    def __init__(self, prefix: str, size: int, *, founder: bool) -> None:
        """The founder creates the control file of `size` bytes; the others open it after that."""
        self.limit = sys.maxsize  # bytes of a file; a power of two
        self._prefix, self._warned = prefix, False
        self._lock = _hold(f"{prefix}-control", founder)
        try:
            if founder:
                os.posix_fallocate(self._lock, 0, size)
            # The first segments of all pairs are in it: a rank touches only the pages of its own.
            self.control = mmap.mmap(self._lock, size, flags=mmap.MAP_SHARED)
        except OSError:
            self.close()
            raise

    def make(self, name: str, size: int, *, above: int) -> mmap.mmap | None:
        """Create a file of `size` bytes, or of fewer if memory is short; None: at most `above`.

        Sizes are powers of two.
        """
        while (nbytes := min(size, self.limit)) > above:
            try:
                return _create(f"{self._prefix}-{name}", nbytes)
            except OSError as error:
                if not self._warned:
                    logger.warning(
                        "cannot allocate %s bytes in %s, %s are free (%s): "
                        "messages travel in smaller pieces",
                        f"{nbytes:,}",
                        FOLDER,
                        f"{free_bytes():,}",
                        error,
                    )
                self._warned, self.limit = True, nbytes // 2
        return None

    def open(self, name: str) -> mmap.mmap:
        """Map a file that another rank created for this one."""
        path = f"{self._prefix}-{name}"
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory = _map(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        # Both ends have mapped it. Without a name, it disappears with them, however they end.
        _unlink(path)
        return memory

    def close(self) -> None:
        """Release the files. The last rank removes them."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may hold the descriptor, too
        os.close(self._lock)
        _remove_abandoned(f"{self._prefix}-control")


def _hold(path: str, founder: bool) -> int:
    """Open the control file and take a shared lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if founder else 0), 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # removed by a sweep in between


def _remove_abandoned(control: str) -> None:
    try:
        descriptor = os.open(control, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # removed by another process, of another user, or not ours
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # a rank is alive
        return
    else:
        prefix = control.removesuffix("control")
        for path in glob.glob(f"{glob.escape(prefix)}*"):
            if path != control:
                _unlink(path)
        _unlink(control)  # last: if this process is killed before, the next sweep finds it
    finally:
        os.close(descriptor)


def _create(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Reserve the pages now: a full folder is an error here, and a crash at the first write.
        os.posix_fallocate(descriptor, 0, size)
        return _map(descriptor, size)
    except OSError:
        _unlink(path)
        raise
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
