"""The file in shared memory that the ranks of one group map.

It begins with the control words and the first segments. Larger segments are parts of the same
sparse file: a rank allocates the pages of one when it needs it. As soon as all ranks have opened
the file, it loses its name, so the kernel frees it with the last rank, however the ranks end.

Only a group that is killed while it connects leaves a file. Every rank holds a shared lock on the
file. A process that can lock it exclusively knows that the whole group is gone, in whatever
container it ran; the next group that starts removes it.

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


class SharedFile:
    """The file of one group, opened by one of its ranks. Errors are `OSError`."""

    def __init__(self, prefix: str, size: int, limit: int, *, founder: bool) -> None:
        """The founder creates the file; the others open it after that.

        size: bytes of the control part.
        limit: bytes of the largest segment, a power of two, the same on all ranks.
        """
        self.limit = limit  # halved when memory is short
        self._stride = 2 * limit  # the segments of a pair: sizes are powers of two
        self._first = -(-size // self._stride) * self._stride
        self._path, self._warned = f"{prefix}-control", False
        self._descriptor = _hold(self._path, founder)
        try:
            if founder:
                os.posix_fallocate(self._descriptor, 0, size)
            # The first segments of all pairs are in it: a rank touches only the pages of its own.
            self.control = self._map(0, size, populate=False)
        except OSError:
            self.close()
            raise

    def remove_name(self) -> None:
        """Remove the file from the folder; call it when all ranks have opened the file."""
        _unlink(self._path)

    def allocate(self, pair: int, size: int, *, above: int) -> mmap.mmap | None:
        """Allocate a segment of `size` bytes, or fewer if memory is short; None: at most `above`.

        Sizes are powers of two. A pair uses each size once.
        """
        while (nbytes := min(size, self.limit)) > above:
            try:
                # Reserve the pages now: a full folder is an error here, and a crash at a write.
                os.posix_fallocate(self._descriptor, self._begin(pair, nbytes), nbytes)
                return self.segment(pair, nbytes)
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

    def segment(self, pair: int, size: int) -> mmap.mmap:
        """Map a segment that this rank or the sender allocated."""
        if size.bit_count() != 1 or size > self._stride // 2:
            raise OSError(f"a segment cannot have {size} bytes")
        return self._map(self._begin(pair, size), size)

    def close(self) -> None:
        """Close the file; what is mapped stays mapped."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child may have it open, too
        os.close(self._descriptor)
        _remove_abandoned(self._path)

    def _begin(self, pair: int, size: int) -> int:
        return self._first + pair * self._stride + size  # no two powers of two overlap

    def _map(self, begin: int, size: int, *, populate: bool = True) -> mmap.mmap:
        if os.fstat(self._descriptor).st_size < begin + size:  # a write would end the process
            raise OSError(f"the file ends before the {size} bytes at {begin}")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(self._descriptor, size, flags=flags, offset=begin)


def _hold(path: str, founder: bool) -> int:
    """Open the file and take a shared lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if founder else 0), 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # removed by a sweep in between


def _remove_abandoned(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # removed by another process, of another user, or not ours
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # a rank is alive
        return
    else:
        # Earlier versions kept more files, and the name of this one while the group lived.
        for segment in glob.glob(f"{glob.escape(path.removesuffix('control'))}*"):
            if segment != path:
                _unlink(segment)
        _unlink(path)  # last: if this process is killed before, the next sweep finds it
    finally:
        os.close(descriptor)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
