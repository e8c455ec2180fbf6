"""Stage 6 on the GPU: matrix products of the rows of every slot with the weights of that slot.

The rows of slot l are `offsets[l]:offsets[l + 1]`, numbers that only the device knows. A fixed
number of programs shares the tiles of all slots, tile t going to program t modulo their number.
Weights stand in two stacks: those of the home slots, then those of the spare ones.

    multiply            every row with the weights of its slot, or with their transposed
    weight_gradients    of every slot: the sum over its rows

What a row gets depends on this row and its weights alone, not on its position nor on the rows
beside it: every sum over columns is made in the same order, in steps of K from first to last.

Shapes: A rows that there is room for, L slots of this rank, padded to a power of two; tiles of M
rows and N columns, summed in steps of K.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.slots import SlotTensors, Sums, of_slot, store_of_slot
from ultraep.backends.triton.kernels.tiles import Part, draw_tile, find_tile


class Matrix(NamedTuple):
    """Rows that begin at `at`, one every `stride` numbers."""

    at: Any
    stride: Any
    columns: Any


@triton.jit
def in_bands(tile, high, wide, BAND: tl.constexpr):
    """Row and column of a tile among high x wide of them: bands of rows, in them column by column.

    Tiles that are worked on at the same time then need few rows and few columns.
    """
    first = tile // (BAND * wide) * BAND
    height = tl.minimum(high - first, BAND)
    within = tile - first * wide
    return first + within % height, within // height


@triton.jit
def load_tile(at, row, column, stride, rows, columns, ALL_ROWS: tl.constexpr, ALL: tl.constexpr):
    """A tile of a matrix, with zeros where it has no rows or columns left."""
    at += row[:, None] * stride + column[None, :]
    if ALL_ROWS and ALL:
        tile = tl.load(at)
    elif ALL:
        tile = tl.load(at, mask=(row < rows)[:, None], other=0.0)
    elif ALL_ROWS:
        tile = tl.load(at, mask=(column < columns)[None, :], other=0.0)
    else:
        tile = tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["num_homes"])
def multiply(
    rows,
    homes,
    copies,
    home_biases,
    copy_biases,
    scale,
    tiles,
    out,
    num_homes,
    depth,
    width,
    rows_stride,
    home_stride,
    copy_stride,
    weight_stride,
    home_bias_stride,
    copy_bias_stride,
    out_stride,
    TRANSPOSED: tl.constexpr,
    ALL_DEPTH: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LAST: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """[A, depth] -> [A, width]: (rows @ W^T + bias) * scale, W a [width, depth] of every slot.

    TRANSPOSED: rows @ W, W a [depth, width].   ALL_DEPTH, ALL_WIDTH: tiles leave nothing over.
    LAST: columns of the last tile, N or fewer.   HALF: where most slots have few rows, those are
    tiles of half the height. The last rows of large slots are not: a program that gets ahead of its
    neighbours finds nothing in the cache of what they share.   DRAWN: programs draw their tiles,
    those of other launches on the same tiles too.

    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> homes = [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]
    >>> example(multiply, 2, rows=rows, homes=homes, copies=[[[1.0, 1.0], [2.0, 0.0]]],
    ...         home_biases=[[0.0, 0.0], [10.0, 20.0]], copy_biases=[[100.0, 0.0]],
    ...         scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0], num_homes=2,
    ...         tiles=[3, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 2, 1],
    ...         out=room(6, 2, dtype=torch.float32),
    ...         depth=2, width=2, rows_stride=2, home_stride=4, copy_stride=4, weight_stride=2,
    ...         home_bias_stride=2, copy_bias_stride=2, out_stride=2, TRANSPOSED=False,
    ...         ALL_DEPTH=False, ALL_WIDTH=False, M=16, N=16, LAST=16, K=16, HALF=False,
    ...         DRAWN=False)
    out = [[1.0, 2.0], [14.0, 23.0], [55.5, 5.0], [230.0, 28.0], [119.0, 18.0], [_, _]]
    """
    weights = SlotTensors(homes, copies, num_homes, home_stride, copy_stride)
    biases = SlotTensors(home_biases, copy_biases, num_homes, home_bias_stride, copy_bias_stride)
    given, made = Matrix(rows, rows_stride, depth), Matrix(out, out_stride, width)
    high, wide = tl.load(tiles), tl.cdiv(width, N)
    halves = HALF and tl.load(tiles + 1) != 0
    first = draw_tile(tiles) if DRAWN else tl.program_id(0)
    following, _, next_column = find_tile(tiles, first, high, wide)
    if DRAWN:
        while first < high * wide:
            part, column = following, next_column
            first = draw_tile(tiles)
            following, _, next_column = find_tile(tiles, first, high, wide)
            multiply_part(
                given, weights, biases, scale, made, part, column, wide, halves, weight_stride,
                TRANSPOSED, ALL_DEPTH, ALL_WIDTH, M, N, LAST, K, HALF
            )  # fmt: skip
    else:
        for tile in range(first, high * wide, tl.num_programs(0)):
            part, column = following, next_column
            # Looked up while this tile is made: its numbers are three loads away.
            following, _, next_column = find_tile(tiles, tile + tl.num_programs(0), high, wide)
            multiply_part(
                given, weights, biases, scale, made, part, column, wide, halves, weight_stride,
                TRANSPOSED, ALL_DEPTH, ALL_WIDTH, M, N, LAST, K, HALF
            )  # fmt: skip


@triton.jit
def multiply_part(
    rows,
    weights,
    biases,
    scale,
    out,
    part,
    column,
    wide,
    halves,
    weight_stride,
    TRANSPOSED: tl.constexpr,
    ALL_DEPTH: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LAST: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
):
    """The tile of some rows and a column of tiles, of the size that it has there."""
    at_weights = of_slot(weights, part.slot)
    at_bias = None if biases.homes is None else of_slot(biases, part.slot)
    low, slim = halves and part.count <= M // 2, LAST < N and column == wide - 1
    for LOW in tl.static_range(1 + HALF):
        for SLIM in tl.static_range(1 + (LAST < N)):
            if (low == LOW) and (slim == SLIM):
                multiply_tile(
                    rows,
                    at_weights,
                    weight_stride,
                    at_bias,
                    scale,
                    out,
                    part,
                    column * N,
                    TRANSPOSED,
                    ALL_DEPTH,
                    ALL_WIDTH or (LAST < N and SLIM == 0),
                    M // (1 + LOW),
                    LAST if SLIM else N,
                    K,
                )


@triton.jit
def multiply_tile(
    rows,
    at_weights,
    weight_stride,
    at_bias,
    scale,
    out,
    part,
    column,
    TRANSPOSED: tl.constexpr,
    ALL_DEPTH: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One tile of `multiply`: M rows, N columns from `column` on."""
    row_M, column_N, step_K = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = out.columns - column
    # Behind the last row of the slot, it is read again: its product is not stored.
    at_rows = rows.at + part.begin * rows.stride
    last_M = tl.minimum(row_M, part.count - 1)
    sum_MN = tl.zeros((M, N), tl.float32)
    for k in range(0, rows.columns, K):
        deep = rows.columns - k
        row_MK = load_tile(at_rows + k, last_M, step_K, rows.stride, M, deep, True, ALL_DEPTH)
        if TRANSPOSED:
            at = at_weights + k * weight_stride + column
            weight_KN = load_tile(
                at, step_K, column_N, weight_stride, deep, left, ALL_DEPTH, ALL_WIDTH
            )
        else:
            at = at_weights + column.to(tl.int64) * weight_stride + k
            weight_NK = load_tile(
                at, column_N, step_K, weight_stride, left, deep, ALL_WIDTH, ALL_DEPTH
            )
            weight_KN = weight_NK.T
        sum_MN = tl.dot(row_MK, weight_KN, sum_MN, input_precision="ieee")
    if at_bias is not None:
        bias_N = tl.load(at_bias + column + column_N, mask=column_N < left, other=0.0)
        sum_MN += bias_N.to(tl.float32)[None, :]
    store_products(out, sum_MN, scale, part, column, M, N)


