"""Messages between the processes of one host, through mapped memory. See shared_memory.py.

All ranks map one control block of 64-bit words, and each word has one writer:

    per rank          pid, state, blame
    per ordered pair  arrived, size, generation (by the sender); released (by the receiver)

Each ordered pair has a data segment. The sender makes it for the first message, and makes it anew,
as the next generation, for a message that does not fit. A message goes like this:

    sender    waits until released == messages sent; copies the bytes into the segment; writes size
              and generation; then counts `arrived` up
    receiver  waits until arrived > messages read; copies the bytes out; then counts `released` up

The counters only grow, so there is nothing to reset, and no reset to agree about.

Memory order: a word is stored after everything before it, and loaded before everything after it;
fences see to that, since not every processor does. So the data is there once `arrived` is seen,
and has been read once `released` is seen. Words are aligned and therefore stored whole.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import time
from collections import deque
from typing import NoReturn

import torch

from ultraep.backends.cpu.fence import fence
from ultraep.errors import CommunicationError

FOLDER = "/dev/shm"
LINE = 8  # words of a cache line: no two writers share one
PID, STATE, BLAME = 0, 1, 2  # words in the line of a rank
ARRIVED, SIZE, GENERATION, RELEASED = 0, 1, 2, LINE  # words in the two lines of a pair
RUNNING, CLOSED, FAILED = 1, 2, 3
SMALLEST = 1 << 16  # bytes of a segment
# Turns of waiting, before the long naps. Few spins: on 2 cores, 200 of them made an all_gather of 4
# ranks three times as slow, and one of 2 ranks no faster.
SPINS, YIELDS, NAPS = 10, 200, 200
NAP, LONG_NAP, LOOK = 20e-6, 100e-6, 0.05  # seconds

Queues = dict[int, deque[torch.Tensor]]  # bytes to send to, or to receive from, each peer


def block_bytes(size: int) -> int:
    """Of the control block of so many ranks."""
    return (size + 2 * size**2) * LINE * 8


class _Words:
    """64-bit words of memory that others map too: a store says that all before it was done."""

    def __init__(self, block: mmap.mmap) -> None:
        self._words = memoryview(block).cast("q")

    def __getitem__(self, at: int) -> int:
        value: int = self._words[at]
        fence()
        return value

    def __setitem__(self, at: int, value: int) -> None:
        fence()
        self._words[at] = value


class _Outbox:
    """The sender's end of an ordered pair."""

    def __init__(self, words: _Words, at: int, path: str) -> None:
        self._words, self._at, self._path = words, at, path
        self._sent = self._generation = 0
        self._segment = torch.empty(0, dtype=torch.uint8, device="cpu")

    def free(self) -> bool:
        return self._words[self._at + RELEASED] == self._sent

    def put(self, data: torch.Tensor) -> None:
        size = len(data)
        if size > len(self._segment):
            self._grow(size)
        self._segment[:size].copy_(data)
        self._words[self._at + SIZE] = size
        self._words[self._at + GENERATION] = self._generation
        self._sent += 1
        self._words[self._at + ARRIVED] = self._sent

    def _grow(self, size: int) -> None:
        room = max(SMALLEST, 1 << (size - 1).bit_length())
        self._generation += 1
        self._segment = _bytes_of(create(f"{self._path}{self._generation}", room))


class _Inbox:
    """The receiver's end of an ordered pair."""

    def __init__(self, words: _Words, at: int, path: str) -> None:
        self._words, self._at, self._path = words, at, path
        self._read = self._generation = 0
        self._segment = torch.empty(0, dtype=torch.uint8, device="cpu")

    def arrived(self) -> bool:
        return self._words[self._at + ARRIVED] > self._read

    def size(self) -> int:
        return self._words[self._at + SIZE]

    def take(self, place: torch.Tensor) -> None:
        if self._generation != self._words[self._at + GENERATION]:
            self._follow(self._words[self._at + GENERATION])
        place.copy_(self._segment[: len(place)])
        self._read += 1
        self._words[self._at + RELEASED] = self._read

    def _follow(self, generation: int) -> None:
        path = f"{self._path}{generation}"
        self._segment = _bytes_of(attach(path))
        # Both ends have it now. Without a name it goes when they go, however they go.
        unlink(path)
        self._generation = generation


class _Roll:
    """Who is still there. Every rank writes its own line."""

    def __init__(self, words: _Words, rank: int, size: int) -> None:
        self._words, self._rank, self._size = words, rank, size
        self._mine = rank * LINE
        words[self._mine + PID] = os.getpid()
        words[self._mine + STATE] = RUNNING

    def state(self, rank: int) -> int:
        return self._words[rank * LINE + STATE]

    def present(self, rank: int) -> bool:
        return self.state(rank) == RUNNING and _alive(self._words[rank * LINE + PID])

    def leave(self, state: int, blame: int) -> None:
        self._words[self._mine + BLAME] = blame
        self._words[self._mine + STATE] = state

    def loss(self) -> tuple[int, str] | None:
        """A rank without which there is no going on, and what happened to it."""
        ranks = range(self._size)
        for rank in ranks:
            if self.state(rank) == RUNNING and not self.present(rank):
                return rank, f"rank {rank} (process {self._words[rank * LINE + PID]}) died"
        for rank in ranks:
            if self.state(rank) == FAILED:
                blame = self._words[rank * LINE + BLAME]
                because = "" if blame == rank else f", because of rank {blame}"
                return blame, f"rank {rank} gave up{because}"
        return None


