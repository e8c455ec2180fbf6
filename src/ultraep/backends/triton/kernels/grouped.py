"""Stage 6 on the GPU: matrix products of the rows of every slot with the weights of that slot.

The rows of slot l are `offsets[l]:offsets[l + 1]`, numbers that only the device knows. A fixed
number of programs shares the tiles of all slots, tile t going to program t modulo their number.
Weights stand in two stacks: those of the home slots, then those of the spare ones.

    multiply            every row with the weights of its slot, or with their transposed
    weight_gradients    of every slot: the sum over its rows

What a row gets depends on this row and its weights alone, not on its position nor on the rows
beside it: every sum over columns is made in the same order, in steps of BLOCK_K from first to last.

Shapes: A rows that there is room for, L slots of this rank, padded to a power of two; tiles of
BLOCK_M rows and BLOCK_N columns, summed in steps of BLOCK_K.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.tiles import (
    Part,
    SlotTensors,
    Sums,
    draw_tile,
    find_tile,
    of_slot,
    store_of_slot,
)


class Matrix(NamedTuple):
    """Rows that begin at `at`, one every `stride` numbers."""

    at: Any
    stride: Any
    columns: Any


class Cut(NamedTuple):
    """How `multiply` is compiled: what it computes, and how the work is cut into tiles."""

    TRANSPOSED: bool
    EVEN_K: bool
    EVEN_N: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    HALF: bool


@triton.constexpr_function
def cut_of(*settings):
    return Cut(*settings)


@triton.jit
def in_bands(tile, high, wide, GROUP_M: tl.constexpr):
    """Row and column of a tile among high x wide of them: bands of rows, in them column by column.

    Tiles that are worked on at the same time then need few rows and few columns.
    """
    first = tile // (GROUP_M * wide) * GROUP_M
    height = tl.minimum(high - first, GROUP_M)
    within = tile - first * wide
    return first + within % height, within // height


@triton.jit
def load_tile(at, row, column, stride, rows, columns, EVEN_ROWS: tl.constexpr, ALL: tl.constexpr):
    """A tile of a matrix, with zeros where it has no rows or columns left."""
    at += row[:, None] * stride + column[None, :]
    if EVEN_ROWS and ALL:
        tile = tl.load(at)
    elif ALL:
        tile = tl.load(at, mask=(row < rows)[:, None], other=0.0)
    elif EVEN_ROWS:
        tile = tl.load(at, mask=(column < columns)[None, :], other=0.0)
    else:
        tile = tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
    return tile


def work_of_product(_grid, kernel, args):
    """For profilers: a product with its shape, and its operations if all rows are there.

    How many rows are there is known on the device alone.
    """
    rows, inner = args["rows_ptr"], args["depth"] if "depth" in args else args["height"]
    count, width, bits = rows.shape[0], args["width"], 8 * rows.element_size()
    name = f"{kernel.name}_{count}x{inner}x{width}"
    return {"name": name, f"flops{bits}": 2 * count * inner * width}


@triton.jit(do_not_specialize=["num_homes"], launch_metadata=work_of_product)
def multiply(
    rows_ptr,
    homes_ptr,
    copies_ptr,
    home_biases_ptr,
    copy_biases_ptr,
    scale_ptr,
    tiles_ptr,
    out_ptr,
    num_homes,
    depth,
    width,
    stride_rows,
    stride_homes,
    stride_copies,
    stride_weights,
    stride_home_biases,
    stride_copy_biases,
    stride_out,
    TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """[A, depth] -> [A, width]: (rows @ W^T + bias) * scale, W a [width, depth] of every slot.

    TRANSPOSED: rows @ W, W a [depth, width].   EVEN_K, EVEN_N: tiles leave nothing over.
    HALF: where most slots have few rows, those are tiles of half the height. The last rows of large
    slots are not: a program that gets ahead of its neighbours finds nothing in the cache of what
    they share.   DRAWN: programs draw their tiles, those of other launches on the same tiles too.

    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> homes = [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]
    >>> example(multiply, 2, rows=rows, homes=homes, copies=[[[1.0, 1.0], [2.0, 0.0]]],
    ...         home_biases=[[0.0, 0.0], [10.0, 20.0]], copy_biases=[[100.0, 0.0]],
    ...         scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0], num_homes=2,
    ...         tiles=[3, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 2, 1],
    ...         out=room(6, 2, dtype=torch.float32), depth=2, width=2)
    out = [[1.0, 2.0], [14.0, 23.0], [55.5, 5.0], [230.0, 28.0], [119.0, 18.0], [_, _]]
    """
    weights = SlotTensors(homes_ptr, copies_ptr, num_homes, stride_homes, stride_copies)
    biases = SlotTensors(
        home_biases_ptr, copy_biases_ptr, num_homes, stride_home_biases, stride_copy_biases
    )
    given, made = Matrix(rows_ptr, stride_rows, depth), Matrix(out_ptr, stride_out, width)
    high, wide = tl.load(tiles_ptr), tl.cdiv(width, BLOCK_N)
    halves = HALF and tl.load(tiles_ptr + 1) != 0
    first = draw_tile(tiles_ptr) if DRAWN else tl.program_id(0)
    following, _, next_column = find_tile(tiles_ptr, first, high, wide)
    CUT: tl.constexpr = cut_of(TRANSPOSED, EVEN_K, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K, HALF)
    if DRAWN:
        while first < high * wide:
            part, column = following, next_column
            first = draw_tile(tiles_ptr)
            following, _, next_column = find_tile(tiles_ptr, first, high, wide)
            multiply_part(
                given, weights, biases, scale_ptr, made, part, column, halves, stride_weights, CUT
            )
    else:
        for tile in range(first, high * wide, tl.num_programs(0)):
            part, column = following, next_column
            # Looked up while this tile is made: its numbers are three loads away.
            following, _, next_column = find_tile(tiles_ptr, tile + tl.num_programs(0), high, wide)
            multiply_part(
                given, weights, biases, scale_ptr, made, part, column, halves, stride_weights, CUT
            )


@triton.jit
def multiply_part(
    rows, weights, biases, scale, out, part, column, halves, stride_weights, CUT: tl.constexpr
):
    """The tile of some rows and a column of tiles, of the size that it has there."""
    at_weights = of_slot(weights, part.slot)
    at_bias = None if biases.homes is None else of_slot(biases, part.slot)
    low = halves and part.count <= CUT.BLOCK_M // 2
    for LOW in tl.static_range(1 + CUT.HALF):
        if low == LOW:
            multiply_tile(
                rows, at_weights, stride_weights, at_bias, scale, out, part,
                column * CUT.BLOCK_N, CUT, CUT.BLOCK_M // (1 + LOW)
            )  # fmt: skip


@triton.jit
def multiply_tile(
    rows, at_weights, stride_weights, at_bias, scale, out, part, column,
    CUT: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """One tile of `multiply`: BLOCK_M rows, BLOCK_N columns from `column` on."""
    offs_m, offs_n, offs_k = (
        tl.arange(0, BLOCK_M),
        tl.arange(0, CUT.BLOCK_N),
        tl.arange(0, CUT.BLOCK_K),
    )
    left = out.columns - column
    # Behind the last row of the slot, it is read again: its product is not stored.
    at_rows = rows.at + part.begin * rows.stride
    last_M = tl.minimum(offs_m, part.count - 1)
    sum_MN = tl.zeros((BLOCK_M, CUT.BLOCK_N), tl.float32)
    for k in range(0, rows.columns, CUT.BLOCK_K):
        deep = rows.columns - k
        row_MK = load_tile(
            at_rows + k, last_M, offs_k, rows.stride, BLOCK_M, deep, True, CUT.EVEN_K
        )
        if CUT.TRANSPOSED:
            at = at_weights + k * stride_weights + column
            weight_KN = load_tile(
                at, offs_k, offs_n, stride_weights, deep, left, CUT.EVEN_K, CUT.EVEN_N
            )
        else:
            at = at_weights + column.to(tl.int64) * stride_weights + k
            weight_NK = load_tile(
                at, offs_n, offs_k, stride_weights, left, deep, CUT.EVEN_N, CUT.EVEN_K
            )
            weight_KN = weight_NK.T
        sum_MN = tl.dot(row_MK, weight_KN, sum_MN, input_precision="ieee")
    if at_bias is not None:
        bias_N = tl.load(at_bias + column + offs_n, mask=offs_n < left, other=0.0)
        sum_MN += bias_N.to(tl.float32)[None, :]
    store_products(out, sum_MN, scale, part, column, BLOCK_M, CUT.BLOCK_N)


@triton.jit
def store_products(out, sum_MN, scale, part, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Round the sums of a tile, then every row times its scale; only what is there is stored."""
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    out_MN = sum_MN.to(out.at.dtype.element_ty)
    if scale is not None:
        scale_M = tl.load(scale + part.begin + offs_m, mask=offs_m < part.count, other=0.0)
        scale_M = scale_M.to(out.at.dtype.element_ty).to(tl.float32)
        scaled_MN = out_MN.to(tl.float32) * scale_M[:, None]
        out_MN = scaled_MN.to(out.at.dtype.element_ty)
    at_MN = out.at + (part.begin + offs_m)[:, None] * out.stride + (column + offs_n)[None, :]
    mask = (offs_m < part.count)[:, None] & (offs_n < out.columns - column)[None, :]
    tl.store(at_MN, out_MN, mask=mask)


