"""Weights and gradients of replicas between ranks, by a schedule (`relay.py`).

    stream    stage 3: write the weights of experts into the spare slots of other ranks
    pull      stage 8, twin of `grad_reduce`: home ranks sum the gradients of their replicas

`stream` is persistent. The programs of a rank share every chunk: each writes its tiles and then
increments a counter at the receiver. A chunk has arrived when all programs have counted; the
receiver then relays it. A sender writes into a slot only after its owner has released the slot for
this epoch.

Shapes: W words (4 bytes) or gradients of a tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import schedule as layout
from ultraep.backends.triton.kernels import signals
from ultraep.backends.triton.kernels.schedule import CHUNKS, FILL, HOPS, LONGEST
from ultraep.backends.triton.kernels.signals import EPOCH, HELD, Waiting

ALIGNMENT = tl.constexpr(64)  # bytes, of chunks and of tensors in a slot


class Sending(NamedTuple):
    """Everything a program needs to fill the slots of other ranks."""

    waiting: Any
    area: Any
    rows: Any  # [R] addresses of the slots of every rank
    homes: Any  # [H, P] addresses of the tensors of home experts
    parts: Any  # [P, 3] of each tensor: offset in a slot, bytes, whether both sides are aligned
    num_parts: Any
    schedule: Any
    senders: Any
    slots: Any
    row_bytes: Any
    released: Any
    arrived: Any
    max_chunks: Any
    epoch: Any
    worker: Any


@triton.jit
def release_flag(area, sending, receiver, slot):
    """Return the word by which a receiver releases its slot to the owner of the area."""
    return area + sending.released + receiver * sending.slots + slot


@triton.jit
def arrival_count(area, sending, slot, chunk):
    """Return the word that counts the programs which have written their part of a chunk."""
    return area + sending.arrived + slot * sending.max_chunks + chunk


@triton.jit
def move(
    source, target, nbytes, worker, WIDE: tl.constexpr, W: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Copy this worker's tiles between two addresses.

    WIDE: both are aligned to 16 bytes, and up to 15 more bytes may be written.
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
    sending, source, target, begin, end, W: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Copy this worker's share of a home expert, whose tensors are apart."""
    for part in range(sending.num_parts):
        offset = tl.load(sending.parts + 3 * part)
        nbytes = tl.load(sending.parts + 3 * part + 1)
        wide = tl.load(sending.parts + 3 * part + 2)
        first = tl.maximum(begin, offset)
        count = tl.minimum(end, offset + nbytes) - first
        if count > 0:
            home = tl.load(sending.homes + source * sending.num_parts + part) + (first - offset)
            if wide != 0:
                move(home, target + first, count, sending.worker, True, W, PROGRAMS)
            else:
                move(home, target + first, count, sending.worker, False, W, PROGRAMS)


@triton.jit
def release_slots(sending):
    """Signal to the ranks that fill the slots of this rank that the slots are free."""
    areas, rank = sending.waiting.areas, sending.waiting.rank
    for slot in range(sending.slots):
        sender = tl.load(sending.senders + slot)
        if sender >= 0:
            area = signals.area_of(areas, sender)
            signals.post(release_flag(area, sending, rank, slot), sending.epoch)


