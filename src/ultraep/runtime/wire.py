"""Messages between the processes of one host, through mapped memory. See shared_memory.py.

All ranks map one control file. It begins with 64-bit words, each of which has one writer:

    per rank          pid, state, blame
    per ordered pair  arrived, and what is told of it (by the sender); released (by the receiver)

Each ordered pair has a segment for the bytes, at first a small one at the end of the control file.
For a message that does not fit, the sender makes a larger one, the next generation. Where there is
no room for that, the message travels in pieces. A piece goes like this:

    sender    waits until released == pieces sent; copies the bytes into the segment; tells what
              they are; then counts `arrived` up
    receiver  waits until arrived > pieces read; copies the bytes out; then counts `released` up

The counters only grow, so there is nothing to reset, and no reset to agree about.

Memory order: a word is stored after everything before it, and loaded before everything after it;
fences see to that, since not every processor does. So the data is there once `arrived` is seen,
and has been read once `released` is seen. Words are aligned and therefore stored whole.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from typing import NamedTuple, NoReturn

import torch

from ultraep.backends.cpu.fence import fence
from ultraep.errors import CommunicationError
from ultraep.runtime.segments import Files

VERBS = {"all_gather": 0, "all_to_all": 1, "exchange": 2, "gather_objects": 3}
LINE = 8  # words of a cache line: no two writers share one
PID, STATE, BLAME = 0, 1, 2  # words in the line of a rank
ARRIVED, TOLD, RELEASED = 0, 1, LINE  # words in the two lines of a pair
RUNNING, CLOSED, FAILED = 1, 2, 3
FIRST = 1 << 14  # bytes of a pair's first segment
SMALLEST = 1 << 16  # bytes of a later one
# Bytes that a segment can have, or sockets are as fast: on 2 cores, an all_to_all of 8 MB to each
# took 2, 4 and 8 ranks 3, 35 and 145 ms in pieces of 1 MB, 5, 87 and 682 ms in pieces of 256 KB,
# 7, 161 and 428 ms over sockets.
PIECE = 1 << 20
# Turns of waiting, before the long naps. Few spins: on 2 cores, 200 of them made an all_gather of 4
# ranks three times as slow, and one of 2 ranks no faster.
SPINS, YIELDS, NAPS = 10, 200, 200
NAP, LONG_NAP, LOOK = 20e-6, 100e-6, 0.05  # seconds

Queues = dict[int, deque[torch.Tensor]]  # bytes to send to, or to receive from, each peer


def control_bytes(size: int) -> int:
    """Size of the control file of so many ranks."""
    return _words(size) * 8 + size**2 * FIRST


def largest_segment(size: int, free: int) -> int:
    """Bytes, a power of two: with all segments of that size, half of what is free stays free."""
    each = (free - control_bytes(size)) // (2 * max(1, size * (size - 1)))
    return max(FIRST, 1 << max(each, 1).bit_length() - 1)


def wanted_bytes(size: int) -> int:
    """What should be free for so many ranks: with less, sockets are as fast."""
    return control_bytes(size) + 2 * size * (size - 1) * PIECE


def _words(size: int) -> int:
    return (size + 2 * size**2) * LINE


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

    def tell(self, at: int, told: _Told) -> None:
        """Store words that others load only after a word which is stored later."""
        words = self._words
        words[at], words[at + 1], words[at + 2], words[at + 3] = told

    def told(self, at: int) -> _Told:
        words = self._words
        return _Told(words[at], words[at + 1], words[at + 2], words[at + 3])


class _Told(NamedTuple):
    """What the sender tells of a piece."""

    verb: int
    left: int  # bytes of the message that were not sent before
    size: int  # of these bytes
    generation: int  # of the segment that they are in


class _Pair:
    """What either end of an ordered pair has of it."""

    def __init__(self, files: Files, size: int, source: int, target: int) -> None:
        pair = source * size + target
        self._files, self._name = files, f"{source}-{target}"
        self._words, self._at = _Words(files.control), (size + 2 * pair) * LINE
        self._segment = _bytes_of(files.control, _words(size) * 8 + pair * FIRST, FIRST)
        self._generation = self._pieces = 0  # pieces that were sent, or read


class _Outbox(_Pair):
    """The sender's end."""

    def free(self) -> bool:
        return self._words[self._at + RELEASED] == self._pieces

    def put(self, verb: str, data: torch.Tensor) -> torch.Tensor | None:
        """Send as much as there is room for; the rest of it, if there is one."""
        left = size = len(data)
        if left > len(self._segment):
            self._grow(left)
            size = min(left, len(self._segment))
        self._segment[:size].copy_(data if size == left else data[:size])
        self._words.tell(self._at + TOLD, _Told(VERBS[verb], left, size, self._generation))
        self._pieces += 1
        self._words[self._at + ARRIVED] = self._pieces
        return None if size == left else data[size:]

    def _grow(self, size: int) -> None:
        room, next_one = max(SMALLEST, 1 << (size - 1).bit_length()), self._generation + 1
        memory = self._files.make(f"{self._name}-{next_one}", room, above=len(self._segment))
        if memory is not None:
            self._generation, self._segment = next_one, _bytes_of(memory)


