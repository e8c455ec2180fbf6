"""Messages between the processes of one host, through mapped memory. See shared_memory.py.

All ranks map one file. It begins with 64-bit words, each of which has one writer:

    per rank          pid, state, culprit, when it last looked around while waiting
    per ordered pair  arrived and header of the piece (by the sender); released (by the receiver)

Each ordered pair has a segment for the bytes, at first a small one after the control words. For a
message that does not fit, the sender allocates a larger one. If memory is short, the message
travels in pieces. A piece is sent like this:

    sender    waits until released == pieces sent; copies the bytes into the segment; writes the
              header; then increments `arrived`
    receiver  waits until arrived > pieces read; copies the bytes out; then increments `released`

The counters only grow, so they need no reset.

Memory order: fences make sure that a word is stored after everything before it, and loaded before
everything after it. So the data is complete when `arrived` is seen, and has been read when
`released` is seen. Words are aligned, so processors store them whole.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from ultraep.backends.cpu.fence import fence
from ultraep.errors import CommunicationError
from ultraep.runtime.segments import SharedFile

VERBS = ("all_gather", "all_to_all", "exchange", "gather_objects")
LINE = 8  # words of a cache line; no two writers share one
PID, STATE, CULPRIT, WAITING = 0, 1, 2, 3  # words in the line of a rank
FRESH = 2_000  # milliseconds; a rank that waits looks around more often
ARRIVED, HEADER, RELEASED = 0, 1, LINE  # words in the two lines of a pair
RUNNING, CLOSED, FAILED = 1, 2, 3
FIRST = 1 << 14  # bytes of a pair's first segment
SMALLEST = 1 << 16  # bytes of a later one
# Smallest useful size of a segment, below which sockets are as fast. Measured on 2 cores, an
# all_to_all of 8 MB to each of 2, 4 and 8 ranks: 3, 35 and 145 ms in pieces of 1 MB; 5, 87 and
# 682 ms in pieces of 256 KB; 7, 161 and 428 ms over sockets.
PIECE = 1 << 20
# Turns of waiting before the long naps. More spins hurt: on 2 cores, 200 spins made an all_gather
# of 4 ranks three times as slow, and of 2 ranks no faster.
SPINS, YIELDS, NAPS = 10, 200, 200
NAP, LONG_NAP, LOOK = 20e-6, 100e-6, 0.05  # seconds

Queues = dict[int, deque[torch.Tensor]]  # bytes to send to, or to receive from, each peer


def control_bytes(size: int) -> int:
    """Return the size of the control part of a group's file."""
    return _words(size) * 8 + size**2 * FIRST


def largest_segment(size: int, free: int) -> int:
    """Return a power of two: with all segments of that size, half of the free memory stays free."""
    each = (free - control_bytes(size)) // (2 * max(1, size * (size - 1)))
    return max(FIRST, 1 << max(each, 1).bit_length() - 1)


def wanted_bytes(size: int) -> int:
    """Return the free memory below which sockets are as fast."""
    return control_bytes(size) + 2 * size * (size - 1) * PIECE


def _words(size: int) -> int:
    return (size + 2 * size**2) * LINE


class _Header(NamedTuple):
    """The header of a piece, written by the sender."""

    verb: int
    left: int  # bytes of the message that were not sent before
    size: int  # of this piece
    segment: int  # bytes of the segment that holds it


class _Words:
    """Fenced access to the 64-bit control words."""

    def __init__(self, block: mmap.mmap) -> None:
        self._words = memoryview(block).cast("q")

    def __getitem__(self, at: int) -> int:
        value: int = self._words[at]
        fence()
        return value

    def __setitem__(self, at: int, value: int) -> None:
        fence()
        self._words[at] = value

    def write_header(self, at: int, header: _Header) -> None:
        """Store words that others load only after a word which is stored later."""
        words = self._words
        words[at], words[at + 1], words[at + 2], words[at + 3] = header

    def read_header(self, at: int) -> _Header:
        words = self._words
        return _Header(words[at], words[at + 1], words[at + 2], words[at + 3])


class _Pair:
    """An ordered pair of ranks, as either end has it."""

    def __init__(self, file: SharedFile, size: int, source: int, target: int) -> None:
        self._file, self._pair = file, source * size + target
        self._words, self._at = _Words(file.control), (size + 2 * self._pair) * LINE
        begin = _words(size) * 8 + self._pair * FIRST
        self._segment = _bytes_of(file.control, begin, FIRST)
        self._memory: mmap.mmap | None = None  # of a later segment
        self._pieces = 0  # that were sent, or read

    def _use(self, memory: mmap.mmap) -> None:
        self._memory, self._segment = memory, _bytes_of(memory)


