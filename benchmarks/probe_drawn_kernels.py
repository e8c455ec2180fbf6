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


ENTRIES = tl.constexpr(4)  # of a row of tiles; as many numbers stand before the first one
DRAWN, DONE = tl.constexpr(1), tl.constexpr(2)  # among these


class Matrix(NamedTuple):
    """Rows that begin at `at`, one every `stride` numbers."""

    at: Any
    stride: Any
    columns: Any


class Part(NamedTuple):
    """Rows of one slot: `count` of them from `begin` on."""

    slot: Any
    begin: Any
    count: Any


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


@triton.jit(do_not_specialize=["num_slots"])
def lay_tiles(
    offsets, tiles, num_slots, L: tl.constexpr, M: tl.constexpr, BAND: tl.constexpr, B: tl.constexpr
):
    """Program l: the rows of tiles of slot l, behind those of the slots before it.

    tiles: how many there are; tiles drawn and programs that are done, both 0; one that is free.
    Then of each its slot, its number within the slot, the first of its band and their number: the
    tiles of a slot are divided evenly into bands of about BAND.

    >>> example(lay_tiles, 3, offsets=[0, 1, 2, 5], tiles=room(24), num_slots=3, L=4, M=2, BAND=2,
    ...         B=4)
    tiles = [4, 0, 0, _, 0, 0, 0, 1, 1, 0, 1, 1, 2, 0, 2, 2, 2, 1, 2, 2, _, _, _, _]
    """
    slot, slot_L = tl.program_id(0), tl.arange(0, L)
    there_L = slot_L < num_slots
    rows_L = tl.load(offsets + slot_L + 1, mask=there_L, other=0)
    rows_L -= tl.load(offsets + slot_L, mask=there_L, other=0)
    high_L = tl.cdiv(rows_L, M)
    high = tl.sum(tl.where(slot_L == slot, high_L, 0), 0)
    before = tl.sum(tl.where(slot_L < slot, high_L, 0), 0)
    bands = tl.maximum((high + BAND // 2) // BAND, 1)
    height, higher = tl.maximum(high // bands, 1), high % bands  # so many have one more
    for begin in range(0, high, B):
        tile_B = begin + tl.arange(0, B)
        after_B = tile_B - higher * (height + 1)
        more_B = after_B < 0
        height_B = tl.where(more_B, height + 1, height)
        within_B = tl.where(more_B, tile_B % (height + 1), after_B % height)
        at_B, there_B = tiles + ENTRIES * (1 + before + tile_B), tile_B < high
        tl.store(at_B, slot, mask=there_B)
        tl.store(at_B + 1, tile_B, mask=there_B)
        tl.store(at_B + 2, before + tile_B - within_B, mask=there_B)
        tl.store(at_B + 3, height_B, mask=there_B)
    if slot == 0:
        tl.store(tiles, tl.sum(high_L, 0))
        tl.store(tiles + DRAWN, 0)
        tl.store(tiles + DONE, 0)


@triton.jit
def place_of_tile(tiles, tile, wide):
    """Row and column of a tile, in bands; each column begins with another row of the band.

    So the tiles of one row go to many programs: those of fewer rows are shared by all.
    """
    at = tiles + ENTRIES * (1 + tile // wide)
    first, height = tl.load(at + 2), tl.load(at + 3)
    within = tile - first * wide
    column = within // height
    return first + (within + column) % height, column


@triton.jit
def draw(tiles, LANES: tl.constexpr):
    """Asks for another tile. Nobody waits for the answer before `drawn_tile`."""
    lane = tl.arange(0, LANES)
    return tl.atomic_add(tiles + DRAWN + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")


@triton.jit
def drawn_tile(answer, LANES: tl.constexpr):
    """The tile that was asked for: every program begins with one that it has not drawn."""
    return tl.num_programs(0) + tl.sum(tl.where(tl.arange(0, LANES) == 0, answer, 0), 0)


@triton.jit
def leave(tiles):
    """The last program to leave makes the tiles ready for the next kernel."""
    done = tl.atomic_add(tiles + DONE, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        tl.store(tiles + DRAWN, 0)
        tl.store(tiles + DONE, 0)


@triton.jit
def part_of_tile(offsets, tiles, number, M: tl.constexpr):
    """The rows of a tile, and those of its slot behind them: the count may be more than M."""
    at = tiles + ENTRIES * (1 + number)
    slot, row = tl.load(at), tl.load(at + 1)
    begin = tl.load(offsets + slot)
    count = tl.load(offsets + slot + 1) - begin
    return Part(slot, (begin + row * M).to(tl.int64), count - row * M)


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
    HALF: tl.constexpr,
    LANES: tl.constexpr,
):
    """[A, depth] -> [A, width]: (rows @ W^T + bias) * scale, W a [width, depth] of every slot.

    TRANSPOSED: rows @ W, W a [depth, width].   ALL_DEPTH, ALL_WIDTH: tiles leave nothing over.
    LAST: columns of the last tile, N or fewer.   HALF: the last rows of a slot, if few, are a tile
    of half the height.

    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> homes = [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]
    >>> example(multiply, 2, rows=rows, homes=homes, copies=[[[1.0, 1.0], [2.0, 0.0]]],
    ...         home_biases=[[0.0, 0.0], [10.0, 20.0]], copy_biases=[[100.0, 0.0]],
    ...         scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0], offsets=[0, 1, 2, 5],
    ...         tiles=[3, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 2, 0, 2, 1], out=room(6, 2, dtype=torch.float32), num_homes=2,
    ...         depth=2, width=2, rows_stride=2, home_stride=4, copy_stride=4, weight_stride=2,
    ...         home_bias_stride=2, copy_bias_stride=2, out_stride=2, TRANSPOSED=False,
    ...         ALL_DEPTH=False, ALL_WIDTH=False, M=16, N=16, LAST=16, K=16, HALF=False, LANES=128)
    out = [[1.0, 2.0], [14.0, 23.0], [55.5, 5.0], [230.0, 28.0], [119.0, 18.0], [_, _]]
    """
    weights = SlotTensors(homes, copies, num_homes, home_stride, copy_stride)
    biases = SlotTensors(home_biases, copy_biases, num_homes, home_bias_stride, copy_bias_stride)
    given, made = Matrix(rows, rows_stride, depth), Matrix(out, out_stride, width)
    high, wide = tl.load(tiles), tl.cdiv(width, N)
    tile = tl.program_id(0)
    while tile < high * wide:
        answer = 0
        if LANES > 0:
            answer = draw(tiles, LANES)
        row, column = place_of_tile(tiles, tile, wide)
        part = part_of_tile(offsets, tiles, row, M)
        at_weights = of_slot(weights, part.slot)
        at_bias = None if home_biases is None else of_slot(biases, part.slot)
        low, slim = HALF and part.count <= M // 2, LAST < N and column == wide - 1
        for LOW in tl.static_range(1 + HALF):
            for SLIM in tl.static_range(1 + (LAST < N)):
                if (low == LOW) and (slim == SLIM):
                    multiply_tile(
                        given,
                        at_weights,
                        weight_stride,
                        at_bias,
                        scale,
                        made,
                        part,
                        column * N,
                        TRANSPOSED,
                        ALL_DEPTH,
                        ALL_WIDTH or (LAST < N and SLIM == 0),
                        M // (1 + LOW),
                        LAST if SLIM else N,
                        K,
                    )
        if LANES > 0:
            tile = drawn_tile(answer, LANES)
        else:
            tile += tl.num_programs(0)
    if LANES > 0:
        leave(tiles)


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
    tiles,
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
    LANES: tl.constexpr,
):
    """[A, height], [A, width] -> [height, width] of every slot: d_out^T @ rows; 0 without rows.

    And [height] for the biases: the sum of d_out * scale, by the first column of tiles. Those of
    home experts that have copies, by their `spans`, stay as they are in `sums` if there are any.
    LAST: columns of the last tile, N or fewer.

    >>> d_out = [[1.0, 2.0], [0.0, 3.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [9.0, 9.0]]
    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> example(weight_gradients, 2, d_out=d_out, rows=rows, scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0],
    ...         offsets=[0, 1, 2, 5], tiles=[0, 0, 0, 0], of_homes=room(2, 2, 2, dtype=torch.bfloat16),
    ...         of_copies=room(1, 2, 2, dtype=torch.float32),
    ...         sums=room(2, 2, 2, dtype=torch.float32), spans=[[0, 0], [0, 1]],
    ...         bias_sums=room(2, 2, dtype=torch.float32),
    ...         of_home_biases=room(2, 2, dtype=torch.bfloat16),
    ...         of_copy_biases=room(1, 2, dtype=torch.float32), num_homes=2, num_slots=3, height=2,
    ...         width=2, d_out_stride=2, rows_stride=2, home_stride=4, copy_stride=4,
    ...         weight_stride=2, home_bias_stride=2, copy_bias_stride=2, ALL_HEIGHT=False,
    ...         ALL_WIDTH=False, M=16, N=16, LAST=16, K=16, BAND=8, LANES=128)
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
    number = tl.program_id(0)
    while number < num_slots * high * wide:
        answer = 0
        if LANES > 0:
            answer = draw(tiles, LANES)
        slot, tile = number // (high * wide), number % (high * wide)
        begin = tl.load(offsets + slot)
        part = Part(slot, begin.to(tl.int64), tl.load(offsets + slot + 1) - begin)
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
        if LANES > 0:
            number = drawn_tile(answer, LANES)
        else:
            number += tl.num_programs(0)
    if LANES > 0:
        leave(tiles)


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