class _Inbox(_Pair):
    """The receiver's end."""

    def arrived(self) -> bool:
        return self._words[self._at + ARRIVED] > self._pieces

    def told(self) -> _Told:
        return self._words.told(self._at + TOLD)

    def take(self, told: _Told, place: torch.Tensor) -> torch.Tensor | None:
        """Fill the place with what has arrived; the rest of it, if there is one."""
        if told.generation != self._generation:
            self._segment = _bytes_of(self._files.open(f"{self._name}-{told.generation}"))
            self._generation = told.generation
        whole = told.size == told.left
        (place if whole else place[: told.size]).copy_(self._segment[: told.size])
        self._pieces += 1
        self._words[self._at + RELEASED] = self._pieces
        return None if whole else place[told.size :]


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

    def __init__(self, rank: int, size: int, timeout: float, files: Files) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._files, self._pid = files, os.getpid()
        self._roll = _Roll(_Words(files.control), rank, size)
        peers = [peer for peer in range(size) if peer != rank]
        self._outboxes = {peer: _Outbox(files, size, rank, peer) for peer in peers}
        self._inboxes = {peer: _Inbox(files, size, peer, rank) for peer in peers}

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
        """Say so, and let go. Others can still read what was sent."""
        if os.getpid() != self._pid:  # a forked child: all of this belongs to its parent
            return
        if self._roll.state(self.rank) == RUNNING:
            self._roll.leave(CLOSED, blame=self.rank)
        self._files.close()
        self._outboxes.clear()
        self._inboxes.clear()

    def _push(self, verb: str, outgoing: Queues) -> bool:
        ready = [peer for peer in outgoing if self._outboxes[peer].free()]
        for peer in ready:
            _advance(outgoing, peer, self._outboxes[peer].put(verb, outgoing[peer][0]))
        return bool(ready)

    def _pull(self, verb: str, incoming: Queues) -> bool:
        ready = [peer for peer in incoming if self._inboxes[peer].arrived()]
        for peer in ready:
            box, place = self._inboxes[peer], incoming[peer][0]
            told = box.told()
            self._compare(verb, peer, told, len(place))
            try:
                rest = box.take(told, place)
            except OSError as error:
                self._fail(verb, peer, f"no message of rank {peer}: {error}")
            _advance(incoming, peer, rest)
        return bool(ready)

    def _compare(self, verb: str, peer: int, told: _Told, size: int) -> None:
        """What has arrived with what is expected."""
        if told.verb != VERBS[verb]:
            other = next(name for name, number in VERBS.items() if number == told.verb)
            self._fail(verb, peer, f"rank {peer} is at {other} instead")
        if told.left != size:
            self._fail(verb, peer, f"rank {peer} sent {told.left} bytes, {size} were expected")

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
        if waited > self.timeout:
            peers = sorted({*outgoing, *incoming})
            names = ", ".join(str(peer) for peer in peers)
            self._fail(verb, peers[0], f"no progress in {self.timeout:g} s with rank {names}")

    def _fail(self, verb: str, blame: int, what: str) -> NoReturn:
        self._roll.leave(FAILED, blame)
        raise CommunicationError(f"{verb}: {what}; noticed by rank {self.rank} of {self.size}")


def _advance(queues: Queues, peer: int, rest: torch.Tensor | None) -> None:
    """Put the rest of the first message in its place; without one, the next is the first."""
    if rest is not None:
        queues[peer][0] = rest
        return
    queues[peer].popleft()
    if not queues[peer]:
        del queues[peer]


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


def _bytes_of(memory: mmap.mmap, begin: int = 0, count: int = -1) -> torch.Tensor:
    with torch.inference_mode(False):  # tensors made in that mode are not to be written later
        return torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=count)