class _Patience:
    """How to wait: spin, then let others run, then sleep."""

    def __init__(self) -> None:
        self._turns = 0
        self._since = self._looked = time.monotonic()

    def renew(self) -> None:
        self._turns = 0
        self._since = time.monotonic()

    def pause(self) -> bool:
        """One turn; true when it is time to look around."""
        self._turns += 1
        if self._turns <= SPINS:
            return False
        if self._turns <= SPINS + YIELDS:
            os.sched_yield()
            return False
        time.sleep(NAP if self._turns <= SPINS + YIELDS + NAPS else LONG_NAP)
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._looked = now
        return True

    def waited(self) -> float:
        return time.monotonic() - self._since


class Wire:
    """Everything one rank shares with the others, and the moving of messages over it."""

    def __init__(self, rank: int, size: int, timeout: float, block: mmap.mmap, prefix: str) -> None:
        self.rank, self.size, self._timeout, self._prefix = rank, size, timeout, prefix
        self._pid = os.getpid()
        words = _Words(block)
        self._roll = _Roll(words, rank, size)

        def pair(source: int, target: int) -> tuple[_Words, int, str]:
            at = (size + 2 * (source * size + target)) * LINE
            return words, at, f"{prefix}-{source}-{target}-"

        peers = [peer for peer in range(size) if peer != rank]
        with torch.inference_mode(False):  # tensors made in that mode are not to be written later
            self._outboxes = {peer: _Outbox(*pair(rank, peer)) for peer in peers}
            self._inboxes = {peer: _Inbox(*pair(peer, rank)) for peer in peers}

    def move(self, verb: str, outgoing: Queues, incoming: Queues) -> None:
        """Send and receive all of it; empties the queues."""
        if self._roll.state(self.rank) != RUNNING:
            raise CommunicationError(f"{verb}: rank {self.rank} has closed, or failed before")
        done = False
        try:
            patience = _Patience()
            while outgoing or incoming:
                if self._push(verb, outgoing) | self._pull(verb, incoming):
                    patience.renew()
                elif patience.pause():
                    self._look(verb, outgoing, incoming, patience.waited())
            done = True
        finally:
            if not done:
                self.abort()

    def abort(self) -> None:
        if self._roll.state(self.rank) == RUNNING:
            self._roll.leave(FAILED, blame=self.rank)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked child: all of this belongs to its parent
            return
        if self._roll.state(self.rank) == RUNNING:
            self._roll.leave(CLOSED, blame=self.rank)
            self._drain()
        names = [f"-{self.rank}-*", f"-*-{self.rank}-*"]
        if self._roll.state(self.rank) == FAILED:
            names = ["-*"]  # a rank that was killed cannot remove its own
        for name in names:
            for path in glob.glob(self._prefix + name):
                unlink(path)
        self._outboxes.clear()
        self._inboxes.clear()

    def _push(self, verb: str, outgoing: Queues) -> bool:
        ready = [peer for peer in outgoing if self._outboxes[peer].free()]
        for peer in ready:
            try:
                self._outboxes[peer].put(outgoing[peer].popleft())
            except OSError as error:
                self._fail(verb, self.rank, f"no room in {FOLDER} for rank {peer}: {error}")
            if not outgoing[peer]:
                del outgoing[peer]
        return bool(ready)

    def _pull(self, verb: str, incoming: Queues) -> bool:
        ready = [peer for peer in incoming if self._inboxes[peer].arrived()]
        for peer in ready:
            place = incoming[peer].popleft()
            size = self._inboxes[peer].size()
            if size != len(place):
                what = f"rank {peer} sent {size} bytes, {len(place)} were expected"
                self._fail(verb, peer, what)
            try:
                self._inboxes[peer].take(place)
            except OSError as error:
                # A rank that fails removes what others have sent as well: then it is the cause.
                lost = self._roll.loss()
                self._fail(verb, *(lost or (peer, f"no message of rank {peer}: {error}")))
            if not incoming[peer]:
                del incoming[peer]
        return bool(ready)

    def _look(self, verb: str, outgoing: Queues, incoming: Queues, waited: float) -> None:
        loss = self._roll.loss()
        if loss is not None:
            self._fail(verb, *loss)
        # A rank closes after its last message: whoever sees that it closed sees the message too.
        closed = [p for p in {*outgoing, *incoming} if self._roll.state(p) == CLOSED]
        for peer in closed:
            sent = peer not in outgoing or self._outboxes[peer].free()
            came = peer not in incoming or self._inboxes[peer].arrived()
            if not (sent and came):
                self._fail(verb, peer, f"rank {peer} has closed")
        if waited > self._timeout:
            peers = sorted({*outgoing, *incoming})
            names = ", ".join(str(peer) for peer in peers)
            self._fail(verb, peers[0], f"no progress in {self._timeout:g} s with rank {names}")

    def _fail(self, verb: str, blame: int, what: str) -> NoReturn:
        self._roll.leave(FAILED, blame)
        raise CommunicationError(f"{verb}: {what}; noticed by rank {self.rank} of {self.size}")

    def _drain(self) -> None:
        """Wait for the readers of the last messages: those open the segments by name."""
        until = time.monotonic() + self._timeout
        while time.monotonic() < until and any(
            not box.free() and self._roll.present(peer) for peer, box in self._outboxes.items()
        ):
            time.sleep(LONG_NAP)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return True
    return state not in (b"Z", b"X")  # a zombie still has a number, but will not answer


def create(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Take the pages now: a full /dev/shm is an error here, and a crash at the first write.
        os.posix_fallocate(descriptor, 0, size)
        return _map(descriptor, size)
    finally:
        os.close(descriptor)


def attach(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _map(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _bytes_of(memory: mmap.mmap) -> torch.Tensor:
    with torch.inference_mode(False):  # tensors made in that mode are not to be written later
        return torch.frombuffer(memory, dtype=torch.uint8)


def unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