class _Outbox(_Pair):
    """The sender's end."""

    def free(self) -> bool:
        return self._words[self._at + RELEASED] == self._pieces

    def put(self, verb: str, data: torch.Tensor) -> torch.Tensor | None:
        """Send the bytes that fit; return the rest, if any."""
        left = size = len(data)
        if left > len(self._segment):
            self._grow(left)
            size = min(left, len(self._segment))
        self._segment[:size].copy_(data if size == left else data[:size])
        header = _Header(VERBS.index(verb), left, size, len(self._segment))
        self._words.write_header(self._at + HEADER, header)
        self._pieces += 1
        self._words[self._at + ARRIVED] = self._pieces
        return None if size == left else data[size:]

    def _grow(self, nbytes: int) -> None:
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        memory = self._file.allocate(self._pair, size, above=len(self._segment))
        if memory is not None:
            if self._memory is not None:
                self._memory.madvise(mmap.MADV_REMOVE)  # free the pages: the receiver read all
            self._use(memory)


class _Inbox(_Pair):
    """The receiver's end."""

    def arrived(self) -> bool:
        return self._words[self._at + ARRIVED] > self._pieces

    def header(self) -> _Header:
        return self._words.read_header(self._at + HEADER)

    def take(self, header: _Header, target: torch.Tensor) -> torch.Tensor | None:
        """Copy the piece to the target; return the rest of the target, if any."""
        if header.segment != len(self._segment):
            self._use(self._file.segment(self._pair, header.segment))
        whole = header.size == header.left
        (target if whole else target[: header.size]).copy_(self._segment[: header.size])
        self._pieces += 1
        self._words[self._at + RELEASED] = self._pieces
        return None if whole else target[header.size :]


