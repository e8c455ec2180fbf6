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

import triton
import triton.language as tl


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
def of_slot(homes, copies, slot, num_homes, home_stride, copy_stride):
    """Where the tensor of a slot begins."""
    spare = slot - num_homes
    home_at = homes + slot.to(tl.int64) * home_stride
    return tl.where(spare < 0, home_at, copies + spare.to(tl.int64) * copy_stride)


@triton.jit
def store_of_slot(homes, copies, slot, num_homes, home_stride, copy_stride, at, values, mask):
    """Store numbers at places of the tensor of a slot; the two stacks may differ in type."""
    if homes.dtype == copies.dtype:
        either = of_slot(homes, copies, slot, num_homes, home_stride, copy_stride)
        tl.store(either + at, values.to(homes.dtype.element_ty), mask=mask)
    elif slot < num_homes:
        home = homes + slot.to(tl.int64) * home_stride
        tl.store(home + at, values.to(homes.dtype.element_ty), mask=mask)
    else:
        copy = copies + (slot - num_homes).to(tl.int64) * copy_stride
        tl.store(copy + at, values.to(copies.dtype.element_ty), mask=mask)


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


@triton.jit(do_not_specialize=["num_slots"])
def lay_tiles(offsets, tiles, num_slots, L: tl.constexpr, M: tl.constexpr, B: tl.constexpr):
    """Program l: the tiles of slot l behind those of the slots before it.

    tiles: their number, then slot and number within the slot, of each. Bands of tiles go across
    slots, so that programs have enough to share also where slots are small.
    """
    slot, slot_L = tl.program_id(0), tl.arange(0, L)
    there_L = slot_L < num_slots
    rows_L = tl.load(offsets + slot_L + 1, mask=there_L, other=0)
    rows_L -= tl.load(offsets + slot_L, mask=there_L, other=0)
    high_L = tl.cdiv(rows_L, M)
    high = tl.sum(tl.where(slot_L == slot, high_L, 0), 0)
    before = tl.sum(tl.where(slot_L < slot, high_L, 0), 0)
    for begin in range(0, high, B):
        tile_B = begin + tl.arange(0, B)
        at_B = tiles + 1 + 2 * (before + tile_B)
        tl.store(at_B, slot, mask=tile_B < high)
        tl.store(at_B + 1, tile_B, mask=tile_B < high)
    tl.store(tiles, tl.sum(high_L, 0))


