"""Persistent tile streaming: the weights of experts from rank to rank, by a schedule (`relay.py`).

The programs of a rank share every chunk: each moves its tiles of it and then counts one more at the
receiver. A chunk has arrived when all programs have counted; the receiver passes it on at once. The
sender writes into a slot only after its owner has said, for this epoch, that nobody reads it.

Shapes: W words (4 bytes) of a tile.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.relay import CHUNKS, FILL, HEADER, LONGEST
from ultraep.backends.triton.kernels.signals import (
    HELD,
    TICKETS,
    add_one,
    board_of,
    last_of,
    post,
    wait,
)

ALIGNMENT = tl.constexpr(64)  # of chunks, and of tensors in a row


@triton.jit
def move(
    source, target, nbytes, worker, WIDE: tl.constexpr, W: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Copy this worker's tiles of a piece of memory, given by addresses.

    WIDE: both are aligned to 16 bytes, and up to 15 bytes more may be written.
    """
    if WIDE:
        source = tl.multiple_of(source, 16).to(tl.pointer_type(tl.int32))
        target = tl.multiple_of(target, 16).to(tl.pointer_type(tl.int32))
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        words = tl.multiple_of((nbytes + 15) // 16 * 4, 4)
        at = tl.arange(0, W)
        for begin in range(worker * W, words, PROGRAMS * W):
            begin = tl.multiple_of(begin, 4)
            here = begin + at
            there = here < words
            tile = tl.load(source + here, mask=there, eviction_policy="evict_first")
            tl.store(target + here, tile, mask=there)
    else:
        source = source.to(tl.pointer_type(tl.int8))
        target = target.to(tl.pointer_type(tl.int8))
        at = tl.arange(0, W)
        for begin in range(worker * W, nbytes, PROGRAMS * W):
            here = begin + at
            there = here < nbytes
            tl.store(target + here, tl.load(source + here, mask=there), mask=there)


@triton.jit
def move_from_home(
    homes,
    parts,
    num_parts,
    source,
    target,
    begin,
    end,
    worker,
    W: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Copy this worker's share of a piece of a home expert, whose tensors stand apart.

    parts: [P, 3] where each tensor stands in the row, its bytes, and whether all is aligned.
    """
    for part in range(num_parts):
        offset = tl.load(parts + 3 * part)
        nbytes = tl.load(parts + 3 * part + 1)
        wide = tl.load(parts + 3 * part + 2)
        first = tl.maximum(begin, offset)
        count = tl.minimum(end, offset + nbytes) - first
        if count > 0:
            home = tl.load(homes + part) + source.to(tl.int64) * nbytes + (first - offset)
            if wide != 0:
                move(home, target + first, count, worker, True, W, PROGRAMS)
            else:
                move(home, target + first, count, worker, False, W, PROGRAMS)


@triton.jit
def release_slots(boards, senders, rank, slots, released, epoch):
    """Tell whoever fills the slots of this rank that nobody reads them any more."""
    for slot in range(slots):
        sender = tl.load(senders + slot)
        if sender >= 0:
            post(board_of(boards, sender) + released + rank * slots + slot, epoch)


@triton.jit(
    do_not_specialize=[
        "first_rank",
        "ranks",
        "slots",
        "copies",
        "row_bytes",
        "num_parts",
        "stride",
        "channel",
        "released",
        "arrived",
        "max_chunks",
        "stage",
        "patience",
    ]
)
def stream(
    boards,
    rows,
    homes,
    parts,
    schedules,
    first_rank,
    ranks,
    slots,
    copies,
    row_bytes,
    num_parts,
    stride,
    channel,
    released,
    arrived,
    max_chunks,
    stage,
    patience,
    W: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Programs of one rank after the other: fill the slots of others, until its own are filled.

    rows: addresses of the slots of every rank.   homes: [ranks of this launch, P] addresses.
    released, arrived: words of the first of `ranks * slots` and `slots * max_chunks` flags.
    """
    worker = tl.program_id(0) % PROGRAMS
    index = tl.program_id(0) // PROGRAMS
    rank = first_rank + index
    board = board_of(boards, rank)
    schedule = schedules + index.to(tl.int64) * stride
    epoch = tl.load(board + channel) + 1
    fill = tl.load(schedule + FILL)
    if fill != tl.load(board + channel + HELD):
        senders = schedule + HEADER + 4 * copies
        if worker == 0:
            release_slots(boards, senders, rank, slots, released, epoch)
        send(
            boards,
            rows,
            homes + index * num_parts,
            parts,
            schedule,
            senders,
            rank,
            ranks,
            slots,
            row_bytes,
            num_parts,
            released,
            arrived,
            max_chunks,
            stage,
            patience,
            epoch,
            worker,
            W,
            PROGRAMS,
        )
    if last_of(board + channel + TICKETS, PROGRAMS) & (fill != tl.load(board + channel + HELD)):
        wait_for_slots(
            boards,
            schedule + HEADER + 4 * copies,
            board + arrived,
            rank,
            ranks,
            slots,
            tl.load(schedule + CHUNKS),
            max_chunks,
            stage,
            patience,
            PROGRAMS,
        )
        flag = tl.arange(0, 64)
        for begin in range(0, slots * max_chunks, 64):
            tl.store(board + arrived + begin + flag, 0, mask=begin + flag < slots * max_chunks)
        tl.store(board + channel + HELD, fill)
        tl.store(board + channel, epoch)


@triton.jit
def send(
    boards,
    rows,
    homes,
    parts,
    schedule,
    senders,
    rank,
    ranks,
    slots,
    row_bytes,
    num_parts,
    released,
    arrived,
    max_chunks,
    stage,
    patience,
    epoch,
    worker,
    W: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Chunk c of a hop at depth d goes in round c + d, so that no round waits for a later one."""
    board = board_of(boards, rank)
    num_hops, chunks, longest = (
        tl.load(schedule),
        tl.load(schedule + CHUNKS),
        tl.load(schedule + LONGEST),
    )
    own_slots = tl.load(rows + rank)
    size = tl.cdiv(tl.cdiv(row_bytes, chunks), ALIGNMENT) * ALIGNMENT
    ready = num_hops > 0  # and nobody was waited for in vain
    for moment in range(chunks + longest - 1):
        for number in range(num_hops):
            hop = schedule + HEADER + 4 * number
            source, receiver = tl.load(hop), tl.load(hop + 1)
            slot, chunk = tl.load(hop + 2), moment - tl.load(hop + 3)
            if ready & (chunk >= 0) & (chunk < chunks):
                # All addresses are at hand before the wait, so that what arrives goes on at once.
                target = tl.load(rows + receiver) + slot.to(tl.int64) * row_bytes
                count = board_of(boards, receiver) + arrived + slot * max_chunks + chunk
                begin = chunk * size
                end = tl.minimum(begin + size, row_bytes)
                if chunk == 0:
                    word = board + released + receiver * slots + slot
                    ready &= wait(word, epoch, boards, rank, ranks, receiver, stage, patience)
                if source < 0:
                    held = own_slots + (-1 - source).to(tl.int64) * row_bytes
                    word = board + arrived + (-1 - source) * max_chunks + chunk
                    sender = tl.load(senders - 1 - source)
                    ready &= wait(word, PROGRAMS, boards, rank, ranks, sender, stage, patience)
                    if ready:
                        move(held + begin, target + begin, end - begin, worker, True, W, PROGRAMS)
                elif ready:
                    move_from_home(
                        homes, parts, num_parts, source, target, begin, end, worker, W, PROGRAMS
                    )
                if ready:
                    add_one(count)


@triton.jit
def wait_for_slots(
    boards,
    senders,
    arrived,
    rank,
    ranks,
    slots,
    chunks,
    max_chunks,
    stage,
    patience,
    PROGRAMS: tl.constexpr,
):
    """Until the last byte of every slot of this rank is there."""
    for slot in range(slots):
        sender = tl.load(senders + slot)
        if sender >= 0:
            for chunk in range(chunks):
                wait(
                    arrived + slot * max_chunks + chunk,
                    PROGRAMS,
                    boards,
                    rank,
                    ranks,
                    sender,
                    stage,
                    patience,
                )
