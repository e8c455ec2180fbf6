"""Tensors of the slots of a rank, and the order in which the tiles of a grouped product are made.

One tensor of every slot stands in two stacks: those of the home slots, then those of the spare
ones. `of_slot` says where one begins, `store_of_slot` where results go.

A *row of tiles* is made of BLOCK_M rows of one slot, as many tiles as the result has columns of
them. Rows of tiles stand in bands of one slot, and a band is made column by column: programs that
work at the same time then share rows and weights, and read most of them from the cache.

    lay_tiles    lays all rows of tiles in order
    find_tile    the rows and the column of one tile
    draw_tile    the next one that no program has, where some programs begin late

Shapes: L slots of this rank, padded to a power of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.schedule import load_span

ENTRIES = tl.constexpr(5)  # numbers of a row of tiles
DRAWN = tl.constexpr(2)  # where the tiles that were drawn are counted


class Part(NamedTuple):
    """Rows of one slot: `count` of them from `begin` on."""

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
    """Program l: the rows of tiles of slot l, behind those of the slots before it.

    tiles_ptr: how many there are, and whether most are of slots with no more rows than half a tile.
    Then, from the next multiple of ENTRIES on, of each: its slot; its first row, and how many the
    slot has from there on; the first of its band, and how many the band has. The rows of tiles of a
    slot are divided evenly into bands of about GROUP_M.

    >>> example(lay_tiles, 3, offsets=[0, 1, 2, 5], tiles=room(30), num_slots=3, L=4, BLOCK_M=2,
    ...         GROUP_M=2, B=4)
    tiles = [4, 0, _, _, _, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 2, 2, 2, 4, 1, 2, 2,
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
    height, higher = tl.maximum(high // bands, 1), high % bands  # so many have one more
    for begin in range(0, high, B):
        tile_B = begin + tl.arange(0, B)
        after_B = tile_B - higher * (height + 1)
        within_B = tl.where(after_B < 0, tile_B % (height + 1), after_B % height)
        at_B, mask_b = tiles_ptr + ENTRIES * (1 + before + tile_B), tile_B < high
        tl.store(at_B, slot, mask=mask_b)
        tl.store(at_B + 1, first_row + tile_B * BLOCK_M, mask=mask_b)
        tl.store(at_B + 2, rows - tile_B * BLOCK_M, mask=mask_b)
        tl.store(at_B + 3, before + tile_B - within_B, mask=mask_b)
        tl.store(at_B + 4, tl.where(after_B < 0, height + 1, height), mask=mask_b)
    low = tl.sum(((rows_L > 0) & (rows_L <= BLOCK_M // 2)).to(tl.int32), 0)
    tl.store(tiles_ptr, tl.sum(high_L, 0))
    tl.store(tiles_ptr + 1, (2 * low > tl.sum(high_L, 0)).to(tl.int32))


@triton.jit
def draw_tile(tiles):
    """The number of a tile: programs that draw work at neighbours, whenever they began."""
    return tl.atomic_add(tiles + DRAWN, 1, sem="relaxed", scope="gpu")


@triton.jit
def find_tile(tiles, tile, high, wide):
    """Rows of a tile, their number among rows of tiles, and its column.

    Its count is that of its slot from there on, maybe more than BLOCK_M.
    """
    mask = tile < high * wide
    at = tiles + ENTRIES * (1 + tile // wide)
    first = tl.load(at + 3, mask=mask, other=0)
    height = tl.load(at + 4, mask=mask, other=1)
    within = tile - first * wide
    number = first + within % height
    at = tiles + ENTRIES * (1 + number)
    slot = tl.load(at, mask=mask, other=0)
    begin = tl.load(at + 1, mask=mask, other=0)
    part = Part(slot, begin.to(tl.int64), tl.load(at + 2, mask=mask, other=0))
    return part, number, within // height


class SlotTensors(NamedTuple):
    """One tensor of every slot: `homes` of the home slots, `copies` of the spare ones."""

    homes: Any
    copies: Any
    num_homes: Any
    home_stride: Any
    copy_stride: Any


class Sums(NamedTuple):
    """Where to store what the home experts with copies have, like `homes`; None: there, too."""

    at: Any
    spans: Any  # first and end of the copies of every home expert


@triton.jit
def of_slot(stacks, slot):
    """Where the tensor of a slot begins."""
    spare = slot - stacks.num_homes
    home_at = stacks.homes + slot.to(tl.int64) * stacks.home_stride
    return tl.where(spare < 0, home_at, stacks.copies + spare.to(tl.int64) * stacks.copy_stride)


@triton.jit
def store_of_slot(stacks, sums, slot, at, values, mask):
    """Store numbers at places of the tensor of a slot; the two stacks may differ in type."""
    homes, copies = stacks.homes, stacks.copies
    if sums.at is None and homes.dtype == copies.dtype:
        tl.store(of_slot(stacks, slot) + at, values.to(homes.dtype.element_ty), mask=mask)
    elif slot < stacks.num_homes:
        home = slot.to(tl.int64) * stacks.home_stride
        final = True
        if sums.at is not None:
            first, end = load_span(sums.spans, slot)
            final = first == end
            if not final:
                tl.store(sums.at + home + at, values, mask=mask)
        if final:
            tl.store(homes + home + at, values.to(homes.dtype.element_ty), mask=mask)
    else:
        copy = copies + (slot - stacks.num_homes).to(tl.int64) * stacks.copy_stride
        tl.store(copy + at, values.to(copies.dtype.element_ty), mask=mask)
