"""Persistent tile streaming: the weights of experts from rank to rank, by a schedule (`relay.py`).

The programs of a rank share every chunk: each moves its tiles of it and then counts one more at the
receiver. A chunk has arrived when all programs have counted; the receiver passes it on at once. The
sender writes into a slot only after its owner has said, for this epoch, that nobody reads it.

Shapes: W words (4 bytes) of a tile.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.schedule import (
    CHUNKS,
    DEPTH,
    FILL,
    HOPS,
    LONGEST,
    RECEIVER,
    SOURCE,
    TO_SLOT,
    hop_at,
    senders_of,
)
from ultraep.backends.triton.kernels.signals import (
    HELD,
    add_one,
    board_of,
    end_epoch,
    last_of,
    next_epoch,
    post,
    wait,
)

ALIGNMENT = tl.constexpr(64)  # of chunks, and of tensors in a row


@triton.jit
def release_flag(board, released, receiver, slot, slots):
    """The word at which a receiver tells the owner of the board that its slot is free."""
    return board + released + receiver * slots + slot


@triton.jit
def arrival_count(board, arrived, slot, chunk, max_chunks):
    """The word at which programs count that they have brought their part of a chunk."""
    return board + arrived + slot * max_chunks + chunk


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
    homes, parts, num_parts, source, target, begin, end, worker,
    W: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
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
            home = tl.load(homes + source * num_parts + part) + (first - offset)
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
            post(release_flag(board_of(boards, sender), released, rank, slot, slots), epoch)


@triton.jit(
    do_not_specialize=[
        "first_rank",
        "ranks",
        "slots",
        "copies",
        "row_bytes",
        "num_parts",
        "num_addresses",
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
    num_addresses,
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

    rows: addresses of the slots of every rank.   homes: [ranks of this launch, H, P] addresses of
    the tensors of home experts, `num_addresses` for each rank.
    released, arrived: words of the first of `ranks * slots` and `slots * max_chunks` flags.

    Rank 0 has the schedule that `make_schedule` shows, and slot 0 of rank 1 is released to it.

    >>> boards = at([0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])
    >>> schedule = [1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, -1, 1, 0, -2, 0, 0, 1, 0, 0]
    >>> example(stream, 1, boards=boards, rows=at(room(1, 4), room(1, 4)),
    ...         homes=at([1, 2, 3, 4], [5, 6, 7, 8]), parts=[[0, 16, 1]], schedules=[schedule],
    ...         first_rank=0, copies=2, row_bytes=16, num_parts=1, num_addresses=2, stride=21,
    ...         channel=4, released=8, arrived=10, max_chunks=1, stage=2, patience=9, W=4,
    ...         PROGRAMS=1)
    boards = [[0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1]]
    rows = [[[_, _, _, _]], [[1, 2, 3, 4]]]
    """
    worker = tl.program_id(0) % PROGRAMS
    index = tl.program_id(0) // PROGRAMS
    rank = first_rank + index
    board = board_of(boards, rank)
    schedule = schedules + index.to(tl.int64) * stride
    epoch = next_epoch(board, channel)
    fill = tl.load(schedule + FILL)
    if fill != tl.load(board + channel + HELD):
        if worker == 0:
            release_slots(boards, senders_of(schedule, copies), rank, slots, released, epoch)
        send(
            boards, board, rows, homes + index * num_addresses, parts, schedule,
            senders_of(schedule, copies), rank, ranks, slots, row_bytes, num_parts, released,
            arrived, max_chunks, stage, patience, epoch, worker, W, PROGRAMS
        )  # fmt: skip
    if last_of(board, channel, PROGRAMS) & (fill != tl.load(board + channel + HELD)):
        wait_for_slots(
            boards, board, senders_of(schedule, copies), rank, ranks, slots,
            tl.load(schedule + CHUNKS), arrived, max_chunks, stage, patience, PROGRAMS
        )  # fmt: skip
        flag = tl.arange(0, 64)
        for begin in range(0, slots * max_chunks, 64):
            tl.store(board + arrived + begin + flag, 0, mask=begin + flag < slots * max_chunks)
        tl.store(board + channel + HELD, fill)
        end_epoch(board, channel, epoch)


@triton.jit
def send(
    boards, board, rows, homes, parts, schedule, senders, rank, ranks, slots, row_bytes,
    num_parts, released, arrived, max_chunks, stage, patience, epoch, worker,
    W: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Chunk c of a hop at depth d goes in round c + d, so that no round waits for a later one."""
    num_hops, chunks = tl.load(schedule + HOPS), tl.load(schedule + CHUNKS)
    longest, own_slots = tl.load(schedule + LONGEST), tl.load(rows + rank)
    size = tl.cdiv(tl.cdiv(row_bytes, chunks), ALIGNMENT) * ALIGNMENT
    ready = num_hops > 0  # and nobody was waited for in vain
    for moment in range(chunks + longest - 1):
        for number in range(num_hops):
            source = tl.load(hop_at(schedule, number, SOURCE))
            receiver = tl.load(hop_at(schedule, number, RECEIVER))
            slot = tl.load(hop_at(schedule, number, TO_SLOT))
            chunk = moment - tl.load(hop_at(schedule, number, DEPTH))
            if ready & (chunk >= 0) & (chunk < chunks):
                ready = send_chunk(
                    boards, board, rows, homes, parts, senders, own_slots, ready, source,
                    receiver, slot, chunk, size, rank, ranks, slots, row_bytes, num_parts,
                    released, arrived, max_chunks, stage, patience, epoch, worker, W, PROGRAMS
                )  # fmt: skip


@triton.jit
def send_chunk(
    boards, board, rows, homes, parts, senders, own_slots, ready, source, receiver, slot, chunk,
    size, rank, ranks, slots, row_bytes, num_parts, released, arrived, max_chunks, stage,
    patience, epoch, worker, W: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Send this worker's share of one chunk of a hop as soon as it may go; whether it went."""
    # All addresses are at hand before the wait, so that what arrives goes on at once.
    target = tl.load(rows + receiver) + slot.to(tl.int64) * row_bytes
    count = arrival_count(board_of(boards, receiver), arrived, slot, chunk, max_chunks)
    begin = chunk * size
    end = tl.minimum(begin + size, row_bytes)
    if chunk == 0:
        word = release_flag(board, released, receiver, slot, slots)
        ready &= wait(word, epoch, boards, rank, ranks, receiver, stage, patience)
    if source < 0:
        held = own_slots + (-1 - source).to(tl.int64) * row_bytes
        word = arrival_count(board, arrived, -1 - source, chunk, max_chunks)
        sender = tl.load(senders - 1 - source)
        ready &= wait(word, PROGRAMS, boards, rank, ranks, sender, stage, patience)
        if ready:
            move(held + begin, target + begin, end - begin, worker, True, W, PROGRAMS)
    elif ready:
        move_from_home(homes, parts, num_parts, source, target, begin, end, worker, W, PROGRAMS)
    if ready:
        add_one(count)
    return ready


@triton.jit
def wait_for_slots(
    boards, board, senders, rank, ranks, slots, chunks, arrived, max_chunks, stage, patience,
    PROGRAMS: tl.constexpr
):  # fmt: skip
    """Until the last byte of every slot of this rank is there."""
    for slot in range(slots):
        sender = tl.load(senders + slot)
        if sender >= 0:
            for chunk in range(chunks):
                word = arrival_count(board, arrived, slot, chunk, max_chunks)
                wait(word, PROGRAMS, boards, rank, ranks, sender, stage, patience)
