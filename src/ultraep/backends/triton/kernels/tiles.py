"""In which order the tiles of a grouped product are made, and which rows each of them has.

A *row of tiles* is made of M rows of one slot, as many tiles as the result has columns of them.
Rows of tiles stand in bands, and a band is made column by column: programs that work at the same
time then share rows and weights, and read most of them from the cache. A band has rows of one large
slot. Small slots share their weights with nobody: they are spread over the bands of all large ones,
since programs that all work on such would wait for memory.

    lay_tiles    lays all rows of tiles in order
    find_tile    the rows and the column of one tile

Shapes: L slots of this rank, padded to a power of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

ENTRIES = tl.constexpr(5)  # numbers of a row of tiles


class Part(NamedTuple):
    """Rows of one slot: `count` of them from `begin` on."""

    slot: Any
    begin: Any
    count: Any


class Order(NamedTuple):
    """How many rows of tiles and bands there are: [L] of every slot, and in all."""

    high: Any  # [L]
    own_bands: Any  # [L] 0: a small slot
    bands: Any
    small: Any  # rows of tiles of small slots


@triton.jit(do_not_specialize=["num_slots"])
def lay_tiles(
    offsets,
    tiles,
    num_slots,
    L: tl.constexpr,
    M: tl.constexpr,
    BAND: tl.constexpr,
    SMALL: tl.constexpr,
    B: tl.constexpr,
):
    """Program l: the rows of tiles of slot l.

    tiles: how many there are, and whether most slots have no more rows than half a tile. Then, from
    the next multiple of ENTRIES on, of each: its slot; its first row, and how many the slot has
    from there on; the first row of tiles of its band, and how many the band has. Bands have about
    BAND of one slot, and some of slots that have SMALL or fewer.

    Slot 2 has one band, and that of slot 1 comes behind it; slot 0 has none:

    >>> example(lay_tiles, 3, offsets=[0, 0, 1, 4], tiles=room(25), num_slots=3, L=4, M=2, BAND=2,
    ...         SMALL=1, B=4)
    tiles = [3, 0, _, _, _, 2, 1, 3, 0, 3, 2, 3, 1, 0, 3, 1, 0, 1, 0, 3, _, _, _, _, _]
    """
    slot, slot_L = tl.program_id(0), tl.arange(0, L)
    there_L = slot_L < num_slots
    begin_L = tl.load(offsets + slot_L, mask=there_L, other=0)
    rows_L = tl.load(offsets + slot_L + 1, mask=there_L, other=0) - begin_L
    high_L = tl.cdiv(rows_L, M)
    small_L = tl.where(high_L <= SMALL, high_L, 0)
    bands_L = tl.where(high_L <= SMALL, 0, tl.maximum((high_L + BAND // 2) // BAND, 1))
    order = Order(high_L, bands_L, tl.sum(bands_L, 0), tl.sum(small_L, 0))
    high, begin = chosen(high_L, slot_L == slot), chosen(begin_L, slot_L == slot)
    rows = chosen(rows_L, slot_L == slot)
    if high > SMALL:
        for first in range(0, high, B):
            number = first + tl.arange(0, B)
            at, band_first, band_high = among_large(order, slot, number, L)
            store_row(tiles, at, slot, begin, rows, number, band_first, band_high, high, M)
    else:
        before = chosen(small_L, slot_L < slot)
        for number in range(high):
            at, band_first, band_high = among_small(order, before + number, BAND, L)
            store_row(tiles, at, slot, begin, rows, number, band_first, band_high, high, M)
    low = tl.sum(((rows_L > 0) & (rows_L <= M // 2)).to(tl.int32), 0)
    tl.store(tiles, tl.sum(high_L, 0))
    tl.store(tiles + 1, (2 * low > tl.sum(high_L, 0)).to(tl.int32))


@triton.jit
def chosen(number_L, where_L):
    return tl.sum(tl.where(where_L, number_L, 0), 0)


@triton.jit
def store_row(tiles, at, slot, begin, rows, number, band_first, band_high, high, M: tl.constexpr):
    entry, there = tiles + ENTRIES * (1 + at), number < high
    tl.store(entry, slot, mask=there)
    tl.store(entry + 1, begin + number * M, mask=there)
    tl.store(entry + 2, rows - number * M, mask=there)
    tl.store(entry + 3, band_first, mask=there)
    tl.store(entry + 4, band_high, mask=there)


@triton.jit
def small_before(order, band):
    """Rows of tiles of small slots in the bands before this one: they are spread evenly."""
    return (band * order.small + order.bands - 1) // tl.maximum(order.bands, 1)


@triton.jit
def place_of_band(order, slot, within, L: tl.constexpr):
    """Where a band of a large slot begins, how many rows of tiles it has, and how many its slot's.

    The rows of tiles of a slot are divided evenly: the first bands may have one more.
    """
    slot_L = tl.arange(0, L)
    before_L = slot_L < slot
    high, bands = chosen(order.high, slot_L == slot), chosen(order.own_bands, slot_L == slot)
    bands = tl.maximum(bands, 1)
    height, higher = high // bands, high % bands
    own = height + (within < higher).to(tl.int32)
    band = chosen(order.own_bands, before_L) + within
    spread = small_before(order, band)
    large_before = chosen(tl.where(order.own_bands > 0, order.high, 0), before_L)
    first = large_before + within * height + tl.minimum(within, higher) + spread
    return first, own + small_before(order, band + 1) - spread, own


@triton.jit
def among_large(order, slot, number, L: tl.constexpr):
    """Where rows of tiles of a large slot stand, and their bands."""
    slot_L = tl.arange(0, L)
    high, bands = chosen(order.high, slot_L == slot), chosen(order.own_bands, slot_L == slot)
    height, higher = high // bands, high % bands
    rest = number - higher * (height + 1)
    within = tl.where(rest < 0, number // (height + 1), higher + rest // height)
    first, band_high, _own = place_of_band(order, slot, within, L)
    return first + number - within * height - tl.minimum(within, higher), first, band_high


@triton.jit
def among_small(order, number, BAND: tl.constexpr, L: tl.constexpr):
    """Where a row of tiles of a small slot stands, the number-th of all such, and its band."""
    band = number * order.bands // tl.maximum(order.small, 1)
    end_L = tl.cumsum(order.own_bands, 0)
    slot = tl.sum((end_L <= band).to(tl.int32), 0)
    within = band - chosen(order.own_bands, tl.arange(0, L) < slot)
    first, band_high, own = place_of_band(order, slot, within, L)
    at = first + own + number - small_before(order, band)
    if order.bands == 0:
        at, first = number, number // BAND * BAND
        band_high = tl.minimum(order.small - first, BAND)
    return at, first, band_high


@triton.jit
def find_tile(tiles, tile, high, wide):
    """Rows and column of a tile; its count is that of its slot from there on, maybe more than M."""
    there = tile < high * wide
    at = tiles + ENTRIES * (1 + tile // wide)
    first = tl.load(at + 3, mask=there, other=0)
    height = tl.load(at + 4, mask=there, other=1)
    within = tile - first * wide
    at = tiles + ENTRIES * (1 + first + within % height)
    slot = tl.load(at, mask=there, other=0)
    begin = tl.load(at + 1, mask=there, other=0)
    return Part(slot, begin.to(tl.int64), tl.load(at + 2, mask=there, other=0)), within // height
