"""Stage 6 on the GPU in FP8: products of e4m3 rows with e4m3 weights.

    lay_ratios            ratio of the row scales of every group to the next group's
    multiply_quantised    the products

Uses the tiles of `grouped.multiply`, in their order. Either 128 numbers of a row share a scale and
128 x 128 numbers of a weight (BLOCKS), or a whole row shares one. Codes are e4m3 where the tensor
cores multiply it; otherwise they are bytes, which the kernel decodes to float16 without rounding.

With BLOCKS, sums are kept in units of the scales of the next step, so that the tensor cores can
accumulate into them. Most steps have equal scales, and nothing needs to be multiplied.

Shapes: A row capacity; tiles of BLOCK_M rows and BLOCK_N columns, in steps of BLOCK_K, which with
BLOCKS is the width of a group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.grouped import load_tile, store_products, work_of_product
from ultraep.backends.triton.kernels.quantise import decode
from ultraep.backends.triton.kernels.tiles import (
    ENTRIES,
    Matrix,
    SlotTensors,
    find_tile,
    slot_ptr,
)

GROUP = tl.constexpr(128)  # rows and columns of a weight, and columns of a row, per scale


class Ratio(NamedTuple):
    """Factors from the units of one step to the next: of rows, and of a tile's weights.

    A tile has up to 2 * GROUP columns: `low` belongs to the first GROUP of them, `high` to the
    rest. Behind the last step, the unit is 1.   changes: 0 if all `of_rows` are 1.
    """

    of_rows: Any
    low: Any
    high: Any
    changes: Any


class RowRatios(NamedTuple):
    """The ratios [groups, height] and changes [groups] of one row of tiles, by `lay_ratios`."""

    ratios_ptr: Any
    changes_ptr: Any
    height: Any
    groups: Any


@triton.jit
def lay_ratios(
    tiles_ptr,
    row_scales: Matrix,
    ratios_ptr,
    changes_ptr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
):
    """Program (i, j): for row i of tiles, the ratios of G groups, and whether any is not 1.

    Row scales are powers of two, so that bfloat16 holds their ratios exactly. Behind the last row
    of a slot, the ratios of that row are repeated.

    >>> scales = [[1.0, 1.0, 1.0], [0.5, 0.5, 1.0], [8.0, 2.0, 1.0], [4.0, 4.0, 4.0]]
    >>> example(lay_ratios, (3, 2), tiles=[2, 0, 0, 0, 0, 0, 0, 3, 0, 1, 1, 3, 1, 1, 1],
    ...         row_scales=scales, ratios=empty(2, 3, 2, dtype=torch.bfloat16),
    ...         changes=empty(2, 3, dtype=torch.uint8), BLOCK_M=2)
    ratios = [[[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0], [4.0, 4.0]]]
    changes = [[0, 1, 0], [0, 0, 1]]
    """
    number, groups = tl.program_id(0), row_scales.columns
    offs_m, group_G = tl.arange(0, BLOCK_M), tl.program_id(1) * G + tl.arange(0, G)
    if number < tl.load(tiles_ptr):
        entry_ptr = tiles_ptr + ENTRIES * (1 + number)
        last = tl.load(entry_ptr + 2) - 1
        far_M = tl.load(entry_ptr + 1).to(tl.int64) + tl.minimum(offs_m, last)
        scale_ptr = row_scales.ptr + (far_M * row_scales.stride)[:, None] + group_G[None, :]
        mask, is_last = group_G < groups, group_G + 1 >= groups
        unit_MG = tl.load(scale_ptr, mask=mask[None, :], other=1.0)
        ratio_MG = unit_MG / tl.load(scale_ptr + 1, mask=~is_last[None, :], other=1.0)
        index_G = number.to(tl.int64) * groups + group_G
        ratio_ptr = ratios_ptr + index_G[None, :] * BLOCK_M + offs_m[:, None]
        tl.store(ratio_ptr, ratio_MG.to(tl.bfloat16), mask=mask[None, :])
        changes_G = tl.max((ratio_MG != 1.0).to(tl.int32), 0)
        tl.store(changes_ptr + index_G, changes_G.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_homes"], launch_metadata=work_of_product)
def multiply_quantised(
    rows: Matrix,
    row_scales: Matrix,
    ratios_ptr,
    changes_ptr,
    weights: SlotTensors,
    scales: SlotTensors,
    biases: SlotTensors,
    scale_ptr,
    tiles_ptr,
    out: Matrix,
    num_homes,
    BLOCKS: tl.constexpr,
    TILING: tl.constexpr,
):
    """[A, K] -> [A, N]: (rows @ W^T + bias) * scale, with W [N, K] per slot.

    BLOCKS: use the ratios and changes of `lay_ratios`; otherwise `row_scales`, one per row.
    """
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    groups = tl.cdiv(rows.columns, GROUP)
    num_m, num_n = tl.load(tiles_ptr), tl.cdiv(out.columns, TILING.BLOCK_N)
    halves = TILING.HALF and tl.load(tiles_ptr + 1) != 0
    following, next_number, next_column = find_tile(tiles_ptr, tl.program_id(0), num_m, num_n)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        part, number, column = following, next_number, next_column
        next_tile = tile + tl.num_programs(0)
        following, next_number, next_column = find_tile(tiles_ptr, next_tile, num_m, num_n)
        weight_ptr = slot_ptr(weights, part.slot, num_homes)
        weight_scale_ptr = slot_ptr(scales, part.slot, num_homes)
        bias_ptr = None if biases.homes_ptr is None else slot_ptr(biases, part.slot, num_homes)
        if BLOCKS:
            index = number.to(tl.int64) * groups
            of_rows = RowRatios(ratios_ptr + index * BLOCK_M, changes_ptr + index, BLOCK_M, groups)
        else:
            of_rows = row_scales
        low = halves and part.count <= BLOCK_M // 2
        HEIGHTS: tl.constexpr = 1 + TILING.HALF
        for LOW in tl.static_range(HEIGHTS):
            if low == LOW:
                multiply_tile_quantised(
                    rows, of_rows, weight_ptr, weights.stride_row, weight_scale_ptr,
                    scales.stride_row, bias_ptr, scale_ptr, out, part, column * TILING.BLOCK_N,
                    BLOCKS, TILING, BLOCK_M // (1 + LOW)
                )  # fmt: skip


@triton.jit
def multiply_tile_quantised(
    rows, of_rows, weight_ptr, stride_weight, weight_scale_ptr, stride_scales, bias_ptr, scale_ptr,
    out, part, column, BLOCKS: tl.constexpr, TILING: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Compute BLOCK_M rows and BLOCK_N columns, from `column` on."""
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    BLOCK_K: tl.constexpr = TILING.BLOCK_K
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    left = out.columns - column
    # Behind the last row of the slot, read that row again: its product is not stored.
    last_M = tl.minimum(offs_m, part.count - 1)
    row_ptr = rows.ptr + part.begin * rows.stride
    weight_ptr += column.to(tl.int64) * stride_weight
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BLOCKS:
        block, last = column // GROUP, (out.columns - 1) // GROUP
        low_ptr = weight_scale_ptr + block * stride_scales
        high_ptr = weight_scale_ptr + tl.minimum(block + 1, last) * stride_scales
        ratio = load_ratio(of_rows, low_ptr, high_ptr, 0, BLOCK_M)
    for k in range(0, rows.columns, BLOCK_K):
        deep = rows.columns - k
        row_MK = load_tile(
            row_ptr + k, last_M, offs_k, rows.stride, BLOCK_M, deep, True, TILING.EVEN_K
        )
        weight_NK = load_tile(
            weight_ptr + k, offs_n, offs_k, stride_weight, left, deep, TILING.EVEN_N, TILING.EVEN_K
        )
        if row_MK.dtype == tl.uint8:
            row_MK, weight_NK = decode(row_MK), decode(weight_NK)
        sum_MN = tl.dot(row_MK, weight_NK.T, sum_MN)
        if BLOCKS:
            # Read the sums under a condition only: otherwise the tensor cores wait in every step.
            if (ratio.changes != 0) | (ratio.low != 1.0) | (ratio.high != 1.0):
                sum_MN *= spread(ratio, offs_n)
            # Load the ratios one step ahead.
            following = tl.minimum(k // GROUP + 1, of_rows.groups - 1)
            ratio = load_ratio(of_rows, low_ptr, high_ptr, following, BLOCK_M)
    if not BLOCKS:
        scale_N_ptr = weight_scale_ptr + (column + offs_n) * stride_scales
        scale_N = tl.load(scale_N_ptr, mask=offs_n < left, other=0.0)
        scale_M = tl.load(of_rows.ptr + (part.begin + last_M) * of_rows.stride)
        sum_MN = sum_MN * scale_M[:, None] * scale_N[None, :]
    store_products(out, sum_MN, bias_ptr, scale_ptr, part, column, BLOCK_M, BLOCK_N)


@triton.jit
def load_ratio(laid, low_ptr, high_ptr, group, BLOCK_M: tl.constexpr):
    """Load the ratios of a group: of the rows of a tile, and of its weights."""
    of_rows = tl.load(laid.ratios_ptr + group * laid.height + tl.arange(0, BLOCK_M))
    changes, more = tl.load(laid.changes_ptr + group), group + 1 < laid.groups
    low = tl.load(low_ptr + group) / tl.load(low_ptr + group + 1, mask=more, other=1.0)
    high = tl.load(high_ptr + group) / tl.load(high_ptr + group + 1, mask=more, other=1.0)
    return Ratio(of_rows, low, high, changes)


@triton.jit
def spread(ratio, offs_n):
    """[M, N] the factor of every sum of a tile."""
    of_rows_M1 = ratio.of_rows.to(tl.float32)[:, None]
    low_M1, high_M1 = of_rows_M1 * ratio.low, of_rows_M1 * ratio.high
    return tl.where((offs_n < GROUP)[None, :], low_M1, high_M1)