@triton.jit(do_not_specialize=["num_homes", "num_slots"], launch_metadata=work_of_product)
def weight_gradients(
    d_out_ptr,
    rows_ptr,
    scale_ptr,
    offsets_ptr,
    of_homes_ptr,
    of_copies_ptr,
    sums_ptr,
    of_home_biases_ptr,
    of_copy_biases_ptr,
    bias_sums_ptr,
    spans_ptr,
    num_homes,
    num_slots,
    height,
    width,
    stride_d_out,
    stride_rows,
    stride_homes,
    stride_copies,
    stride_weights,
    stride_home_biases,
    stride_copy_biases,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """[A, height], [A, width] -> [height, width] of every slot: d_out^T @ rows; 0 without rows.

    And [height] for the biases: the sum of d_out * scale, by the first column of tiles. Those of
    home experts that have copies, by their `spans`, stay as they are in `sums` if there are any.

    >>> d_out = [[1.0, 2.0], [0.0, 3.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [9.0, 9.0]]
    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> example(weight_gradients, 2, d_out=d_out, rows=rows, scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0],
    ...         offsets=[0, 1, 2, 5], of_homes=room(2, 2, 2, dtype=torch.bfloat16),
    ...         of_copies=room(1, 2, 2, dtype=torch.float32),
    ...         sums=room(2, 2, 2, dtype=torch.float32), spans=[[0, 0], [0, 1]],
    ...         bias_sums=room(2, 2, dtype=torch.float32),
    ...         of_home_biases=room(2, 2, dtype=torch.bfloat16),
    ...         of_copy_biases=room(1, 2, dtype=torch.float32), num_homes=2, num_slots=3, height=2,
    ...         width=2)
    of_homes = [[[1.0, 2.0], [2.0, 4.0]], [[_, _], [_, _]]]
    of_copies = [[[12.0, 14.0], [16.0, 18.0]]]
    sums = [[[_, _], [_, _]], [[0.0, 0.0], [9.0, 12.0]]]
    of_home_biases = [[1.0, 2.0], [_, _]]
    of_copy_biases = [[2.5, 3.0]]
    bias_sums = [[_, _], [0.0, 3.0]]
    """
    into = SlotTensors(of_homes_ptr, of_copies_ptr, num_homes, stride_homes, stride_copies)
    biases = SlotTensors(
        of_home_biases_ptr, of_copy_biases_ptr, num_homes, stride_home_biases, stride_copy_biases
    )
    into_sums, into_bias_sums = Sums(sums_ptr, spans_ptr), Sums(bias_sums_ptr, spans_ptr)
    left, right = Matrix(d_out_ptr, stride_d_out, height), Matrix(rows_ptr, stride_rows, width)
    high, wide = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    following = rows_of_slot(offsets_ptr, tl.program_id(0) // (high * wide), num_slots)
    for number in range(tl.program_id(0), num_slots * high * wide, tl.num_programs(0)):
        part, tile = following, number % (high * wide)
        following = rows_of_slot(
            offsets_ptr, (number + tl.num_programs(0)) // (high * wide), num_slots
        )
        row, column = in_bands(tile, high, wide, GROUP_M)
        gradient_tile(
            left, right, into, into_sums, stride_weights, part, row * BLOCK_M, column * BLOCK_N,
            EVEN_M, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
        if of_home_biases_ptr is not None and column == 0:
            bias_tile(
                left,
                scale_ptr,
                biases,
                into_bias_sums,
                part,
                row * BLOCK_M,
                EVEN_M,
                BLOCK_M,
                BLOCK_K,
            )


@triton.jit
def rows_of_slot(offsets, slot, num_slots):
    """All rows of a slot; none behind the last one."""
    begin = tl.load(offsets + slot, mask=slot < num_slots, other=0)
    end = tl.load(offsets + slot + 1, mask=slot < num_slots, other=0)
    return Part(slot, begin.to(tl.int64), end - begin)


@triton.jit
def gradient_tile(
    d_out, rows, into, sums, stride_weights, part, row, column, EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """One tile of `weight_gradients`: rows from `row` on, columns from `column` on."""
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    high, wide = d_out.columns - row, rows.columns - column
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, part.count, BLOCK_K):
        first, left = part.begin + k, part.count - k
        at = d_out.at + first * d_out.stride + row
        out_KM = load_tile(at, offs_k, offs_m, d_out.stride, left, high, False, EVEN_M)
        at = rows.at + first * rows.stride + column
        row_KN = load_tile(at, offs_k, offs_n, rows.stride, left, wide, False, EVEN_N)
        sum_MN = tl.dot(out_KM.T, row_KN, sum_MN, input_precision="ieee")
    at_MN = (row + offs_m)[:, None] * stride_weights + (column + offs_n)[None, :]
    mask = (offs_m < high)[:, None] & (offs_n < wide)[None, :]
    store_of_slot(into, sums, part.slot, at_MN, sum_MN, mask)


@triton.jit
def bias_tile(
    d_out,
    scale,
    biases,
    sums,
    part,
    row,
    ALL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some gradients of a bias: sums over the rows of its slot, every row times its scale."""
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    columns = d_out.columns - row
    sum_KM = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    for k in range(0, part.count, BLOCK_K):
        first, left = part.begin + k, part.count - k
        at = d_out.at + row + first * d_out.stride
        row_KM = load_tile(at, offs_k, offs_m, d_out.stride, left, columns, False, ALL)
        row_KM = row_KM.to(tl.float32)
        if scale is not None:
            scale_K = tl.load(scale + first + offs_k, mask=offs_k < left, other=0.0)
            row_KM *= scale_K[:, None]
        sum_KM += row_KM
    at, mask = row + offs_m, offs_m < columns
    store_of_slot(biases, sums, part.slot, at, tl.sum(sum_KM, 0), mask)
