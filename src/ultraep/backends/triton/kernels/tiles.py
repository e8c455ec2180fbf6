"""Arguments of grouped products: matrices, tensors of slots, and the order of tiles.

A *row of tiles* covers BLOCK_M rows of one slot and all columns of the result. Rows of tiles form
bands within a slot, and a band is computed column by column: programs that run at the same time
share rows and weights, and find most of them in the cache.

Program p of P, numbered in the order in which programs begin, computes the tiles p, p + P, ...
A kernel of another stream or process may keep a multiprocessor busy, so that a program begins late:
after the first tile is computed. All programs then draw the tiles of late programs from a counter.
Otherwise the product could take twice as long.

Shapes: L slots of this rank, padded to a power of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.schedule import load_pair

HEADER = tl.constexpr(6)  # integers before the rows of tiles
ENTRIES = tl.constexpr(5)  # integers per row of tiles
DRAWN, IN_TIME, BEGUN = (tl.constexpr(index) for index in (2, 3, 4))  # in the header
MANY = tl.constexpr(65536)  # more than any product has programs
FEW = tl.constexpr(3)  # with at most 3 tiles per program, counting costs more than it gains


class Matrix(NamedTuple):
    """A matrix with contiguous rows."""

    ptr: Any
    stride: Any
    columns: Any


class SlotTensors(NamedTuple):
    """One tensor per slot, in two stacks: home slots, then spare slots; all None: no tensors.

    sums_ptr: where gradients of home experts with replicas go, laid out like `homes_ptr`.
    spans_ptr: [H, 2] first and end of the replicas of every home expert.
    """

    homes_ptr: Any
    replicas_ptr: Any
    sums_ptr: Any
    spans_ptr: Any
    stride_home: Any
    stride_replica: Any
    stride_row: Any


class Progress(NamedTuple):
    """State of a program within its product.

    launch: number of the product among all products with these tiles.
    in_time: number of programs that are not late; 0: unknown; -1: unknown, before the first tile.
    """

    launch: Any
    in_time: Any


class Part(NamedTuple):
    """`count` rows of one slot, from row `begin` on."""

    slot: Any
    begin: Any
    count: Any


@triton.jit(do_not_specialize=["num_slots"])
def lay_tiles(
    offsets_ptr,
    tiles_ptr,
    num_slots,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    B: tl.constexpr,
):
    """Program l: write the rows of tiles of slot l.

    tiles_ptr: the number of rows of tiles, whether most belong to slots of at most BLOCK_M // 2
    rows, and counters, see `first_tile`. Then, from index HEADER on, for each: slot, first row,
    rows of the slot from there on, first row of tiles of its band, height of the band. Bands of a
    slot have equal heights of about GROUP_M.

    >>> example(lay_tiles, 3, offsets=[0, 1, 2, 5], tiles=empty(31), num_slots=3, L=4, BLOCK_M=2,
    ...         GROUP_M=2, B=4)
    tiles = [4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 2, 2, 2, 4, 1, 2, 2,
             _, _, _, _, _]
    """
    slot, slot_L = tl.program_id(0), tl.arange(0, L)
    mask_l = slot_L < num_slots
    begin_L = tl.load(offsets_ptr + slot_L, mask=mask_l, other=0)
    rows_L = tl.load(offsets_ptr + slot_L + 1, mask=mask_l, other=0) - begin_L
    high_L = tl.cdiv(rows_L, BLOCK_M)
    own_L = slot_L == slot
    high, rows = tl.sum(tl.where(own_L, high_L, 0), 0), tl.sum(tl.where(own_L, rows_L, 0), 0)
    first_row = tl.sum(tl.where(own_L, begin_L, 0), 0)
    before = tl.sum(tl.where(slot_L < slot, high_L, 0), 0)
    bands = tl.maximum((high + GROUP_M // 2) // GROUP_M, 1)
    height, higher = tl.maximum(high // bands, 1), high % bands  # `higher` bands have one more
    for begin in range(0, high, B):
        tile_B = begin + tl.arange(0, B)
        after_B = tile_B - higher * (height + 1)
        within_B = tl.where(after_B < 0, tile_B % (height + 1), after_B % height)
        at_B, mask_b = tiles_ptr + HEADER + ENTRIES * (before + tile_B), tile_B < high
        tl.store(at_B, slot, mask=mask_b)
        tl.store(at_B + 1, first_row + tile_B * BLOCK_M, mask=mask_b)
        tl.store(at_B + 2, rows - tile_B * BLOCK_M, mask=mask_b)
        tl.store(at_B + 3, before + tile_B - within_B, mask=mask_b)
        tl.store(at_B + 4, tl.where(after_B < 0, height + 1, height), mask=mask_b)
    low = tl.sum(((rows_L > 0) & (rows_L <= BLOCK_M // 2)).to(tl.int32), 0)
    tl.store(tiles_ptr, tl.sum(high_L, 0))
    tl.store(tiles_ptr + 1, (2 * low > tl.sum(high_L, 0)).to(tl.int32))
    for counter in tl.static_range(2, HEADER):
        tl.store(tiles_ptr + counter, 0)


@triton.jit
def first_tile(tiles, total, programs):
    """Return the first tile of this program, at least `total` if it has none, and its progress.

    The counters need no reset. Every product counts each of its programs twice in one 64-bit word:
    in the lower half when it begins, in the upper half when it calls `programs_in_time`. A small
    product in one launch has fixed tiles and counts nothing.
    """
    tile, launch, in_time = tl.program_id(0), tl.full((), 0, tl.int64), programs
    if (total > FEW * programs) | (tl.num_programs(0) < programs):
        state = tl.atomic_add(counts(tiles), 1, sem="relaxed", scope="gpu")
        begun = state & 0xFFFFFFFF
        launch = begun // programs
        tile, in_time = (begun - launch * programs).to(tl.int32), tl.full((), -1, tl.int32)
        if state >> 32 > launch * programs:
            in_time = programs_in_time(tiles, launch, True, programs)
            tile = draw(tiles, in_time, programs)
    return tile, Progress(launch, in_time)


@triton.jit
def counts(tiles):
    """Return the pointer to the 64-bit word of `first_tile`."""
    return (tiles + BEGUN).to(tl.pointer_type(tl.int64))


@triton.jit
def draw(tiles, in_time, programs):
    """Draw a tile of the late programs."""
    drawn, late = tl.atomic_add(tiles + DRAWN, 1, sem="relaxed", scope="gpu"), programs - in_time
    return in_time + drawn % late + drawn // late * programs


@triton.jit
def next_tile(tiles, tile, progress, total, programs):
    """Return the tile after this one, at least `total` if there is none, and the progress.

    Call it before computing this tile; the second call finds out how many programs are in time.
    """
    in_time, after = progress.in_time, tile + programs
    if in_time == 0:
        in_time = programs_in_time(tiles, progress.launch, False, programs)
    own = (after < total) & (tile % programs < in_time)
    if (in_time > 0) & (in_time < programs) & (own == 0):
        after = draw(tiles, in_time, programs)
    return after, Progress(progress.launch, tl.maximum(in_time, 0))


@triton.jit
def finish(tiles, progress, programs):
    """Count this program in `programs_in_time` if `next_tile` has not done so."""
    if progress.in_time <= 0:
        programs_in_time(tiles, progress.launch, False, programs)


@triton.jit
def programs_in_time(tiles, launch, late, programs):
    """Return the number of programs in time, which the first caller of a product fixes.

    A caller after all programs have begun returns `programs`: late programs draw their own tiles.
    """
    state = tl.atomic_add(counts(tiles), 1 << 32, sem="acq_rel", scope="gpu")
    begun = ((state & 0xFFFFFFFF) - launch * programs).to(tl.int32)
    tag, in_time = (launch * MANY).to(tl.int32), programs
    if (begun < programs) | late:
        if state >> 32 == launch * programs:
            in_time = begun
            tl.atomic_xchg(tiles + DRAWN, 0, sem="relaxed", scope="gpu")
            tl.atomic_xchg(tiles + IN_TIME, tag + in_time, sem="release", scope="gpu")
        else:
            in_time = tl.atomic_add(tiles + IN_TIME, 0, sem="acquire", scope="gpu") - tag
            while in_time <= 0:
                in_time = tl.atomic_add(tiles + IN_TIME, 0, sem="acquire", scope="gpu") - tag
    return in_time


@triton.jit
def find_tile(tiles, tile, high, wide):
    """Return the rows of a tile, and its column.

    The count of rows runs to the end of the slot: it may be larger than BLOCK_M.
    """
    mask = tile < high * wide
    at = tiles + HEADER + ENTRIES * (tile // wide)
    first = tl.load(at + 3, mask=mask, other=0)
    height = tl.load(at + 4, mask=mask, other=1)
    within = tile - first * wide
    number = first + within % height
    at = tiles + HEADER + ENTRIES * number
    slot = tl.load(at, mask=mask, other=0)
    begin = tl.load(at + 1, mask=mask, other=0)
    part = Part(slot, begin.to(tl.int64), tl.load(at + 2, mask=mask, other=0))
    return part, within // height


@triton.jit
def slot_ptr(stacks, slot, num_homes):
    """Return the pointer to the tensor of a slot."""
    spare = slot - num_homes
    home_ptr = stacks.homes_ptr + slot.to(tl.int64) * stacks.stride_home
    replica_ptr = stacks.replicas_ptr + spare.to(tl.int64) * stacks.stride_replica
    return tl.where(spare < 0, home_ptr, replica_ptr)


@triton.jit
def store_to_slot(stacks, slot, num_homes, offset, values, mask):
    """Store values into the tensor of a slot; the two stacks may differ in dtype."""
    homes_ptr, replicas_ptr = stacks.homes_ptr, stacks.replicas_ptr
    if stacks.sums_ptr is None and homes_ptr.dtype == replicas_ptr.dtype:
        values = values.to(homes_ptr.dtype.element_ty)
        tl.store(slot_ptr(stacks, slot, num_homes) + offset, values, mask=mask)
    elif slot < num_homes:
        home = slot.to(tl.int64) * stacks.stride_home
        final = True
        if stacks.sums_ptr is not None:
            first, end = load_pair(stacks.spans_ptr, slot)
            final = first == end
            if not final:
                tl.store(stacks.sums_ptr + home + offset, values, mask=mask)
        if final:
            tl.store(homes_ptr + home + offset, values.to(homes_ptr.dtype.element_ty), mask=mask)
    else:
        replica_ptr = replicas_ptr + (slot - num_homes).to(tl.int64) * stacks.stride_replica
        tl.store(replica_ptr + offset, values.to(replicas_ptr.dtype.element_ty), mask=mask)
