"""Stage 6 on the GPU with numbers of eight bits: products of e4m3 rows with e4m3 weights.

Like `grouped.multiply`, whose tiles and order these are, but for scales: either one for 128 numbers
of a row and one for 128 x 128 of a weight (BLOCKS), or one for a row and one for a row of a weight.
Codes come as e4m3, which the tensor cores of some GPUs multiply, or as bytes, which are decoded to
float16, exactly.

Sums of BLOCKS are kept in units of the scales of the next step, so that the tensor cores go on
adding to them; most steps have the same ones, and nothing is to be done then.

    lay_ratios            from the units of every step to those of the next, of rows
    multiply_quantised    the products

What a row gets depends on this row and its weights alone, as there.

Shapes: A rows that there is room for; tiles of BLOCK_M rows and BLOCK_N columns, summed in steps of
BLOCK_K, the width of a group where there are BLOCKS.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.grouped import (
    Matrix,
    load_tile,
    store_products,
    work_of_product,
)
from ultraep.backends.triton.kernels.quantise import decode
from ultraep.backends.triton.kernels.tiles import ENTRIES, SlotTensors, find_tile, of_slot

GROUP = tl.constexpr(128)  # numbers of a row that share a scale, and of a column of weights


class Ratio(NamedTuple):
    """From the units of a step to those of the next: of rows, and of the weights of a tile.

    A tile has up to 2 * GROUP columns, of which the first GROUP have the `low` one. The units
    behind the last step are 1.   changes: 0: those of all rows are the same.
    """

    of_rows: Any
    low: Any
    high: Any
    changes: Any


class Laid(NamedTuple):
    """What `lay_ratios` laid for one row of tiles of that height: `ratios` [groups, height]."""

    ratios: Any
    changes: Any
    height: Any
    groups: Any


@triton.jit
def lay_ratios(
    tiles_ptr,
    row_scales_ptr,
    ratios_ptr,
    changes_ptr,
    groups,
    stride_row_scales,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
):
    """Program (i, j): of row i of tiles, ratios of G groups, and whether one of them is not 1.

    Scales of rows are powers of two, so are ratios, which have few bits then. Behind the last row
    of a slot stands what that has.

    >>> example(lay_ratios, (3, 2), tiles=[2, 0, 0, 0, 0, 0, 0, 3, 0, 1, 1, 3, 1, 1, 1],
    ...         row_scales=[[1.0, 1.0, 1.0], [0.5, 0.5, 1.0], [8.0, 2.0, 1.0], [4.0, 4.0, 4.0]],
    ...         ratios=room(2, 3, 2, dtype=torch.bfloat16), changes=room(2, 3, dtype=torch.uint8),
    ...         groups=3, BLOCK_M=2)
    ratios = [[[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0], [4.0, 4.0]]]
    changes = [[0, 1, 0], [0, 0, 1]]
    """
    number = tl.program_id(0)
    offs_m, group_G = tl.arange(0, BLOCK_M), tl.program_id(1) * G + tl.arange(0, G)
    if number < tl.load(tiles_ptr):
        at = tiles_ptr + ENTRIES * (1 + number)
        far_M = tl.load(at + 1).to(tl.int64) + tl.minimum(offs_m, tl.load(at + 2) - 1)
        at_MG = row_scales_ptr + (far_M * stride_row_scales)[:, None] + group_G[None, :]
        mask, last = group_G < groups, group_G + 1 >= groups
        unit_MG = tl.load(at_MG, mask=mask[None, :], other=1.0)
        ratio_MG = unit_MG / tl.load(at_MG + 1, mask=~last[None, :], other=1.0)
        at_G = number.to(tl.int64) * groups + group_G
        at_MG = ratios_ptr + at_G[None, :] * BLOCK_M + offs_m[:, None]
        tl.store(at_MG, ratio_MG.to(tl.bfloat16), mask=mask[None, :])
        changes_G = tl.max((ratio_MG != 1.0).to(tl.int32), 0)
        tl.store(changes_ptr + at_G, changes_G.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_homes"], launch_metadata=work_of_product)
def multiply_quantised(
    rows_ptr,
    row_scales_ptr,
    ratios_ptr,
    changes_ptr,
    homes_ptr,
    copies_ptr,
    home_scales_ptr,
    copy_scales_ptr,
    home_biases_ptr,
    copy_biases_ptr,
    scale_ptr,
    tiles_ptr,
    out_ptr,
    num_homes,
    depth,
    width,
    stride_rows,
    stride_row_scales,
    stride_homes,
    stride_copies,
    stride_weights,
    stride_home_scales,
    stride_copy_scales,
    stride_scales,
    stride_home_biases,
    stride_copy_biases,
    stride_out,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
):
    """[A, depth] -> [A, width]: (rows @ W^T + bias) * scale, W a [width, depth] of every slot.

    BLOCKS: rows have `ratios` and `changes`, as `lay_ratios` lays them; else each has a scale.
    EVEN_K, EVEN_N: tiles leave nothing over.   HALF: where most slots have few rows, those
    are tiles of half the height.

    >>> example(multiply_quantised, 2, rows=bytes([56, 64, 64, 56, 68, 48]), stride_rows=2,
    ...         stride_homes=4, stride_copies=4, stride_weights=2, row_scales=None,
    ...         ratios=[[[1.0] * 16], [[0.5] * 16]], changes=[[0], [1]],
    ...         homes=bytes([56, 0, 0, 56]), copies=bytes([56, 56, 64, 0]), home_scales=[[1.0]],
    ...         copy_scales=[[4.0]], home_biases=None, copy_biases=None, scale=[1.0, 2.0, 1.0],
    ...         tiles=[2, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1],
    ...         out=room(3, 2, dtype=torch.float32), num_homes=1, depth=2, width=2, BLOCKS=True,
    ...         BLOCK_K=128)
    out = [[1.0, 2.0], [12.0, 16.0], [_, _]]
    """
    weights = SlotTensors(homes_ptr, copies_ptr, num_homes, stride_homes, stride_copies)
    scales = SlotTensors(
        home_scales_ptr, copy_scales_ptr, num_homes, stride_home_scales, stride_copy_scales
    )
    biases = SlotTensors(
        home_biases_ptr, copy_biases_ptr, num_homes, stride_home_biases, stride_copy_biases
    )
    given, made = Matrix(rows_ptr, stride_rows, depth), Matrix(out_ptr, stride_out, width)
    groups = tl.cdiv(depth, GROUP)
    high, wide = tl.load(tiles_ptr), tl.cdiv(width, BLOCK_N)
    halves = HALF and tl.load(tiles_ptr + 1) != 0
    following, next_number, next_column = find_tile(tiles_ptr, tl.program_id(0), high, wide)
    for tile in range(tl.program_id(0), high * wide, tl.num_programs(0)):
        part, number, column = following, next_number, next_column
        following, next_number, next_column = find_tile(
            tiles_ptr, tile + tl.num_programs(0), high, wide
        )
        at_weights = of_slot(weights, part.slot)
        at_scales = of_slot(scales, part.slot)
        at_bias = None if home_biases_ptr is None else of_slot(biases, part.slot)
        if BLOCKS:
            at = number.to(tl.int64) * groups
            of_rows = Laid(ratios_ptr + at * BLOCK_M, changes_ptr + at, BLOCK_M, groups)
        else:
            of_rows = Matrix(row_scales_ptr, stride_row_scales, 1)
        low = halves and part.count <= BLOCK_M // 2
        for LOW in tl.static_range(1 + HALF):
            if low == LOW:
                multiply_tile_quantised(
                    given,
                    of_rows,
                    at_weights,
                    stride_weights,
                    at_scales,
                    stride_scales,
                    at_bias,
                    scale_ptr,
                    made,
                    part,
                    column * BLOCK_N,
                    BLOCKS,
                    EVEN_K,
                    EVEN_N,
                    BLOCK_M // (1 + LOW),
                    BLOCK_N,
                    BLOCK_K,
                )


@triton.jit
def multiply_tile_quantised(
    rows,
    of_rows,
    at_weights,
    stride_weights,
    at_scales,
    stride_scales,
    at_bias,
    scale,
    out,
    part,
    column,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile: BLOCK_M rows, BLOCK_N columns from `column` on."""
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    left = out.columns - column
    # Behind the last row of the slot, it is read again: its product is not stored.
    last_M = tl.minimum(offs_m, part.count - 1)
    at_rows = rows.at + part.begin * rows.stride
    at_weights += column.to(tl.int64) * stride_weights
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BLOCKS:
        block, last = column // GROUP, (out.columns - 1) // GROUP
        at_low = at_scales + block * stride_scales
        at_high = at_scales + tl.minimum(block + 1, last) * stride_scales
        ratio = load_ratio(of_rows, at_low, at_high, 0, BLOCK_M)
    for k in range(0, rows.columns, BLOCK_K):
        deep = rows.columns - k
        row_MK = load_tile(at_rows + k, last_M, offs_k, rows.stride, BLOCK_M, deep, True, EVEN_K)
        weight_NK = load_tile(
            at_weights + k, offs_n, offs_k, stride_weights, left, deep, EVEN_N, EVEN_K
        )
        if row_MK.dtype == tl.uint8:
            row_MK, weight_NK = decode(row_MK), decode(weight_NK)
        sum_MN = tl.dot(row_MK, weight_NK.T, sum_MN)
        if BLOCKS:
            # Only what is read under a condition lets the tensor cores run on.
            if (ratio.changes != 0) | (ratio.low != 1.0) | (ratio.high != 1.0):
                sum_MN *= spread(ratio, offs_n)
            # A step ahead, so that nobody waits for them.
            following = tl.minimum(k // GROUP + 1, of_rows.groups - 1)
            ratio = load_ratio(of_rows, at_low, at_high, following, BLOCK_M)
    if not BLOCKS:
        at_N = at_scales + (column + offs_n) * stride_scales
        scale_N = tl.load(at_N, mask=offs_n < left, other=0.0)
        scale_M = tl.load(of_rows.at + (part.begin + last_M) * of_rows.stride)
        sum_MN = sum_MN * scale_M[:, None] * scale_N[None, :]
    if at_bias is not None:
        bias_N = tl.load(at_bias + column + offs_n, mask=offs_n < left, other=0.0)
        sum_MN += bias_N.to(tl.float32)[None, :]
    store_products(out, sum_MN, scale, part, column, BLOCK_M, BLOCK_N)


@triton.jit
def load_ratio(laid, at_low, at_high, group, BLOCK_M: tl.constexpr):
    """The ratios of a group: of the rows of a tile as they are laid, and of its weights."""
    of_rows = tl.load(laid.ratios + group * laid.height + tl.arange(0, BLOCK_M))
    changes, more = tl.load(laid.changes + group), group + 1 < laid.groups
    low = tl.load(at_low + group) / tl.load(at_low + group + 1, mask=more, other=1.0)
    high = tl.load(at_high + group) / tl.load(at_high + group + 1, mask=more, other=1.0)
    return Ratio(of_rows, low, high, changes)


@triton.jit
def spread(ratio, offs_n):
    """[M, N] the factor of every sum of a tile."""
    of_rows_M1 = ratio.of_rows.to(tl.float32)[:, None]
    low_M1, high_M1 = of_rows_M1 * ratio.low, of_rows_M1 * ratio.high
    return tl.where((offs_n < GROUP)[None, :], low_M1, high_M1)