@triton.jit
def store_products(out, sum_MN, scale, part, column, M: tl.constexpr, N: tl.constexpr):
    """Round the sums of a tile, then every row times its scale; only what is there is stored."""
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    out_MN = sum_MN.to(out.at.dtype.element_ty)
    if scale is not None:
        scale_M = tl.load(scale + part.begin + row_M, mask=row_M < part.count, other=0.0)
        scale_M = scale_M.to(out.at.dtype.element_ty).to(tl.float32)
        scaled_MN = out_MN.to(tl.float32) * scale_M[:, None]
        out_MN = scaled_MN.to(out.at.dtype.element_ty)
    at_MN = out.at + (part.begin + row_M)[:, None] * out.stride + (column + column_N)[None, :]
    there = (row_M < part.count)[:, None] & (column_N < out.columns - column)[None, :]
    tl.store(at_MN, out_MN, mask=there)


@triton.jit(do_not_specialize=["num_homes", "num_slots"])
def weight_gradients(
    d_out,
    rows,
    scale,
    offsets,
    of_homes,
    of_copies,
    sums,
    of_home_biases,
    of_copy_biases,
    bias_sums,
    spans,
    num_homes,
    num_slots,
    height,
    width,
    d_out_stride,
    rows_stride,
    home_stride,
    copy_stride,
    weight_stride,
    home_bias_stride,
    copy_bias_stride,
    ALL_HEIGHT: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LAST: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,
):
    """[A, height], [A, width] -> [height, width] of every slot: d_out^T @ rows; 0 without rows.

    And [height] for the biases: the sum of d_out * scale, by the first column of tiles. Those of
    home experts that have copies, by their `spans`, stay as they are in `sums` if there are any.
    LAST: columns of the last tile, N or fewer.

    >>> d_out = [[1.0, 2.0], [0.0, 3.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [9.0, 9.0]]
    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> example(weight_gradients, 2, d_out=d_out, rows=rows, scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0],
    ...         offsets=[0, 1, 2, 5], of_homes=room(2, 2, 2, dtype=torch.bfloat16),
    ...         of_copies=room(1, 2, 2, dtype=torch.float32),
    ...         sums=room(2, 2, 2, dtype=torch.float32), spans=[[0, 0], [0, 1]],
    ...         bias_sums=room(2, 2, dtype=torch.float32),
    ...         of_home_biases=room(2, 2, dtype=torch.bfloat16),
    ...         of_copy_biases=room(1, 2, dtype=torch.float32), num_homes=2, num_slots=3, height=2,
    ...         width=2, d_out_stride=2, rows_stride=2, home_stride=4, copy_stride=4,
    ...         weight_stride=2, home_bias_stride=2, copy_bias_stride=2, ALL_HEIGHT=False,
    ...         ALL_WIDTH=False, M=16, N=16, LAST=16, K=16, BAND=8)
    of_homes = [[[1.0, 2.0], [2.0, 4.0]], [[_, _], [_, _]]]
    of_copies = [[[12.0, 14.0], [16.0, 18.0]]]
    sums = [[[_, _], [_, _]], [[0.0, 0.0], [9.0, 12.0]]]
    bias_sums = [[_, _], [0.0, 3.0]]
    of_home_biases = [[1.0, 2.0], [_, _]]
    of_copy_biases = [[2.5, 3.0]]
    """
    into = SlotTensors(of_homes, of_copies, num_homes, home_stride, copy_stride)
    biases = SlotTensors(
        of_home_biases, of_copy_biases, num_homes, home_bias_stride, copy_bias_stride
    )
    into_sums, into_bias_sums = Sums(sums, spans), Sums(bias_sums, spans)
    left, right = Matrix(d_out, d_out_stride, height), Matrix(rows, rows_stride, width)
    high, wide = tl.cdiv(height, M), tl.cdiv(width, N)
    following = rows_of_slot(offsets, tl.program_id(0) // (high * wide), num_slots)
    for number in range(tl.program_id(0), num_slots * high * wide, tl.num_programs(0)):
        part, tile = following, number % (high * wide)
        following = rows_of_slot(offsets, (number + tl.num_programs(0)) // (high * wide), num_slots)
        row, column = in_bands(tile, high, wide, BAND)
        slim = LAST < N and column == wide - 1
        for SLIM in tl.static_range(1 + (LAST < N)):
            if slim == SLIM:
                gradient_tile(
                    left,
                    right,
                    into,
                    into_sums,
                    weight_stride,
                    part,
                    row * M,
                    column * N,
                    ALL_HEIGHT,
                    ALL_WIDTH or (LAST < N and SLIM == 0),
                    M,
                    LAST if SLIM else N,
                    K,
                )
        if of_home_biases is not None and column == 0:
            bias_tile(left, scale, biases, into_bias_sums, part, row * M, ALL_HEIGHT, M, K)


@triton.jit
def rows_of_slot(offsets, slot, num_slots):
    """All rows of a slot; none behind the last one."""
    begin = tl.load(offsets + slot, mask=slot < num_slots, other=0)
    end = tl.load(offsets + slot + 1, mask=slot < num_slots, other=0)
    return Part(slot, begin.to(tl.int64), end - begin)


@triton.jit
def gradient_tile(
    d_out,
    rows,
    into,
    sums,
    weight_stride,
    part,
    row,
    column,
    ALL_HEIGHT: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One tile of `weight_gradients`: M rows from `row` on, N columns from `column` on."""
    row_M, column_N, step_K = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    high, wide = d_out.columns - row, rows.columns - column
    sum_MN = tl.zeros((M, N), tl.float32)
    for k in range(0, part.count, K):
        first, left = part.begin + k, part.count - k
        at = d_out.at + first * d_out.stride + row
        out_KM = load_tile(at, step_K, row_M, d_out.stride, left, high, False, ALL_HEIGHT)
        at = rows.at + first * rows.stride + column
        row_KN = load_tile(at, step_K, column_N, rows.stride, left, wide, False, ALL_WIDTH)
        sum_MN = tl.dot(out_KM.T, row_KN, sum_MN, input_precision="ieee")
    at_MN = (row + row_M)[:, None] * weight_stride + (column + column_N)[None, :]
    there = (row_M < high)[:, None] & (column_N < wide)[None, :]
    store_of_slot(into, sums, part.slot, at_MN, sum_MN, there)


@triton.jit
def bias_tile(
    d_out, scale, biases, sums, part, row, ALL: tl.constexpr, M: tl.constexpr, K: tl.constexpr
):
    """M of the gradients of a bias: sums over the rows of its slot, every row times its scale."""
    column_M, step_K = tl.arange(0, M), tl.arange(0, K)
    columns = d_out.columns - row
    sum_KM = tl.zeros((K, M), tl.float32)
    for k in range(0, part.count, K):
        first, left = part.begin + k, part.count - k
        at = d_out.at + row + first * d_out.stride
        row_KM = load_tile(at, step_K, column_M, d_out.stride, left, columns, False, ALL)
        row_KM = row_KM.to(tl.float32)
        if scale is not None:
            scale_K = tl.load(scale + first + step_K, mask=step_K < left, other=0.0)
            row_KM *= scale_K[:, None]
        sum_KM += row_KM
    at, there = row + column_M, column_M < columns
    store_of_slot(biases, sums, part.slot, at, tl.sum(sum_KM, 0), there)
