"""How the kernels of `exchange.py` find rows in the memory of other ranks, and whose they are.

    tables   of every rank, one part behind the other: the order of sending; where each slot begins
             in it; `blocks` [R, stride], where the rows of every rank begin among the arrivals of
             each slot; scalars of the routed rows
    values   of every rank, [tokens, width]
    served   of every rank: scalars of the arrived rows, then [capacity, width] the rows

A row of some rank is one number, rank * rows + row, with as many rows as every rank has.
"""

import triton
import triton.language as tl

ORDER_AT, SERVED_SCALARS_AT = (
    tl.constexpr(0),
    tl.constexpr(0),
)  # bytes; others come by launch


@triton.jit
def joined(rank, row, rows):
    """A rank and one of its rows as one number."""
    return rank.to(tl.int64) * rows + row


@triton.jit
def parted(number, ROWS: tl.constexpr):
    """The rank and its row."""
    return number // ROWS, number % ROWS


@triton.jit
def block_at(blocks, source, local, stride):
    return blocks + source * stride + local


@triton.jit
def part_of(addresses, rank, AT: tl.constexpr, TYPE: tl.constexpr):
    """Where a part of the pieces of these ranks lies: `AT` bytes behind their beginning."""
    begin = tl.load(addresses + rank) + AT
    return tl.multiple_of(begin, 16).to(tl.pointer_type(TYPE))


@triton.jit
def own_tiles(tiles):
    """The tiles of this program: neighbours, so that it looks up most addresses only once."""
    share = tl.cdiv(tiles, tl.num_programs(0))
    begin = tl.program_id(0) * share
    return begin, tl.minimum(begin + share, tiles)


@triton.jit
def values_of(
    addresses,
    origin_of_row,
    first,
    total,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    B: tl.constexpr,
):
    """[B] addresses of the values of the arrived rows from the first one on; 0: none."""
    row = first + tl.arange(0, B)
    origin = tl.load(origin_of_row + row, mask=row < total, other=-1)
    known = origin >= 0
    rank, routed = parted(origin, ROWS)
    begin = tl.load(addresses + rank, mask=known, other=0)
    return tl.where(known, begin + routed // CHOICES * ROW_BYTES, 0)


@triton.jit
def tile_at(row_addresses, column, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """[B, C] some columns of the rows at these addresses; 0 where there is no row or column."""
    # Only the hint makes loads of 16 bytes, and rows of other lengths do not begin at a multiple.
    ALIGNED: tl.constexpr = 16 if WIDTH * TYPE.primitive_bitwidth % 128 == 0 else 1
    begin = tl.multiple_of(row_addresses.to(tl.pointer_type(TYPE))[:, None], [1, ALIGNED])
    there = (row_addresses != 0)[:, None] & (column < WIDTH)[None, :]
    return tl.load(begin + column[None, :], mask=there, other=0)


@triton.jit
def served_of(
    addresses,
    landing_of_row,
    first,
    tokens,
    CHOICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    B: tl.constexpr,
):
    """For every choice, the addresses `[B]` of what was served for these tokens; 0: nothing."""
    token = first + tl.arange(0, B)
    found = ()
    for choice in tl.static_range(CHOICES):
        row = token.to(tl.int64) * CHOICES + choice
        landing = tl.load(landing_of_row + row, mask=token < tokens, other=-1)
        rank, arrived = parted(landing, CAPACITY)
        begin = tl.load(addresses + rank, mask=landing >= 0, other=0)
        served = begin + ROWS_AT + arrived * ROW_BYTES
        found = found + (tl.where(landing >= 0, served, 0),)  # noqa: RUF005
    return found


@triton.jit
def pull_scalars(addresses, landing_of_row, scalars, num_rows, CAPACITY: tl.constexpr):
    """[N] the scalars that stand beside the served rows; 0: not served."""
    B: tl.constexpr = 512
    for first in range(tl.program_id(0) * B, num_rows, tl.num_programs(0) * B):
        row = first + tl.arange(0, B)
        landing = tl.load(landing_of_row + row, mask=row < num_rows, other=-1)
        rank, arrived = parted(tl.maximum(landing, 0), CAPACITY)
        there = part_of(addresses, rank, SERVED_SCALARS_AT, scalars.dtype.element_ty)
        scalar = tl.load(there + arrived, mask=landing >= 0, other=0.0)
        tl.store(scalars + row, scalar, mask=row < num_rows)
