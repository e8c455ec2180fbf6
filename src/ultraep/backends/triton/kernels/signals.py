"""Signals between ranks: int32 words in memory that all ranks can access, at system scope.

Every rank has a signal area:

    [FAULT]                  the first fault: 0, or stage * RANKS + rank + 1
    [CHANNEL + c * WORDS..]  channel c: epoch, and a counter of finished programs; for buffers of
                             slots also the fill that they hold and the number of the last fill
    then                     flags

Kernels advance the epochs themselves, so that graphs can be replayed. A waiting rank polls its own
memory, at most `poll_limit` times. Then it writes the rank it waited for to every area, and from
then on no rank waits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

FAULT = tl.constexpr(0)
CHANNEL = tl.constexpr(4)
EPOCH, TICKETS, HELD, LAST_FILL = (tl.constexpr(number) for number in range(4))
WORDS = tl.constexpr(4)  # of a channel
RANKS = tl.constexpr(65536)  # more than any group has
POSITION = tl.constexpr(3)  # words: point, step and digest


class Waiting(NamedTuple):
    """Arguments of `wait`: areas of all ranks, this rank, its stage, and the most polls."""

    areas: Any
    rank: Any
    ranks: Any
    stage: Any
    poll_limit: Any


@triton.jit
def area_of(addresses, rank):
    """Return the memory of a rank as int32 words."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def fault_of(stage, peer):
    """Return the fault word for a rank that did not signal in time."""
    return stage * RANKS + peer + 1


@triton.jit
def next_epoch(area, channel):
    """Return the number of the epoch that begins; the last program stores it."""
    return tl.load(area + channel + EPOCH) + 1


@triton.jit
def read(word):
    """Read a word; also makes visible what the writer wrote before it."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def post(word, value):
    """Write a word after everything that this program wrote before."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def add_one(word):
    """Increment a word after everything that this program wrote before."""
    tl.debug_barrier()
    tl.atomic_add(word, 1, sem="release", scope="sys")


@triton.jit
def wait(word, least, waiting, peer):
    """Poll until the word reaches `least`; return whether it did. `peer` should write it."""
    fault = area_of(waiting.areas, waiting.rank) + FAULT
    value, broken, polls = read(word), 0, 0
    while (value - least < 0) & (broken == 0) & (polls < waiting.poll_limit):
        value = read(word)
        polls += 1
        if polls % 32 == 0:
            broken = read(fault)
    arrived = value - least >= 0
    if (arrived == 0) & (broken == 0):
        report(waiting.areas, waiting.ranks, fault_of(waiting.stage, peer))
    return arrived


@triton.jit
def report(addresses, ranks, fault):
    """Write a fault to all areas that have none."""
    for rank in range(ranks):
        tl.atomic_cas(area_of(addresses, rank) + FAULT, 0, fault, sem="acq_rel", scope="sys")


@triton.jit
def last_of(area, channel, programs):
    """Return whether all other programs of this launch have arrived; then reset the counter."""
    tickets = area + channel + TICKETS
    tl.debug_barrier()
    last = tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.atomic_xchg(tickets, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def row_of(table, epoch, sender, ranks, stride):
    """Return the row of a sender in a table `[2, R, stride]`, whose halves alternate."""
    return table + ((epoch & 1) * ranks + sender).to(tl.int64) * stride


@triton.jit(do_not_specialize=["polls"])
def idle(word, polls):
    """Poll a word that stays 0, to measure how long a poll takes."""
    value, count = 0, 0
    while (value == 0) & (count < polls):
        value = read(word)
        count += 1


@triton.jit(
    do_not_specialize=["rank", "ranks", "channel", "flags", "numbers", "stride", "point", "step",
                       "digest", "stage", "mismatch", "poll_limit"]
)  # fmt: skip
def share(
    areas,
    tables,
    row,
    gathered,
    positions,
    rank,
    ranks,
    channel,
    flags,
    numbers,
    stride,
    point,
    step,
    digest,
    stage,
    mismatch,
    poll_limit,
    B: tl.constexpr,
):
    """Program p: exchange position and `numbers` int32 with rank p. A barrier.

    tables: memory of all ranks, `[2, R, stride]`: a fast rank writes its next row into the other
    half while a slow rank still reads.   flags: word of the first of R flags.
    positions: [R + 1, 3] receives point, step and digest of all ranks, and the fault of this rank.
    mismatch: the stage of the fault if ranks differ; -1: no fault, because the host compares them.

    Rank 1 has signalled epoch 1: its flag is in the area of rank 0, its row in the table.

    >>> areas = at([0, 0, 0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    >>> tables = at([[0] * 5, [0] * 5, [0] * 5, [3, 1, 9, 7, 8]], 4 * [[0] * 5])
    >>> example(share, 2, areas=areas, tables=tables, row=[5, 6], gathered=empty(2, 2),
    ...         positions=empty(3, 3), rank=0, channel=4, flags=8, numbers=2, stride=5, point=3,
    ...         step=1, digest=9, stage=0, mismatch=4, poll_limit=9, B=2)
    areas = [[0, 0, 0, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]]
    tables = [[[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [3, 1, 9, 5, 6], [3, 1, 9, 7, 8]],
              [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [3, 1, 9, 5, 6], [0, 0, 0, 0, 0]]]
    gathered = [[5, 6], [7, 8]]
    positions = [[3, 1, 9], [3, 1, 9], [0, _, _]]
    """
    peer = tl.program_id(0)
    mine, theirs = area_of(areas, rank), area_of(areas, peer)
    epoch = next_epoch(mine, channel)
    at_peer = row_of(area_of(tables, peer), epoch, rank, ranks, stride)
    here = row_of(area_of(tables, rank), epoch, peer, ranks, stride)
    for begin in range(0, numbers, B):
        at = begin + tl.arange(0, B)
        there = at < numbers
        tl.store(at_peer + POSITION + at, tl.load(row + at, mask=there), mask=there)
    tl.store(at_peer, point)
    tl.store(at_peer + 1, step)
    tl.store(at_peer + 2, digest)
    post(theirs + flags + rank, epoch)
    if wait(mine + flags + peer, epoch, Waiting(areas, rank, ranks, stage, poll_limit), peer):
        point_there = tl.load(here, volatile=True)
        step_there = tl.load(here + 1, volatile=True)
        digest_there = tl.load(here + 2, volatile=True)
        tl.store(positions + peer * POSITION, point_there)
        tl.store(positions + peer * POSITION + 1, step_there)
        tl.store(positions + peer * POSITION + 2, digest_there)
        differs = (point_there != point) | (step_there != step) | (digest_there != digest)
        if differs & (mismatch >= 0):
            report(areas, ranks, fault_of(mismatch, peer))
        for begin in range(0, numbers, B):
            at = begin + tl.arange(0, B)
            there = at < numbers
            taken = tl.load(here + POSITION + at, mask=there, volatile=True)
            tl.store(gathered + peer.to(tl.int64) * numbers + at, taken, mask=there)
    if last_of(mine, channel, ranks):
        tl.store(mine + channel + EPOCH, epoch)
        tl.store(positions + ranks * POSITION, tl.load(mine + FAULT, volatile=True))
