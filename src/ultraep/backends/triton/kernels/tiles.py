"""In which order the tiles of a grouped product are made, and which rows each of them has.

A *row of tiles* is made of M rows of one slot, as many tiles as the result has columns of them.
Rows of tiles stand in bands of one slot, and a band is made column by column: programs that work at
the same time then share rows and weights, and read most of them from the cache.

    lay_tiles    lays all rows of tiles in order
    find_tile    the rows and the column of one tile
    draw_tile    the next one that no program has, where some programs begin late

Shapes: L slots of this rank, padded to a power of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

ENTRIES = tl.constexpr(5)  # numbers of a row of tiles
DRAWN = tl.constexpr(2)  # where the tiles that were drawn are counted


class Part(NamedTuple):
    """Rows of one slot: `count` of them from `begin` on."""

    slot: Any
    begin: Any
    count: Any


@triton.jit(do_not_specialize=["num_slots"])
def lay_tiles(
    offsets, tiles, num_slots, L: tl.constexpr, M: tl.constexpr, BAND: tl.constexpr, B: tl.constexpr
):
    """Program l: the rows of tiles of slot l, behind those of the slots before it.

    tiles: how many there are, and whether most are of slots with no more rows than half a tile.
    Then, from the next multiple of ENTRIES on, of each: its slot; its first row, and how many the
    slot has from there on; the first of its band, and how many the band has. The rows of tiles of a
    slot are divided evenly into bands of about BAND.

    >>> example(lay_tiles, 3, offsets=[0, 1, 2, 5], tiles=room(30), num_slots=3, L=4, M=2, BAND=2,
    ...         B=4)
    tiles = [4, 0, _, _, _, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 2, 2, 2, 4, 1, 2, 2,
             _, _, _, _, _]
    """
    slot, slot_L = tl.program_id(0), tl.arange(0, L)
    there_L = slot_L < num_slots
    begin_L = tl.load(offsets + slot_L, mask=there_L, other=0)
    rows_L = tl.load(offsets + slot_L + 1, mask=there_L, other=0) - begin_L
    high_L = tl.cdiv(rows_L, M)
    own_L = slot_L == slot
    high, rows = tl.sum(tl.where(own_L, high_L, 0), 0), tl.sum(tl.where(own_L, rows_L, 0), 0)
    first_row = tl.sum(tl.where(own_L, begin_L, 0), 0)
    before = tl.sum(tl.where(slot_L < slot, high_L, 0), 0)
    bands = tl.maximum((high + BAND // 2) // BAND, 1)
    height, higher = tl.maximum(high // bands, 1), high % bands  # so many have one more
    for begin in range(0, high, B):
        tile_B = begin + tl.arange(0, B)
        after_B = tile_B - higher * (height + 1)
        within_B = tl.where(after_B < 0, tile_B % (height + 1), after_B % height)
        at_B, there_B = tiles + ENTRIES * (1 + before + tile_B), tile_B < high
        tl.store(at_B, slot, mask=there_B)
        tl.store(at_B + 1, first_row + tile_B * M, mask=there_B)
        tl.store(at_B + 2, rows - tile_B * M, mask=there_B)
        tl.store(at_B + 3, before + tile_B - within_B, mask=there_B)
        tl.store(at_B + 4, tl.where(after_B < 0, height + 1, height), mask=there_B)
    low = tl.sum(((rows_L > 0) & (rows_L <= M // 2)).to(tl.int32), 0)
    tl.store(tiles, tl.sum(high_L, 0))
    tl.store(tiles + 1, (2 * low > tl.sum(high_L, 0)).to(tl.int32))


@triton.jit
def draw_tile(tiles):
    """The number of a tile: programs that draw work at neighbours, whenever they began."""
    return tl.atomic_add(tiles + DRAWN, 1, sem="relaxed", scope="gpu")


@triton.jit
def find_tile(tiles, tile, high, wide):
    """Rows of a tile, their number among rows of tiles, and its column.

    Its count is that of its slot from there on, maybe more than M.
    """
    there = tile < high * wide
    at = tiles + ENTRIES * (1 + tile // wide)
    first = tl.load(at + 3, mask=there, other=0)
    height = tl.load(at + 4, mask=there, other=1)
    within = tile - first * wide
    number = first + within % height
    at = tiles + ENTRIES * (1 + number)
    slot = tl.load(at, mask=there, other=0)
    begin = tl.load(at + 1, mask=there, other=0)
    part = Part(slot, begin.to(tl.int64), tl.load(at + 2, mask=there, other=0))
    return part, number, within // height
