"""Twin of `count` in the reference: rows of every expert, in total and in earlier tiles.

Rows are divided into tiles. `offsets` holds, per tile and expert, the rows of that expert in
earlier tiles: with it, `reroute` numbers the rows of an expert without examining other tiles. Rows
without an expert (padding, or an id out of range) are counted in a bin behind the last expert.

Shapes: N rows, E experts, B rows of a tile.
"""

import triton
import triton.language as tl


@triton.jit
def bin_of(id_B, there_B, experts):
    """[B] the expert of every row, `experts` if it has none; and which ids are out of range."""
    id_B = id_B.to(tl.int64)  # an unsigned 255 is not -1
    known_B = (id_B >= 0) & (id_B < experts)
    unknown_B = there_B & (known_B == 0) & (id_B != -1)
    return tl.where(there_B & known_B, id_B, experts).to(tl.int32), unknown_B


@triton.jit
def offsets_of(offsets, tile, experts):
    """Return the bins [E + 1] of a tile."""
    return offsets + tile.to(tl.int64) * (experts + 1)


@triton.jit(do_not_specialize=["rows", "experts"])
def tile_counts(ids, counts, faults, rows, experts, B: tl.constexpr, E: tl.constexpr):
    """Program t: count the rows of every bin in tile t.

    >>> example(tile_counts, 2, ids=[0, 1, 0, 9, -1, 0], counts=empty(2, 5), rows=6, B=4, E=8)
    counts = [[2, 1, 0, 0, 1], [1, 0, 0, 0, 1]]
    faults = [1]
    """
    tile = tl.program_id(0)
    counts = offsets_of(counts, tile, experts)
    expert = tl.arange(0, E)
    tl.store(counts + expert, expert * 0, mask=expert <= experts)
    row = tile * B + tl.arange(0, B)
    there_B = row < rows
    bin_B, unknown_B = bin_of(tl.load(ids + row, mask=there_B, other=-1), there_B, experts)
    tl.debug_barrier()
    tl.atomic_add(counts + bin_B, 1, mask=there_B, sem="relaxed")
    unknown = tl.sum(unknown_B.to(tl.int32), 0)
    tl.atomic_add(faults, unknown, mask=unknown > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tiles", "bins"])
def tile_offsets(counts, totals, tiles, bins, T: tl.constexpr, E: tl.constexpr):
    """Replace counts per tile by counts of all earlier tiles, and write the totals [E + 1].

    >>> example(tile_offsets, 1, counts=[[2, 1, 0, 0, 1], [1, 0, 0, 0, 1]], totals=empty(5),
    ...         tiles=2, bins=5, T=2, E=8)
    counts = [[0, 0, 0, 0, 0], [2, 1, 0, 0, 1]]
    totals = [3, 1, 0, 0, 2]
    """
    expert = tl.program_id(0) * E + tl.arange(0, E)
    known = expert < bins
    total_E = tl.zeros((E,), tl.int32)
    for begin in range(0, tiles, T):
        tile = begin + tl.arange(0, T)
        at = offsets_of(counts, tile[:, None], bins - 1) + expert[None, :]
        mask = (tile < tiles)[:, None] & known[None, :]
        count_TE = tl.load(at, mask=mask, other=0)
        tl.store(at, total_E[None, :] + tl.cumsum(count_TE, 0) - count_TE, mask=mask)
        total_E += tl.sum(count_TE, 0)
    tl.store(totals + expert, total_E, mask=known)
