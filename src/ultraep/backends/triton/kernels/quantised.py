"""Stage 6 on the GPU with numbers of eight bits: products of e4m3 rows with e4m3 weights.

Like `grouped.multiply`, whose tiles and order these are, but for scales: either one for 128 numbers
of a row and one for 128 x 128 of a weight (BLOCKS), or one for a row and one for a row of a weight.
Codes come as e4m3, which the tensor cores of some GPUs multiply, or as bytes, which are decoded to
float16, exactly.

What a row gets depends on this row and its weights alone, as there.

Shapes: A rows that there is room for; tiles of M rows and N columns, summed in steps of K.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.grouped import Matrix, load_tile, store_products
from ultraep.backends.triton.kernels.quantise import decode
from ultraep.backends.triton.kernels.slots import SlotTensors, of_slot
from ultraep.backends.triton.kernels.tiles import find_tile

GROUP = tl.constexpr(128)  # numbers of a row that share a scale, and of a column of weights


class Unit(NamedTuple):
    """What the sums of a tile are multiples of: a scale of each row times one of the weights.

    A tile has up to 2 * GROUP columns, of which the first GROUP have the `low` one.
    """

    of_rows: Any
    low: Any
    high: Any


@triton.jit(do_not_specialize=["num_homes"])
def multiply_quantised(
    rows,
    row_scales,
    homes,
    copies,
    home_scales,
    copy_scales,
    home_biases,
    copy_biases,
    scale,
    tiles,
    out,
    num_homes,
    depth,
    width,
    rows_stride,
    row_scales_stride,
    home_stride,
    copy_stride,
    weight_stride,
    home_scales_stride,
    copy_scales_stride,
    scales_stride,
    home_bias_stride,
    copy_bias_stride,
    out_stride,
    BLOCKS: tl.constexpr,
    ALL_DEPTH: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
):
    """[A, depth] -> [A, width]: (rows @ W^T + bias) * scale, W a [width, depth] of every slot.

    ALL_DEPTH, ALL_WIDTH: tiles leave nothing over.   HALF: where most slots have few rows, those
    are tiles of half the height.

    >>> example(multiply_quantised, 2, rows=bytes([56, 64, 64, 56, 68, 48]),
    ...         row_scales=[[1.0], [0.5], [2.0]], homes=bytes([56, 0, 0, 56]),
    ...         copies=bytes([56, 56, 64, 0]), home_scales=[[1.0]], copy_scales=[[4.0]],
    ...         home_biases=None, copy_biases=None, scale=[1.0, 2.0, 1.0],
    ...         tiles=[2, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1],
    ...         out=room(3, 2, dtype=torch.float32), num_homes=1, depth=2, width=2,
    ...         rows_stride=2, row_scales_stride=1, home_stride=4, copy_stride=4,
    ...         weight_stride=2, home_scales_stride=1, copy_scales_stride=1, scales_stride=1,
    ...         home_bias_stride=None, copy_bias_stride=None, out_stride=2, BLOCKS=True,
    ...         ALL_DEPTH=False, ALL_WIDTH=False, M=16, N=16, K=128, HALF=False)
    out = [[1.0, 2.0], [12.0, 16.0], [_, _]]
    """
    weights = SlotTensors(homes, copies, num_homes, home_stride, copy_stride)
    scales = SlotTensors(
        home_scales, copy_scales, num_homes, home_scales_stride, copy_scales_stride
    )
    biases = SlotTensors(home_biases, copy_biases, num_homes, home_bias_stride, copy_bias_stride)
    given, made = Matrix(rows, rows_stride, depth), Matrix(out, out_stride, width)
    given_scales = Matrix(row_scales, row_scales_stride, 0)
    high, wide = tl.load(tiles), tl.cdiv(width, N)
    halves = HALF and tl.load(tiles + 1) != 0
    following, next_column = find_tile(tiles, tl.program_id(0), high, wide)
    for tile in range(tl.program_id(0), high * wide, tl.num_programs(0)):
        part, column = following, next_column
        following, next_column = find_tile(tiles, tile + tl.num_programs(0), high, wide)
        at_weights = of_slot(weights, part.slot)
        at_scales = of_slot(scales, part.slot)
        at_bias = None if home_biases is None else of_slot(biases, part.slot)
        low = halves and part.count <= M // 2
        for LOW in tl.static_range(1 + HALF):
            if low == LOW:
                multiply_tile_quantised(
                    given,
                    given_scales,
                    at_weights,
                    weight_stride,
                    at_scales,
                    scales_stride,
                    at_bias,
                    scale,
                    made,
                    part,
                    column * N,
                    BLOCKS,
                    ALL_DEPTH,
                    ALL_WIDTH,
                    M // (1 + LOW),
                    N,
                    K,
                )


@triton.jit
def multiply_tile_quantised(
    rows,
    row_scales,
    at_weights,
    weight_stride,
    at_scales,
    scales_stride,
    at_bias,
    scale,
    out,
    part,
    column,
    BLOCKS: tl.constexpr,
    ALL_DEPTH: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One tile: M rows, N columns from `column` on.

    With BLOCKS, the sums are kept in units of the scales of the step that comes next, so that the
    tensor cores go on adding to them.
    """
    row_M, column_N, step_K = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = out.columns - column
    # Behind the last row of the slot, it is read again: its product is not stored.
    last_M = tl.minimum(row_M, part.count - 1)
    at_rows = rows.at + part.begin * rows.stride
    at_row_scales = row_scales.at + (part.begin + last_M) * row_scales.stride
    at_weights += column.to(tl.int64) * weight_stride
    unit = load_unit(at_row_scales, at_scales, scales_stride, column, out.columns, 0, BLOCKS)
    sum_MN = tl.zeros((M, N), tl.float32)
    for k in range(0, rows.columns, K):
        deep = rows.columns - k
        row_MK = load_tile(at_rows + k, last_M, step_K, rows.stride, M, deep, True, ALL_DEPTH)
        weight_NK = load_tile(
            at_weights + k, column_N, step_K, weight_stride, left, deep, ALL_WIDTH, ALL_DEPTH
        )
        if row_MK.dtype == tl.uint8:
            row_MK, weight_NK = decode(row_MK), decode(weight_NK)
        if BLOCKS:
            following = tl.minimum(k // GROUP + 1, (rows.columns - 1) // GROUP)
            coming = load_unit(
                at_row_scales, at_scales, scales_stride, column, out.columns, following, BLOCKS
            )
            ratio = Unit(
                unit.of_rows / coming.of_rows, unit.low / coming.low, unit.high / coming.high
            )
            sum_MN = tl.dot(row_MK, weight_NK.T, sum_MN) * spread(ratio, column_N)
            unit = coming
        else:
            sum_MN = tl.dot(row_MK, weight_NK.T, sum_MN)
    if BLOCKS:
        sum_MN *= spread(unit, column_N)
    else:
        at_N = at_scales + (column + column_N) * scales_stride
        scale_N = tl.load(at_N, mask=column_N < left, other=0.0)
        sum_MN = sum_MN * unit.of_rows[:, None] * scale_N[None, :]
    if at_bias is not None:
        bias_N = tl.load(at_bias + column + column_N, mask=column_N < left, other=0.0)
        sum_MN += bias_N.to(tl.float32)[None, :]
    store_products(out, sum_MN, scale, part, column, M, N)


@triton.jit
def load_unit(at_rows, at_scales, stride, column, columns, group, BLOCKS: tl.constexpr):
    """The scales of group `group` of every row, and those of the weights of a tile."""
    of_rows, low, high = tl.load(at_rows + group), 1.0, 1.0
    if BLOCKS:
        block, last = column // GROUP, (columns - 1) // GROUP
        low = tl.load(at_scales + block * stride + group)
        high = tl.load(at_scales + tl.minimum(block + 1, last) * stride + group)
    return Unit(of_rows, low, high)


@triton.jit
def spread(unit, column_N):
    """[M, N] the factor of every sum of a tile."""
    low_M1, high_M1 = (unit.of_rows * unit.low)[:, None], (unit.of_rows * unit.high)[:, None]
    return tl.where((column_N < GROUP)[None, :], low_M1, high_M1)