class _Backoff:
    """How to wait: spin, then yield, then sleep."""

    def __init__(self) -> None:
        self._turns = 0
        self._since = self._looked = time.monotonic()

    def reset(self) -> None:
        self._turns = 0
        self._since = time.monotonic()

    def pause(self) -> bool:
        """Wait for one turn; return whether it is time to look for lost ranks."""
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
    """Sends and receives the messages of one rank.

    names, first_rank: of all ranks, and the number of rank 0, for errors.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        file: SharedFile,
        names: Sequence[str],
        first_rank: int = 0,
    ) -> None:
        size = len(names)
        self.rank, self.size, self.timeout = rank, size, timeout
        self._names, self.first_rank = names, first_rank
        self._file, self._pid = file, os.getpid()
        self._linked: weakref.ref[Wire] | None = None
        self._words = _Words(file.control)
        self._words[rank * LINE + PID] = self._pid
        self._words[rank * LINE + STATE] = RUNNING
        peers = [peer for peer in range(size) if peer != rank]
        self._outboxes = {peer: _Outbox(file, size, rank, peer) for peer in peers}
        self._inboxes = {peer: _Inbox(file, size, peer, rank) for peer in peers}

    def link(self, other: Wire) -> None:
        """Let the ranks of each wire know when this rank waits on the other one."""
        self._linked, other._linked = weakref.ref(other), weakref.ref(self)

    def move(self, verb: str, outgoing: Queues, incoming: Queues) -> None:
        """Send and receive everything; empties the queues."""
        if self._state(self.rank) != RUNNING:
            raise CommunicationError(
                f"{verb}: {self._names[self.rank]} has closed, or failed before"
            )
        done = False
        try:
            backoff = _Backoff()
            while outgoing or incoming:
                if self._push(verb, outgoing) | self._pull(verb, incoming):
                    backoff.reset()
                    self._note_waiting(False)
                elif backoff.pause():
                    self._look(verb, outgoing, incoming, backoff.waited())
            done = True
        finally:
            if not done:
                self.abort()
            self._note_waiting(False)

    @property
    def closed(self) -> bool:
        return not self._inboxes

    def has_failed(self) -> bool:
        """Whether a rank has failed; may be called by any thread."""
        return not self.closed and FAILED in map(self._state, range(self.size))

    def abort(self) -> None:
        self._leave(FAILED, self.rank)

    def give_up(self, cause: int) -> None:
        """Leave because of a rank, counted like `first_rank`, which may be in another group."""
        self._leave(FAILED, cause - self.first_rank)

    def close(self) -> None:
        """Leave the group; other ranks can still read what was sent."""
        if os.getpid() != self._pid:  # a forked child: everything belongs to its parent
            return
        self._leave(CLOSED, self.rank)
        self._file.close()
        self._outboxes.clear()
        self._inboxes.clear()

    def _state(self, rank: int) -> int:
        return self._words[rank * LINE + STATE]

    def _name(self, rank: int) -> str:
        """Return the name of a rank, which may be in another group."""
        known = 0 <= rank < self.size
        return self._names[rank] if known else f"rank {self.first_rank + rank}"

    def _leave(self, state: int, culprit: int) -> None:
        """Set the state of this rank, unless it has left before."""
        if self._state(self.rank) == RUNNING:
            self._words[self.rank * LINE + CULPRIT] = culprit
            self._words[self.rank * LINE + STATE] = state

    def _loss(self) -> tuple[str, int] | None:
        """Return what happened to a rank that is lost, and the rank that caused it."""
        for rank in range(self.size):
            pid = self._words[rank * LINE + PID]
            if self._state(rank) == RUNNING and not _alive(pid) and self._state(rank) == RUNNING:
                return f"{self._names[rank]} (process {pid}) died", rank
        for rank in range(self.size):
            if self._state(rank) == FAILED:
                culprit = self._words[rank * LINE + CULPRIT]
                because = "" if culprit == rank else f", because of {self._name(culprit)}"
                return f"{self._names[rank]} gave up{because}", culprit
        return None

    def _push(self, verb: str, outgoing: Queues) -> bool:
        ready = [peer for peer in outgoing if self._outboxes[peer].free()]
        for peer in ready:
            _advance(outgoing, peer, self._outboxes[peer].put(verb, outgoing[peer][0]))
        return bool(ready)

    def _pull(self, verb: str, incoming: Queues) -> bool:
        ready = [peer for peer in incoming if self._inboxes[peer].arrived()]
        for peer in ready:
            inbox, target = self._inboxes[peer], incoming[peer][0]
            header = inbox.header()
            self._compare(verb, peer, header, len(target))
            try:
                rest = inbox.take(header, target)
            except OSError as error:
                self._fail(verb, f"no message of {self._names[peer]}: {error}", peer)
            _advance(incoming, peer, rest)
        return bool(ready)

    def _compare(self, verb: str, peer: int, header: _Header, size: int) -> None:
        """Fail if another message has arrived than this rank expects."""
        verb_exists, most = 0 <= header.verb < len(VERBS), min(header.left, header.segment)
        if not verb_exists or not min(header.left, 1) <= header.size <= most:
            self._fail(verb, f"{self._names[peer]} sent a damaged header, {tuple(header)}", peer)
        if VERBS[header.verb] != verb:
            self._fail(verb, f"{self._names[peer]} is at {VERBS[header.verb]} instead", peer)
        if header.left != size:
            sent = f"{self._names[peer]} sent {header.left} bytes"
            self._fail(verb, f"{sent}, {size} were expected", peer)

    def _note_waiting(self, waiting: bool) -> None:
        """Let the other ranks know whether this rank waits, also on the linked wire."""
        at, now = self.rank * LINE + WAITING, _milliseconds() if waiting else 0
        if now or self._words[at]:
            self._words[at] = now
            linked = None if self._linked is None else self._linked()
            if linked is not None and not linked.closed:
                linked._words[linked.rank * LINE + WAITING] = now

    def _waits(self, rank: int) -> bool:
        """Whether a rank waits for another one, and so is not the cause of a delay."""
        return _milliseconds() - self._words[rank * LINE + WAITING] < FRESH

    def _look(self, verb: str, outgoing: Queues, incoming: Queues, waited: float) -> None:
        """Fail if a rank is lost, or if the timeout has passed."""
        self._note_waiting(True)
        loss = self._loss()
        if loss is not None:
            self._fail(verb, *loss)
        peers = sorted({*outgoing, *incoming})
        # A rank closes after its last message, so its messages are visible once it has closed.
        for peer in [peer for peer in peers if self._state(peer) == CLOSED]:
            sent = peer not in outgoing or self._outboxes[peer].free()
            came = peer not in incoming or self._inboxes[peer].arrived()
            if not (sent and came):
                self._fail(verb, f"{self._names[peer]} has closed", peer)
        if waited > self.timeout:
            causes = [peer for peer in peers if not self._waits(peer)] or peers
            names = ", ".join(self._names[peer] for peer in causes)
            self._fail(verb, f"no progress in {self.timeout:g} s with {names}", *causes)

    def _fail(self, verb: str, what: str, *culprits: int) -> NoReturn:
        self._leave(FAILED, culprits[0])
        raise CommunicationError(
            f"{verb}: {what}; noticed by {self._names[self.rank]}",
            ranks=[self.first_rank + rank for rank in culprits],
        )


def _advance(queues: Queues, peer: int, rest: torch.Tensor | None) -> None:
    """Replace the first message by its rest, or remove it."""
    if rest is not None:
        queues[peer][0] = rest
        return
    queues[peer].popleft()
    if not queues[peer]:
        del queues[peer]


def _milliseconds() -> int:
    """Return a time that the processes of a host share."""
    return time.monotonic_ns() // 1_000_000


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
    return state not in (b"Z", b"X")  # a zombie still has a pid, but will not answer


def _bytes_of(memory: mmap.mmap, begin: int = 0, count: int = -1) -> torch.Tensor:
    with torch.inference_mode(False):  # tensors made in inference mode cannot be written later
        return torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=count)
