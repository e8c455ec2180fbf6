"""Stage 6 on the GPU: matrix products of the rows of every slot with the weights of that slot.

    multiply            rows @ W^T or rows @ W; also of FP8 (e4m3) with a scale per row
    weight_gradients    d_out^T @ rows for every slot

The rows of slot l are `offsets[l]:offsets[l + 1]`; only the device knows these numbers. A fixed
number of programs shares the tiles of all slots.

A row of the result depends only on that row and its weights, not on its position: every sum over
columns runs from the first to the last column, in steps of BLOCK_K.

Shapes: A row capacity, L slots of this rank; tiles have BLOCK_M rows and BLOCK_N columns.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.tiles import (
    Matrix,
    Part,
    SlotTensors,
    find_tile,
    finish,
    first_tile,
    next_tile,
    slot_ptr,
    store_to_slot,
)


class Tiling(NamedTuple):
    """Compile-time sizes of a product. EVEN_*: tiles cover that dimension exactly.

    GROUP_M: rows of tiles of a band, see `in_bands`.
    HALF: slots of few rows use tiles of half the height, if most slots are such. The last rows of
    large slots do not: a program that runs ahead of its neighbours misses the cache they share.
    """

    EVEN_M: bool
    EVEN_N: bool
    EVEN_K: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    HALF: bool


@triton.jit
def in_bands(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Return row and column of a tile among num_m x num_n tiles.

    Tiles are numbered column by column within bands of GROUP_M rows, so that programs which run at
    the same time share rows and columns.
    """
    first = tile // (GROUP_M * num_n) * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    within = tile - first * num_n
    return first + within % height, within // height