@triton.jit
def multiply_tile(
    rows,
    at_weights,
    at_bias,
    scale,
    out,
    begin,
    count,
    column,
    depth,
    width,
    rows_stride,
    weight_stride,
    out_stride,
    TRANSPOSED: tl.constexpr,
    ALL_DEPTH: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One tile of `multiply`: `count` rows from `begin` on, N columns from `column` on."""
    row_M, column_N, step_K = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = width - column
    # Behind the last row of the slot, it is read again: its product is not stored.
    at_rows = rows + begin * rows_stride
    last_M = tl.minimum(row_M, count - 1)
    sum_MN = tl.zeros((M, N), tl.float32)
    for k in range(0, depth, K):
        row_MK = load_tile(at_rows + k, last_M, step_K, rows_stride, M, depth - k, True, ALL_DEPTH)
        if TRANSPOSED:
            at = at_weights + k * weight_stride + column
            weight_KN = load_tile(
                at, step_K, column_N, weight_stride, depth - k, left, ALL_DEPTH, ALL_WIDTH
            )
        else:
            at = at_weights + column.to(tl.int64) * weight_stride + k
            weight_NK = load_tile(
                at, column_N, step_K, weight_stride, left, depth - k, ALL_WIDTH, ALL_DEPTH
            )
            weight_KN = weight_NK.T
        sum_MN = tl.dot(row_MK, weight_KN, sum_MN, input_precision="ieee")
    if BIASED:
        bias_N = tl.load(at_bias + column + column_N, mask=column_N < left, other=0.0)
        sum_MN += bias_N.to(tl.float32)[None, :]
    out_MN = sum_MN.to(out.dtype.element_ty)
    if scale is not None:
        scale_M = tl.load(scale + begin + row_M, mask=row_M < count, other=0.0)
        scale_M = scale_M.to(out.dtype.element_ty).to(tl.float32)
        scaled_MN = out_MN.to(tl.float32) * scale_M[:, None]
        out_MN = scaled_MN.to(out.dtype.element_ty)
    at_MN = out + (begin + row_M)[:, None] * out_stride + (column + column_N)[None, :]
    tl.store(at_MN, out_MN, mask=(row_M < count)[:, None] & (column_N < left)[None, :])


@triton.jit(do_not_specialize=["num_homes"])
def multiply(
    rows,
    homes,
    copies,
    home_biases,
    copy_biases,
    scale,
    offsets,
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
    BAND: tl.constexpr,
    HALF: tl.constexpr,
):
    """[A, depth] -> [A, width]: (rows @ W^T + bias) * scale, W a [width, depth] of every slot.

    TRANSPOSED: rows @ W, W a [depth, width].   ALL_DEPTH, ALL_WIDTH: tiles leave nothing over.
    LAST: columns of the last tile, N or fewer.   HALF: the last rows of a slot, if few, are a tile
    of half the height.
    """
    high, wide = tl.load(tiles), tl.cdiv(width, N)
    for tile in range(tl.program_id(0), high * wide, tl.num_programs(0)):
        row, column = in_bands(tile, high, wide, BAND)
        slot, row = tl.load(tiles + 1 + 2 * row), tl.load(tiles + 2 + 2 * row)
        begin = tl.load(offsets + slot)
        count = tl.load(offsets + slot + 1) - begin
        begin, count = (begin + row * M).to(tl.int64), count - row * M
        at_weights = of_slot(homes, copies, slot, num_homes, home_stride, copy_stride)
        at_bias = at_weights
        if home_biases is not None:
            at_bias = of_slot(
                home_biases, copy_biases, slot, num_homes, home_bias_stride, copy_bias_stride
            )
        low, slim = HALF and count <= M // 2, LAST < N and column == wide - 1
        for LOW in tl.static_range(1 + HALF):
            for SLIM in tl.static_range(1 + (LAST < N)):
                if (low == LOW) and (slim == SLIM):
                    multiply_tile(
                        rows,
                        at_weights,
                        at_bias,
                        scale,
                        out,
                        begin,
                        count,
                        column * N,
                        depth,
                        width,
                        rows_stride,
                        weight_stride,
                        out_stride,
                        TRANSPOSED,
                        ALL_DEPTH,
                        ALL_WIDTH or (LAST < N and SLIM == 0),
                        home_biases is not None,
                        M // (1 + LOW),
                        LAST if SLIM else N,
                        K,
                    )


@triton.jit
def gradient_tile(
    d_out,
    rows,
    of_homes,
    of_copies,
    slot,
    begin,
    count,
    num_homes,
    row,
    column,
    height,
    width,
    d_out_stride,
    rows_stride,
    home_stride,
    copy_stride,
    weight_stride,
    ALL_HEIGHT: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One tile of `weight_gradients`: M rows from `row` on, N columns from `column` on."""
    row_M, column_N, step_K = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    rows_left, left = height - row, width - column
    sum_MN = tl.zeros((M, N), tl.float32)
    for k in range(0, count, K):
        at = d_out + (begin + k) * d_out_stride + row
        out_KM = load_tile(at, step_K, row_M, d_out_stride, count - k, rows_left, False, ALL_HEIGHT)
        at = rows + (begin + k) * rows_stride + column
        row_KN = load_tile(at, step_K, column_N, rows_stride, count - k, left, False, ALL_WIDTH)
        sum_MN = tl.dot(out_KM.T, row_KN, sum_MN, input_precision="ieee")
    at_MN = (row + row_M)[:, None] * weight_stride + (column + column_N)[None, :]
    mask = (row_M < rows_left)[:, None] & (column_N < left)[None, :]
    store_of_slot(
        of_homes, of_copies, slot, num_homes, home_stride, copy_stride, at_MN, sum_MN, mask
    )


@triton.jit(do_not_specialize=["num_homes", "num_slots"])
def weight_gradients(
    d_out,
    rows,
    scale,
    offsets,
    of_homes,
    of_copies,
    of_home_biases,
    of_copy_biases,
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

    And [height] for the biases: the sum of d_out * scale, by the first column of tiles.
    LAST: columns of the last tile, N or fewer.
    """
    high, wide = tl.cdiv(height, M), tl.cdiv(width, N)
    row_M = tl.arange(0, M)
    for number in range(tl.program_id(0), num_slots * high * wide, tl.num_programs(0)):
        slot, tile = number // (high * wide), number % (high * wide)
        begin = tl.load(offsets + slot)
        count = tl.load(offsets + slot + 1) - begin
        begin = begin.to(tl.int64)
        row, column = in_bands(tile, high, wide, BAND)
        slim = LAST < N and column == wide - 1
        for SLIM in tl.static_range(1 + (LAST < N)):
            if slim == SLIM:
                gradient_tile(
                    d_out,
                    rows,
                    of_homes,
                    of_copies,
                    slot,
                    begin,
                    count,
                    num_homes,
                    row * M,
                    column * N,
                    height,
                    width,
                    d_out_stride,
                    rows_stride,
                    home_stride,
                    copy_stride,
                    weight_stride,
                    ALL_HEIGHT,
                    ALL_WIDTH or (LAST < N and SLIM == 0),
                    M,
                    LAST if SLIM else N,
                    K,
                )
        if of_home_biases is not None and column == 0:
            row *= M
            sum_M = column_sums(
                d_out + row, scale, begin, count, height - row, d_out_stride, ALL_HEIGHT, M, K
            )
            store_of_slot(
                of_home_biases,
                of_copy_biases,
                slot,
                num_homes,
                home_bias_stride,
                copy_bias_stride,
                row + row_M,
                sum_M,
                row_M < height - row,
            )


@triton.jit
def column_sums(
    at, scale, begin, count, columns, stride, ALL: tl.constexpr, M: tl.constexpr, K: tl.constexpr
):
    """[M] sums over the rows of a slot, every row times its scale."""
    column_M, step_K = tl.arange(0, M), tl.arange(0, K)
    sum_KM = tl.zeros((K, M), tl.float32)
    for k in range(0, count, K):
        row_KM = load_tile(
            at + (begin + k) * stride, step_K, column_M, stride, count - k, columns, False, ALL
        )
        row_KM = row_KM.to(tl.float32)
        if scale is not None:
            scale_K = tl.load(scale + begin + k + step_K, mask=step_K < count - k, other=0.0)
            row_KM *= scale_K[:, None]
        sum_KM += row_KM
    return tl.sum(sum_KM, 0)
