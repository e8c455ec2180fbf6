"""Files in shared memory that the ranks of one group map, and who removes them.

All files of a group begin alike, and one of them is its control file. Every rank holds a lock on
that one for as long as it lives, and the kernel takes it back however the rank ends. So whoever can
lock it alone knows that the whole group is gone, in whatever container it ran: the last rank that
closes, or the next group that starts. Then its files are removed, and no others.
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
    """How the files of a new group begin."""
    return f"{FOLDER}/ultraep-{os.getpid()}-{secrets.token_hex(4)}"


def free_bytes() -> int:
    """Room in the folder; a file system without a limit says that it has no blocks at all."""
    found = os.statvfs(FOLDER)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def sweep() -> None:
    """Remove what groups left behind of which no process lives."""
    for path in glob.glob(f"{glob.escape(FOLDER)}/ultraep-*-control"):
        if re.fullmatch(r"ultraep-\d+-[0-9a-f]{8}-control", os.path.basename(path)):
            _remove_abandoned(path)


class Files:
    """The files of one group, as one of its ranks has them. Errors are `OSError`."""

    def __init__(self, prefix: str, size: int, *, founder: bool) -> None:
        """The founder makes the control file, of `size` bytes; the others open it after that."""
        self.limit = sys.maxsize  # bytes of a file; a power of two
        self._prefix, self._warned = prefix, False
        self._lock = _hold(f"{prefix}-control", founder)
        try:
            if founder:
                os.posix_fallocate(self._lock, 0, size)
            self.control = _map(self._lock, size)
        except OSError:
            self.close()
            raise

    def make(self, name: str, size: int, *, above: int) -> mmap.mmap | None:
        """A file of `size` bytes, or of as many as there is room for; None: no more than `above`.

        Sizes are powers of two.
        """
        while (room := min(size, self.limit)) > above:
            try:
                return _create(f"{self._prefix}-{name}", room)
            except OSError as error:
                self._warn(room, error)
                self.limit = room // 2
        return None

    def open(self, name: str) -> mmap.mmap:
        """The file that another rank has made for this one."""
        path = f"{self._prefix}-{name}"
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory = _map(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        # Both ends have it now. Without a name it goes when they go, however they go.
        _unlink(path)
        return memory

    def _warn(self, room: int, error: OSError) -> None:
        """Once; more would say the same of smaller rooms."""
        if not self._warned:
            logger.warning(
                "%s bytes wanted in %s, %s are free (%s): messages travel in smaller pieces",
                f"{room:,}",
                FOLDER,
                f"{free_bytes():,}",
                error,
            )
        self._warned = True

    def close(self) -> None:
        """Let go of the files. What other ranks did not read yet stays until the last one goes."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        os.close(self._lock)
        _remove_abandoned(f"{self._prefix}-control")


def _hold(path: str, founder: bool) -> int:
    """Open the control file and lock it together with the other ranks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if founder else 0), 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # swept away between the two


def _remove_abandoned(control: str) -> None:
    try:
        descriptor = os.open(control, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # removed by another, of another user, or nothing of ours
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody lives
        return
    else:
        prefix = control.removesuffix("control")
        for path in glob.glob(f"{glob.escape(prefix)}*"):
            if path != control:
                _unlink(path)
        _unlink(control)  # last: who is killed here leaves it to the next
    finally:
        os.close(descriptor)


def _create(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Take the pages now: a full folder is an error here, and a crash at the first write.
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