@triton.jit
def load_tile(
    ptr, row, column, stride, rows, columns, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr
):
    """Load a tile of a matrix; elements out of range are 0."""
    ptr += row[:, None] * stride + column[None, :]
    if EVEN_ROWS and EVEN_COLUMNS:
        tile = tl.load(ptr)
    elif EVEN_COLUMNS:
        tile = tl.load(ptr, mask=(row < rows)[:, None], other=0.0)
    elif EVEN_ROWS:
        tile = tl.load(ptr, mask=(column < columns)[None, :], other=0.0)
    else:
        tile = tl.load(ptr, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
    return tile


def work_of_product(_grid, kernel, args):
    """Return name and operations of a product for profilers, counting the full row capacity."""
    rows, other = args["rows"], args["out"] if "out" in args else args["d_out"]
    count, bits = rows.ptr.shape[0], 8 * rows.ptr.element_size()
    inner, width = rows.columns, other.columns
    if "out" not in args:
        inner, width = width, inner
    name = f"{kernel.name}_{count}x{inner}x{width}"
    return {"name": name, f"flops{bits}": 2 * count * inner * width}


@triton.jit(do_not_specialize=["num_homes", "sharing"], launch_metadata=work_of_product)
def multiply(
    rows: Matrix,
    weights: SlotTensors,
    biases: SlotTensors,
    row_scales: Matrix,
    weight_scales: SlotTensors,
    scale_ptr,
    tiles_ptr,
    out: Matrix,
    num_homes,
    sharing,
    TRANSPOSED: tl.constexpr,
    TILING: tl.constexpr,
):
    """[A, K] -> [A, N]: (rows @ W^T + bias) * scale, with W [N, K] per slot.

    TRANSPOSED: rows @ W, with W [K, N].   tiles_ptr: see `lay_tiles`.
    row_scales, weight_scales: of FP8 numbers, [A, 1] and [N, 1] per slot; None for other dtypes.
    sharing: programs of all launches that share the tiles of this product.

    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> homes = [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]
    >>> replicas = [[[1.0, 1.0], [2.0, 0.0]]]
    >>> tiles = [3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 2, 1]
    >>> example(multiply, 2, rows=rows, weights=(homes, replicas), tiles=tiles, num_homes=2,
    ...         biases=([[0.0, 0.0], [10.0, 20.0]], [[100.0, 0.0]]), sharing=2,
    ...         scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0], out=empty(6, 2, dtype=torch.float32))
    out = [[1.0, 2.0], [14.0, 23.0], [55.5, 5.0], [230.0, 28.0], [119.0, 18.0], [_, _]]
    """
    num_m, num_n = tl.load(tiles_ptr), tl.cdiv(out.columns, TILING.BLOCK_N)
    halves, total = TILING.HALF and tl.load(tiles_ptr + 1) != 0, num_m * num_n
    tile, progress = first_tile(tiles_ptr, total, sharing)
    next_part, next_column = find_tile(tiles_ptr, tile, num_m, num_n)
    while tile < total:
        part, column = next_part, next_column
        # Look up the next tile before this product: its entries are three loads away.
        tile, progress = next_tile(tiles_ptr, tile, progress, total, sharing)
        next_part, next_column = find_tile(tiles_ptr, tile, num_m, num_n)
        multiply_part(
            rows, weights, biases, row_scales, weight_scales, scale_ptr, out, part, column, halves,
            num_homes, TRANSPOSED, TILING
        )  # fmt: skip
    finish(tiles_ptr, progress, sharing)


@triton.jit
def multiply_part(
    rows, weights, biases, row_scales, weight_scales, scale_ptr, out, part, column, halves,
    num_homes, TRANSPOSED: tl.constexpr, TILING: tl.constexpr
):  # fmt: skip
    """Compute one tile, of full or half height."""
    weight_ptr = slot_ptr(weights, part.slot, num_homes)
    bias_ptr = None if biases.homes_ptr is None else slot_ptr(biases, part.slot, num_homes)
    scale_N_ptr = None if row_scales.ptr is None else slot_ptr(weight_scales, part.slot, num_homes)
    low = halves and part.count <= TILING.BLOCK_M // 2
    HEIGHTS: tl.constexpr = 1 + TILING.HALF
    for LOW in tl.static_range(HEIGHTS):
        if low == LOW:
            multiply_tile(
                rows, weight_ptr, weights.stride_row, bias_ptr, row_scales, scale_N_ptr, scale_ptr,
                out, part, column * TILING.BLOCK_N, TRANSPOSED, TILING, TILING.BLOCK_M // (1 + LOW)
            )  # fmt: skip


@triton.jit
def multiply_tile(
    rows, weight_ptr, stride_weight, bias_ptr, row_scales, scale_N_ptr, scale_ptr, out, part,
    column, TRANSPOSED: tl.constexpr, TILING: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Compute BLOCK_M rows and BLOCK_N columns of `multiply`, from `column` on."""
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    BLOCK_K: tl.constexpr = TILING.BLOCK_K
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    left = out.columns - column
    # Behind the last row of the slot, read that row again: its product is not stored.
    row_ptr = rows.ptr + part.begin * rows.stride
    last_M = tl.minimum(offs_m, part.count - 1)
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, rows.columns, BLOCK_K):
        deep = rows.columns - k
        row_MK = load_tile(
            row_ptr + k, last_M, offs_k, rows.stride, BLOCK_M, deep, True, TILING.EVEN_K
        )
        if TRANSPOSED:
            ptr = weight_ptr + k * stride_weight + column
            weight_KN = load_tile(
                ptr, offs_k, offs_n, stride_weight, deep, left, TILING.EVEN_K, TILING.EVEN_N
            )
        else:
            ptr = weight_ptr + column.to(tl.int64) * stride_weight + k
            weight_NK = load_tile(
                ptr, offs_n, offs_k, stride_weight, left, deep, TILING.EVEN_N, TILING.EVEN_K
            )
            weight_KN = weight_NK.T
        sum_MN = tl.dot(row_MK, weight_KN, sum_MN, input_precision="ieee")
    if row_scales.ptr is not None:
        scale_M = tl.load(row_scales.ptr + (part.begin + last_M) * row_scales.stride)
        scale_N = tl.load(scale_N_ptr + column + offs_n, mask=offs_n < left, other=0.0)
        sum_MN = sum_MN * scale_M[:, None] * scale_N[None, :]
    store_products(out, sum_MN, bias_ptr, scale_ptr, part, column, BLOCK_M, BLOCK_N)


@triton.jit
def store_products(
    out, sum_MN, bias_ptr, scale_ptr, part, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add the bias, round, multiply every row by its scale, and store the rows that exist."""
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mask_n = offs_n < out.columns - column
    if bias_ptr is not None:
        bias_N = tl.load(bias_ptr + column + offs_n, mask=mask_n, other=0.0)
        sum_MN += bias_N.to(tl.float32)[None, :]
    out_MN = sum_MN.to(out.ptr.dtype.element_ty)
    if scale_ptr is not None:
        scale_M = tl.load(scale_ptr + part.begin + offs_m, mask=offs_m < part.count, other=0.0)
        scale_M = scale_M.to(out.ptr.dtype.element_ty).to(tl.float32)
        scaled_MN = out_MN.to(tl.float32) * scale_M[:, None]
        out_MN = scaled_MN.to(out.ptr.dtype.element_ty)
    ptr_MN = out.ptr + (part.begin + offs_m)[:, None] * out.stride + (column + offs_n)[None, :]
    tl.store(ptr_MN, out_MN, mask=(offs_m < part.count)[:, None] & mask_n[None, :])


@triton.jit(
    do_not_specialize=["num_homes", "num_slots", "sharing"], launch_metadata=work_of_product
)
def weight_gradients(
    d_out: Matrix,
    rows: Matrix,
    scale_ptr,
    offsets_ptr,
    tiles_ptr,
    into: SlotTensors,
    biases: SlotTensors,
    num_homes,
    num_slots,
    sharing,
    TILING: tl.constexpr,
):
    """[A, N], [A, K] -> [N, K] per slot: d_out^T @ rows; zeros for a slot without rows.

    The first column of tiles also sums d_out * scale into the biases [N]. Gradients of home experts
    that have replicas go to `into.sums_ptr` unrounded, if it is not None. Only the counters of
    `tiles_ptr` are used.

    >>> d_out = [[1.0, 2.0], [0.0, 3.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [9.0, 9.0]]
    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> example(weight_gradients, 2, d_out=d_out, rows=rows, scale=[1.0, 1.0, 0.5, 2.0, 1.0, 1.0],
    ...         offsets=[0, 1, 2, 5], tiles=[0] * 6, num_homes=2, num_slots=3, sharing=2,
    ...         into=(empty(2, 2, 2, dtype=torch.bfloat16), empty(1, 2, 2, dtype=torch.float32),
    ...               empty(2, 2, 2, dtype=torch.float32), [[0, 0], [0, 1]]),
    ...         biases=(empty(2, 2, dtype=torch.bfloat16), empty(1, 2, dtype=torch.float32)))
    into.homes = [[[1.0, 2.0], [2.0, 4.0]], [[_, _], [_, _]]]
    into.replicas = [[[12.0, 14.0], [16.0, 18.0]]]
    into.sums = [[[_, _], [_, _]], [[0.0, 0.0], [9.0, 12.0]]]
    biases.homes = [[1.0, 2.0], [0.0, 3.0]]
    biases.replicas = [[2.5, 3.0]]
    """
    num_m, num_n = tl.cdiv(d_out.columns, TILING.BLOCK_M), tl.cdiv(rows.columns, TILING.BLOCK_N)
    of_slot = num_m * num_n
    total = num_slots * of_slot
    number, progress = first_tile(tiles_ptr, total, sharing)
    next_part = rows_of_slot(offsets_ptr, number // of_slot, num_slots)
    while number < total:
        part, tile = next_part, number % of_slot
        number, progress = next_tile(tiles_ptr, number, progress, total, sharing)
        next_part = rows_of_slot(offsets_ptr, number // of_slot, num_slots)
        row, column = in_bands(tile, num_m, num_n, TILING.GROUP_M)
        row, first = row * TILING.BLOCK_M, column * TILING.BLOCK_N
        gradient_tile(d_out, rows, into, part, row, first, num_homes, TILING)
        if biases.homes_ptr is not None and column == 0:
            bias_tile(d_out, scale_ptr, biases, part, row, num_homes, TILING)
    finish(tiles_ptr, progress, sharing)


@triton.jit
def rows_of_slot(offsets_ptr, slot, num_slots):
    """Return the rows of a slot; none behind the last slot."""
    begin = tl.load(offsets_ptr + slot, mask=slot < num_slots, other=0)
    end = tl.load(offsets_ptr + slot + 1, mask=slot < num_slots, other=0)
    return Part(slot, begin.to(tl.int64), end - begin)


@triton.jit
def gradient_tile(d_out, rows, into, part, row, column, num_homes, TILING: tl.constexpr):
    """Compute one tile of `weight_gradients`, from `row` and `column` on."""
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    BLOCK_K: tl.constexpr = TILING.BLOCK_K
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    high, wide = d_out.columns - row, rows.columns - column
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, part.count, BLOCK_K):
        first, left = part.begin + k, part.count - k
        ptr = d_out.ptr + first * d_out.stride + row
        out_KM = load_tile(ptr, offs_k, offs_m, d_out.stride, left, high, False, TILING.EVEN_M)
        ptr = rows.ptr + first * rows.stride + column
        row_KN = load_tile(ptr, offs_k, offs_n, rows.stride, left, wide, False, TILING.EVEN_N)
        sum_MN = tl.dot(out_KM.T, row_KN, sum_MN, input_precision="ieee")
    offset_MN = (row + offs_m)[:, None] * into.stride_row + (column + offs_n)[None, :]
    mask = (offs_m < high)[:, None] & (offs_n < wide)[None, :]
    store_to_slot(into, part.slot, num_homes, offset_MN, sum_MN, mask)


@triton.jit
def bias_tile(d_out, scale_ptr, biases, part, row, num_homes, TILING: tl.constexpr):
    """Sum d_out * scale over the rows of a slot, for BLOCK_M elements of the bias."""
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_K: tl.constexpr = TILING.BLOCK_K
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    columns = d_out.columns - row
    sum_KM = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    for k in range(0, part.count, BLOCK_K):
        first, left = part.begin + k, part.count - k
        ptr = d_out.ptr + row + first * d_out.stride
        row_KM = load_tile(ptr, offs_k, offs_m, d_out.stride, left, columns, False, TILING.EVEN_M)
        row_KM = row_KM.to(tl.float32)
        if scale_ptr is not None:
            scale_K = tl.load(scale_ptr + first + offs_k, mask=offs_k < left, other=0.0)
            row_KM *= scale_K[:, None]
        sum_KM += row_KM
    store_to_slot(biases, part.slot, num_homes, row + offs_m, tl.sum(sum_KM, 0), offs_m < columns)
