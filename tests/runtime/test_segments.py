"""Shared memory that is small, full or left behind by killed ranks; timeouts of ranks."""

import fcntl
import logging
import os
import resource
import signal
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, everywhere, leftovers, shared_pool

from ultraep import CommunicationError, ConfigError
from ultraep.comm import Message
from ultraep.runtime import segments, wire
from ultraep.runtime.connect import connect
from ultraep.runtime.shared_memory import SharedMemoryCommunicator
from ultraep.runtime.torch_dist import TorchDistCommunicator, timeout_of

MB = 1 << 20


@contextmanager
def log_lines():
    """Collect the log lines of the package."""
    logger, handler, lines = logging.getLogger("ultraep"), logging.Handler(), []
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# A message that does not fit.


def with_small_files(comm, limit):
    """Send large messages while files may have at most `limit` bytes; return the log."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with log_lines() as lines:
            large_messages(comm, MB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return lines


def large_messages(comm, nbytes):
    numbers = torch.arange(nbytes // 4, dtype=torch.int32)
    every = comm.all_gather(numbers * (comm.rank + 1))
    for rank in range(comm.size):
        assert torch.equal(every[rank], numbers * (rank + 1))
    target, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    few, many = torch.zeros(5), torch.zeros(nbytes // 4 - 3)
    sends = [Message(target, torch.ones_like(few)), Message(target, many + comm.rank + 7)]
    comm.exchange(sends, [Message(source, few), Message(source, many)])
    assert torch.equal(few, torch.ones(5))
    assert torch.equal(many, torch.full_like(many, source + 7))


@pytest.mark.parametrize("limit", [0, 1 << 17])
def test_a_message_that_does_not_fit_travels_in_pieces(limit):
    for lines in everywhere("shared", 3, with_small_files, limit):
        (line,) = lines
        assert line.startswith(f"cannot allocate {MB:,} bytes in /dev/shm, ")
        assert line.endswith("messages travel in smaller pieces")
        assert " are free ([Errno 27] File too large)" in line


def bounded(comm):
    """Send large messages and return the size of the largest segment."""
    large_messages(comm, 2 * MB)
    return max(len(box._segment) for box in comm._wire._outboxes.values())


def on_small_host(rank, group, free, transport, body):
    actual = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_blocks=free // 4096)
    with log_lines() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: actual)
        comm = connect(group, transport=transport)
    try:
        return type(comm), [line for line in lines if "/dev/shm" in line], body(comm)
    finally:
        comm.close()


def test_half_of_the_memory_stays_free():
    actual = shared_pool().run(2, on_small_host, 5 * MB, "auto", bounded)
    assert actual == [(SharedMemoryCommunicator, [], MB)] * 2


def test_auto_takes_sockets_where_there_is_too_little_memory():
    """Containers have 64 MB of /dev/shm by default."""
    actual = shared_pool().run(8, on_small_host, 64 * MB, "auto", all_ranks)
    expected = f"{wire.wanted_bytes(8):,}"
    assert wire.wanted_bytes(6) < 64 * MB < wire.wanted_bytes(7)
    for kind, lines, ranks in actual:
        assert kind is TorchDistCommunicator
        (line,) = lines
        assert f"/dev/shm has {64 * MB:,} bytes free, 8 ranks need {expected}" in line
        assert ranks == list(range(8))


def all_ranks(comm):
    return comm.all_gather(torch.tensor(comm.rank)).tolist()


def test_shared_memory_can_be_forced_with_little_memory():
    free = wire.control_bytes(2) // 4096 * 4096 + 4096
    actual = shared_pool().run(2, on_small_host, free, "shared", bounded)
    assert actual == [(SharedMemoryCommunicator, [], wire.FIRST)] * 2


def without_any(rank, group):
    with pytest.raises(ConfigError) as caught:
        on_small_host(rank, group, 8192, "shared", all_ranks)
    return str(caught.value)


def test_too_little_memory_is_an_error_with_both_numbers():
    expected = f"{wire.control_bytes(2):,}"
    for message in shared_pool().run(2, without_any):
        assert f"/dev/shm has 8,192 bytes free, 2 ranks need {expected}" in message
        assert "--shm-size" in message


def lose_the_race_for_memory(rank, group):
    """Memory is free when rank 0 looks, and full when it allocates."""
    before = set(leftovers([os.getpid()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", raise_no_space)
        with pytest.raises(CommunicationError) as caught:
            connect(group, transport="shared")
    return str(caught.value), set(leftovers([os.getpid()])) - before


def raise_no_space(*args):
    raise OSError(28, os.strerror(28))


def test_a_control_file_that_does_not_fit_is_an_error_everywhere_and_leaves_nothing():
    size = f"{wire.control_bytes(2):,} bytes"
    expected = f"cannot create a control file of {size} in /dev/shm: rank 0: [Errno 28]"
    for message, left in shared_pool().run(2, lose_the_race_for_memory):
        assert expected in message
        assert not left


def test_a_file_system_without_limit_has_free_bytes(monkeypatch):
    unlimited = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0)
    monkeypatch.setattr(os, "statvfs", lambda path: unlimited)
    assert segments.free_bytes() > 1 << 60


# Files of killed ranks.


def die_together(rank, group):
    comm = connect(group, transport="shared")
    if rank == 0:
        comm.exchange([Message(1, torch.zeros(1 << 18))], [])
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_group_leaves_no_files():
    with RankPool(2) as pool:
        assert {o.kind for o in pool.outcomes(2, die_together)} == {"lost"}
        assert leftovers(pool.pids) == []


def die_while_connecting(rank, group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments.SharedFile, "remove_name", lambda file: kill_after(dist.barrier))
        connect(group, transport="shared")


def kill_after(wait):
    wait()
    os.kill(os.getpid(), signal.SIGKILL)


def start_again(rank, group):
    connect(group, transport="auto").close()


def test_the_next_start_removes_the_file_of_a_group_that_was_killed_while_connecting():
    with RankPool(2) as pool:
        assert {o.kind for o in pool.outcomes(2, die_while_connecting)} == {"lost"}
        assert len(leftovers(pool.pids)) == 1
        pool.run(2, start_again)
        assert leftovers(pool.pids) == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FOLDER", str(tmp_path))
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def shared_file(prefix: str, *, founder: bool) -> segments.SharedFile:
    return segments.SharedFile(prefix, 4096, limit=1 << 18, founder=founder)


def test_files_of_running_groups_and_strangers_stay(folder):
    strangers = [
        "ultraep-*-control",
        "ultraep-1-00000000-control.old",
        "ultraep-1-0000000-control",
        "ultraep-notes-control",
        "ultraep-x-00000000-control",
        "other-1-00000000-control",
        "ultraep-7-abcdef01-0-1-1",  # of no group
    ]
    for name in strangers:
        (folder / name).touch()
    (folder / "ultraep-5-00000000-control").symlink_to(folder / "ultraep-notes-control")
    strangers.append("ultraep-5-00000000-control")
    alive = shared_file(segments.new_prefix(), founder=True)
    before = names(folder)
    segments.sweep()
    assert names(folder) == before
    alive.close()
    assert names(folder) == sorted(strangers)


def test_only_files_of_the_dead_group_are_removed(folder):
    """Earlier versions named their segments, too."""
    prefix = "ultraep-1-00000000"
    for name in ("control", "0-1-1", "1-0-2"):
        (folder / f"{prefix}-{name}").touch()
    (folder / f"{prefix}0-1-0-1").touch()
    segments.sweep()
    assert names(folder) == [f"{prefix}0-1-0-1"]


def test_segments_of_all_pairs_and_sizes_are_apart(folder):
    prefix = segments.new_prefix()
    first = shared_file(prefix, founder=True)
    second = shared_file(prefix, founder=False)
    first.remove_name()
    assert names(folder) == []
    places = [(pair, 1 << power) for pair in range(4) for power in (16, 17, 18)]
    for number, (pair, size) in enumerate(places):
        first.allocate(pair, size, above=0)[:] = bytes([number + 1]) * size
    first.control[:] = b"c" * 4096
    first.close()  # the others can still read
    for number, (pair, size) in enumerate(places):
        assert second.segment(pair, size)[:] == bytes([number + 1]) * size
    second.close()


def test_a_larger_segment_frees_the_smaller_one():
    assert shared_pool().run(2, grow, [1 << power for power in range(16, 23)]) == [True] * 2


def grow(rank, group, sizes):
    """Return whether the file has the pages of the last segments only."""
    comm = connect(group, transport="shared")
    for size in sizes:
        comm.all_gather(torch.zeros(size, dtype=torch.uint8))
    allocated = os.fstat(comm._wire._file._descriptor).st_blocks * 512
    dist.barrier()
    comm.close()
    return allocated <= wire.control_bytes(2) + 2 * sizes[-1] + MB


def test_a_control_file_removed_before_its_lock_is_created_again(folder, monkeypatch):
    lock, prefix = fcntl.flock, segments.new_prefix()

    def too_late(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", lock)
        segments.sweep()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    file = shared_file(prefix, founder=True)
    shared_file(prefix, founder=False).close()
    file.close()
    assert names(folder) == []


# Timeouts.


def timeouts(rank, world, transport):
    group = dist.new_group(timeout=timedelta(seconds=99))
    comms = [connect(group, transport=transport, timeout=seconds) for seconds in (None, 17.0)]
    for comm in comms:
        comm.close()
    return [timeout_of(group), *(comm.timeout for comm in comms)]


@pytest.mark.parametrize("transport", ["sockets", "shared"])
def test_the_timeout_is_the_one_of_the_group_unless_it_is_passed(transport):
    assert shared_pool().run(2, timeouts, transport) == [[99.0, 99.0, 17.0]] * 2
