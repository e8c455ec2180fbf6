"""Words by which ranks speak through each other's memory, in order at the scope of the system.

Every rank has a board of int32 words that all can reach:

    [FAULT]                  what went wrong first: 0, or stage * RANKS + rank + 1
    [SENT]                   copies that this rank was to send so far
    [CHANNEL + c * WORDS..]  channel c: epoch, tickets of the programs that are done; and of buffers
                             of slots, the fill that they hold and the last one that was numbered
    then                     flags

Epochs live on the board and are advanced by the kernels themselves, so a graph can be replayed. A
rank that waits polls its own memory only, at most `patience` times: then it writes the rank it
waited for on every board, and from then on nobody waits for anything.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

FAULT, SENT = tl.constexpr(0), tl.constexpr(1)
CHANNEL = tl.constexpr(4)
EPOCH, TICKETS, HELD, LAST_FILL = (tl.constexpr(number) for number in range(4))
WORDS = tl.constexpr(4)  # of a channel
RANKS = tl.constexpr(65536)  # more than there are


class Waiting(NamedTuple):
    """Who waits, and for how long: boards of all ranks, the rank, its stage, and polls at most."""

    boards: Any
    rank: Any
    ranks: Any
    stage: Any
    patience: Any


@triton.jit
def board_of(addresses, rank):
    """The words of that rank."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def fault_of(stage, peer):
    """What stands at `FAULT` if a rank was waited for in vain."""
    return stage * RANKS + peer + 1


@triton.jit
def next_epoch(board, channel):
    """The number of the meeting or fill that begins; `end_epoch` makes it the last one."""
    return tl.load(board + channel + EPOCH) + 1


@triton.jit
def end_epoch(board, channel, epoch):
    tl.store(board + channel + EPOCH, epoch)


@triton.jit
def next_fill(board, channel):
    """A number that no fill had before."""
    fill = tl.load(board + channel + LAST_FILL) + 1
    tl.store(board + channel + LAST_FILL, fill)
    return fill


@triton.jit
def read(word):
    """What stands there now, and with it all that was written before it."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def post(word, value):
    """Write it behind everything that this program wrote before."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def add_one(word):
    """Count one more, behind everything that this program wrote before."""
    tl.debug_barrier()
    tl.atomic_add(word, 1, sem="release", scope="sys")


@triton.jit
def wait(word, least, waiting, peer):
    """Until the word has come to `least`; whether it has. `peer`: who should have written it."""
    fault = board_of(waiting.boards, waiting.rank) + FAULT
    value, broken, polls = read(word), 0, 0
    while (value - least < 0) & (broken == 0) & (polls < waiting.patience):
        value = read(word)
        polls += 1
        if polls % 32 == 0:
            broken = read(fault)
    came = value - least >= 0
    if (came == 0) & (broken == 0):
        tell(waiting.boards, waiting.ranks, fault_of(waiting.stage, peer))
    return came


@triton.jit
def tell(addresses, ranks, fault):
    """Write what went wrong on all boards where nothing is written yet."""
    for rank in range(ranks):
        tl.atomic_cas(board_of(addresses, rank) + FAULT, 0, fault, sem="acq_rel", scope="sys")


@triton.jit
def last_of(board, channel, programs):
    """Whether all other programs of this launch were here before; then the tickets are anew."""
    tickets = board + channel + TICKETS
    tl.debug_barrier()
    last = tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.atomic_xchg(tickets, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def row_of(table, epoch, sender, ranks, numbers):
    """The row of a sender in a table `[2, R, numbers + 2]`, whose halves take turns."""
    return table + ((epoch & 1) * ranks + sender).to(tl.int64) * (numbers + 2)


@triton.jit(do_not_specialize=["polls"])
def idle(word, polls):
    """Look at a word as often as that, as one that waits does.

    >>> example(idle, 1, word=[0], polls=3)
    nothing
    """
    seen, count = 0, 0
    while (seen == 0) & (count < polls):
        seen = read(word)
        count += 1


@triton.jit(
    do_not_specialize=[
        "rank",
        "ranks",
        "channel",
        "flags",
        "numbers",
        "kind",
        "version",
        "stage",
        "unlike",
        "patience",
    ]
)
def share(
    boards,
    tables,
    row,
    gathered,
    promise,
    versions,
    rank,
    ranks,
    channel,
    flags,
    numbers,
    kind,
    version,
    stage,
    unlike,
    patience,
    B: tl.constexpr,
):
    """Program p: hand `numbers` int32 to rank p, and take those of rank p; all ranks meet.

    tables: memory of all ranks, `[2, R, numbers + 2]`: a fast rank writes its next row into the
    other half, while a slow one still reads.   flags: word of the first of R flags.
    kind: behind the numbers; ranks that meet with different ones are a fault of stage `unlike`.
    version: the last number of a row, of this rank's weights; -1: what stands at `promise`.
    versions: [R] those of all ranks.

    Rank 1 has been here for epoch 1: its flag is on the board of rank 0, its row in the table.

    >>> boards = at([0, 0, 0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    >>> tables = at([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [7, 8, 0, 4]], 4 * [[0, 0, 0, 0]])
    >>> example(share, 2, boards=boards, tables=tables, row=[5, 6], gathered=room(2, 2),
    ...         promise=[3], versions=room(2), rank=0, channel=4, flags=8, numbers=2, kind=0,
    ...         version=-1, stage=0, unlike=4, patience=9, B=2)
    boards = [[0, 0, 0, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]]
    tables = [[[0, 0, 0, 0], [0, 0, 0, 0], [5, 6, 0, 3], [7, 8, 0, 4]],
              [[0, 0, 0, 0], [0, 0, 0, 0], [5, 6, 0, 3], [0, 0, 0, 0]]]
    gathered = [[5, 6], [7, 8]]
    versions = [3, 4]
    """
    peer = tl.program_id(0)
    mine, theirs = board_of(boards, rank), board_of(boards, peer)
    epoch = next_epoch(mine, channel)
    at_peer = row_of(board_of(tables, peer), epoch, rank, ranks, numbers)
    here = row_of(board_of(tables, rank), epoch, peer, ranks, numbers)
    for begin in range(0, numbers, B):
        at = begin + tl.arange(0, B)
        there = at < numbers
        tl.store(at_peer + at, tl.load(row + at, mask=there), mask=there)
    tl.store(at_peer + numbers, kind)
    promised = tl.load(promise, volatile=True)
    tl.store(at_peer + numbers + 1, tl.where(version < 0, promised, version))
    post(theirs + flags + rank, epoch)
    tl.store(versions + peer, 0)
    if wait(mine + flags + peer, epoch, Waiting(boards, rank, ranks, stage, patience), peer):
        tl.store(versions + peer, tl.load(here + numbers + 1, volatile=True))
        if tl.load(here + numbers, volatile=True) != kind:
            tell(boards, ranks, fault_of(unlike, peer))
        for begin in range(0, numbers, B):
            at = begin + tl.arange(0, B)
            there = at < numbers
            taken = tl.load(here + at, mask=there, volatile=True)
            tl.store(gathered + peer.to(tl.int64) * numbers + at, taken, mask=there)
    if last_of(mine, channel, ranks):
        end_epoch(mine, channel, epoch)