@triton.jit(
    do_not_specialize=["first_rank", "ranks", "slots", "max_replicas", "row_bytes", "num_parts",
                       "num_addresses", "stride", "channel", "released", "arrived", "max_chunks",
                       "stage", "poll_limit"]
)  # fmt: skip
def stream(
    areas,
    rows,
    homes,
    parts,
    schedules,
    first_rank,
    ranks,
    slots,
    max_replicas,
    row_bytes,
    num_parts,
    num_addresses,
    stride,
    channel,
    released,
    arrived,
    max_chunks,
    stage,
    poll_limit,
    W: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Fill the slots of other ranks until the own slots are filled; PROGRAMS programs per rank.

    rows: [R] addresses of the slots of every rank.   homes: [ranks of this launch, H, P] addresses
    of the tensors of home experts, `num_addresses` per rank.
    released, arrived: words of the first of `ranks * slots` and `slots * max_chunks` flags.

    Rank 0 has the schedule of the example of `make_schedule`; slot 0 of rank 1 is released to it.

    >>> areas = at([0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])
    >>> schedule = [1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, -1, 1, 0, -2, 0, 0, 1, 0, 0]
    >>> example(stream, 1, areas=areas, rows=at(empty(1, 4), empty(1, 4)),
    ...         homes=at([1, 2, 3, 4], [5, 6, 7, 8]), parts=[[0, 16, 1]], schedules=[schedule],
    ...         first_rank=0, max_replicas=2, row_bytes=16, num_parts=1, num_addresses=2, stride=21,
    ...         channel=4, released=8, arrived=10, max_chunks=1, stage=2, poll_limit=9, W=4,
    ...         PROGRAMS=1)
    areas = [[0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1]]
    rows = [[[_, _, _, _]], [[1, 2, 3, 4]]]
    """
    worker = tl.program_id(0) % PROGRAMS
    index = tl.program_id(0) // PROGRAMS
    rank = first_rank + index
    area = signals.area_of(areas, rank)
    schedule = schedules + index.to(tl.int64) * stride
    epoch = signals.next_epoch(area, channel)
    fill = tl.load(schedule + FILL)
    sending = Sending(
        Waiting(areas, rank, ranks, stage, poll_limit), area, rows, homes + index * num_addresses,
        parts, num_parts, schedule, layout.senders_of(schedule, max_replicas), slots, row_bytes,
        released, arrived, max_chunks, epoch, worker
    )  # fmt: skip
    if fill != tl.load(area + channel + HELD):
        if worker == 0:
            release_slots(sending)
        send(sending, W, PROGRAMS)
    if signals.last_of(area, channel, PROGRAMS) & (fill != tl.load(area + channel + HELD)):
        wait_for_slots(sending, PROGRAMS)
        flag = tl.arange(0, 64)
        for begin in range(0, slots * max_chunks, 64):
            tl.store(area + arrived + begin + flag, 0, mask=begin + flag < slots * max_chunks)
        tl.store(area + channel + HELD, fill)
        tl.store(area + channel + EPOCH, epoch)


@triton.jit
def send(sending, W: tl.constexpr, PROGRAMS: tl.constexpr):
    """Send all hops; chunk c at depth d goes in round c + d, so that no round needs a later one."""
    schedule = sending.schedule
    num_hops, chunks = tl.load(schedule + HOPS), tl.load(schedule + CHUNKS)
    longest, own_slots = tl.load(schedule + LONGEST), tl.load(sending.rows + sending.waiting.rank)
    size = tl.cdiv(tl.cdiv(sending.row_bytes, chunks), ALIGNMENT) * ALIGNMENT
    ready = num_hops > 0  # and no wait has failed
    for moment in range(chunks + longest - 1):
        for number in range(num_hops):
            hop = layout.load_hop(schedule, number)
            chunk = moment - hop.depth
            if ready & (chunk >= 0) & (chunk < chunks):
                ready = send_chunk(sending, own_slots, ready, hop, chunk, size, W, PROGRAMS)


@triton.jit
def send_chunk(
    sending, own_slots, ready, hop, chunk, size, W: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Send this worker's share of a chunk once it may go; return whether it went."""
    source, receiver, slot, _depth = hop
    waiting, area, row_bytes = sending.waiting, sending.area, sending.row_bytes
    # Load all addresses before the wait, so that an arriving chunk is relayed at once.
    target = tl.load(sending.rows + receiver) + slot.to(tl.int64) * row_bytes
    count = arrival_count(signals.area_of(waiting.areas, receiver), sending, slot, chunk)
    begin = chunk * size
    end = tl.minimum(begin + size, row_bytes)
    if chunk == 0:
        word = release_flag(area, sending, receiver, slot)
        ready &= signals.wait(word, sending.epoch, waiting, receiver)
    if source < 0:
        held = own_slots + (-1 - source).to(tl.int64) * row_bytes
        word = arrival_count(area, sending, -1 - source, chunk)
        sender = tl.load(sending.senders - 1 - source)
        ready &= signals.wait(word, PROGRAMS, waiting, sender)
        if ready:
            move(held + begin, target + begin, end - begin, sending.worker, True, W, PROGRAMS)
    elif ready:
        move_from_home(sending, source, target, begin, end, W, PROGRAMS)
    if ready:
        signals.add_one(count)
    return ready


@triton.jit
def wait_for_slots(sending, PROGRAMS: tl.constexpr):
    """Wait until every slot of this rank is complete."""
    chunks = tl.load(sending.schedule + CHUNKS)
    for slot in range(sending.slots):
        sender = tl.load(sending.senders + slot)
        if sender >= 0:
            for chunk in range(chunks):
                word = arrival_count(sending.area, sending, slot, chunk)
                signals.wait(word, PROGRAMS, sending.waiting, sender)


@triton.jit
def gradient_row(rows, places, replica, width, own, ALIGNED: tl.constexpr):
    """Return the pointer to the gradient of a replica, in the dtype of the home gradient."""
    host, slot = layout.load_pair(places, replica)
    row = tl.load(rows + host).to(own.dtype) + slot.to(tl.int64) * width
    return tl.multiple_of(row, 16) if ALIGNED else row


@triton.jit
def add_rows(total, rows, places, replica, end, width, own, here, there, ALIGNED: tl.constexpr):
    """Add the gradients of up to three replicas to the total, in their order."""
    first = gradient_row(rows, places, replica, width, own, ALIGNED)
    second = gradient_row(rows, places, tl.minimum(replica + 1, end - 1), width, own, ALIGNED)
    third = gradient_row(rows, places, tl.minimum(replica + 2, end - 1), width, own, ALIGNED)
    tile_1 = tl.load(first + here, mask=there)
    tile_2 = tl.load(second + here, mask=there & (here * 0 + replica + 1 < end), other=-0.0)
    tile_3 = tl.load(third + here, mask=there & (here * 0 + replica + 2 < end), other=-0.0)
    return total + tile_1.to(total.dtype) + tile_2.to(total.dtype) + tile_3.to(total.dtype)


@triton.jit(do_not_specialize=["slots", "max_replicas", "homes"])
def pull(
    gradients,
    own,
    rows,
    schedule,
    slots,
    max_replicas,
    homes,
    width,
    stride,
    ACCUMULATOR: tl.constexpr,
    ALIGNED: tl.constexpr,
    W: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Sum the gradients of every home expert with replicas, in the order of the plan.

    gradients, own: [H, width] result and own gradient, `stride` apart; may be one tensor.
    rows: [R] addresses of every rank's `[slots, width]` gradients, in the dtype of `own`.
    ALIGNED: rows begin at multiples of 16 bytes.

    Home expert 0 has one replica, in slot 0 of rank 1:

    >>> schedule = [1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, -1, 1, 0, -2, 0, 0, 1, 0, 0]
    >>> example(pull, 1, gradients=[[-1.0, -1.0], [3.0, 4.0]], own=[[1.0, 2.0], [0.0, 0.0]],
    ...         rows=at([[0.5, 0.5]], [[10.0, 20.0]]), schedule=schedule, max_replicas=2, homes=2,
    ...         width=2, stride=2, ACCUMULATOR=tl.float32, ALIGNED=False, W=2, PROGRAMS=1)
    gradients = [[11.0, 22.0], [3.0, 4.0]]
    """
    worker = tl.program_id(0)
    places = layout.places_of(schedule, max_replicas, slots)
    spans = layout.homes_of(schedule, max_replicas, slots)
    at = tl.arange(0, W)
    target, source = gradients, own
    for home in range(homes):
        first, end = layout.load_pair(spans, home)
        if end > first:
            for begin in range(worker * W, width, PROGRAMS * W):
                here = begin + at
                there = here < width
                total = tl.load(source + here, mask=there).to(ACCUMULATOR)
                for replica in range(first, end, 3):
                    # Load several replicas before the first addition.
                    total = add_rows(
                        total, rows, places, replica, end, width, own, here, there, ALIGNED
                    )
                tl.store(target + here, total.to(gradients.dtype.element_ty), mask=there)
        target += stride
        source += stride
