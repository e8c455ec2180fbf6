"""FP8 (e4m3) quantisation on the GPU: twins of `ops.fp8`, which defines codes and scales.

    quantise          rows of weights, or rows before they are sent
    swiglu_quantise   the activation between two products
    dequantise        rows and weights that backward multiplies

Codes are encoded with integer operations, so results do not depend on the GPU.

Shapes: tiles of BLOCK_M rows and BLOCK_N columns, which cover whole rows.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.rowwise import row_ptrs
from ultraep.backends.triton.kernels.tiles import Matrix

CARRY = tl.constexpr(0x1FFFFF)
LARGEST = tl.constexpr(8)
LEAST = tl.constexpr(127 - 40)
ONE = tl.constexpr(127)
NORMAL = tl.constexpr(2.0**-6)  # the smallest normal e4m3 number; below, multiples of 2**-9
SHIFT = tl.constexpr(16384.0)  # float32 numbers from here on are multiples of 2**-9
SHIFT_BITS = tl.constexpr(0x46800000)
NAN = tl.constexpr(0x7F)


@triton.jit
def encode(values):
    """Round numbers of magnitude up to 448 to e4m3 codes, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    near = size + 0x7FFFF + ((size >> 20) & 1)
    normal = tl.minimum((near >> 20) - ((ONE - 7) << 3), NAN)
    small = (tl.abs(values) + SHIFT).to(tl.int32, bitcast=True) - SHIFT_BITS
    code = tl.where(tl.abs(values) < NORMAL, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(code):
    """Return the float32 numbers of e4m3 codes."""
    size = (code & 0x7F).to(tl.int32)
    normal = ((size << 20) + ((ONE - 7) << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # multiples of 2**-9
    number = tl.where(size == NAN, float("nan"), number)
    return tl.where(code > 0x7F, -number, number)


@triton.jit
def power_of(exponent):
    """Return two to the power of a biased exponent."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_quantised(
    values_MN, codes, scales, first, mask_m, mask, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store the codes and scales of BLOCK_M rows, from row `first` on."""
    largest_M = tl.max(tl.abs(values_MN), 1)
    exponent_M = ((largest_M.to(tl.int32, bitcast=True) + CARRY) >> 23) - LARGEST
    exponent_M = tl.where(largest_M == 0.0, ONE, tl.maximum(exponent_M, LEAST))
    codes_MN = encode(values_MN * power_of(-exponent_M + 2 * ONE)[:, None])
    tl.store(row_ptrs(codes, first, BLOCK_M) + tl.arange(0, BLOCK_N)[None, :], codes_MN, mask=mask)
    tl.store(row_ptrs(scales, first, BLOCK_M), power_of(exponent_M)[:, None], mask=mask_m[:, None])


@triton.jit
def quantise(
    values: Matrix,
    codes: Matrix,
    scales: Matrix,
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i: quantise BLOCK_M rows to bytes, with one scale per row.

    >>> values = [[1.0, 448.0, 0.25], [0.0, 0.0, -449.0], [3.0, 7.0, 1.0], [0.0, 0.0, 0.0]]
    >>> example(quantise, 2, values=values, codes=empty(4, 3, dtype=torch.uint8),
    ...         scales=empty(4, 1, dtype=torch.float32), num_rows=4, BLOCK_M=2, BLOCK_N=4)
    codes = [[56, 126, 40], [0, 0, 246], [116, 126, 104], [0, 0, 0]]
    scales = [[1.0], [2.0], [0.015625], [1.0]]
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    mask_m, column = first + tl.arange(0, BLOCK_M) < num_rows, tl.arange(0, BLOCK_N)[None, :]
    mask = mask_m[:, None] & (column < codes.columns)
    values_MN = tl.load(row_ptrs(values, first, BLOCK_M) + column, mask=mask, other=0.0)
    store_quantised(
        values_MN.to(tl.float32), codes, scales, first, mask_m, mask, BLOCK_M, BLOCK_N
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def swiglu_quantise(
    up: Matrix,
    offsets_ptr,
    codes: Matrix,
    scales: Matrix,
    num_slots,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A, 2F] -> [A, F] bytes: silu of the first half, times the second half, quantised.

    Rows behind `offsets[-1]` are neither read nor written.
    """
    rows, width = tl.load(offsets_ptr + num_slots), codes.columns
    offs_m, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)[None, :]
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        mask_m = first + offs_m < rows
        mask, up_ptr = mask_m[:, None] & (column < width), row_ptrs(up, first, BLOCK_M)
        gate = tl.load(up_ptr + column, mask=mask, other=0.0)
        value = tl.load(up_ptr + width + column, mask=mask, other=0.0).to(tl.float32)
        wide = gate.to(tl.float32)
        hidden_MN = (wide * tl.sigmoid(wide) * value).to(gate.dtype).to(tl.float32)
        store_quantised(hidden_MN, codes, scales, first, mask_m, mask, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["num_rows"])
def dequantise(
    codes: Matrix,
    scales: Matrix,
    used_ptr,
    out: Matrix,
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i: write the numbers of BLOCK_M rows. Rows behind `used` are not written.

    used_ptr: number of rows; None: `num_rows`.

    >>> example(dequantise, 1, codes=[[56, 126, 40], [1, 0, 246]], scales=[[1.0], [2.0]],
    ...         used_ptr=None, out=empty(2, 3, dtype=torch.float32), num_rows=2, BLOCK_M=2,
    ...         BLOCK_N=4)
    out = [[1.0, 448.0, 0.25], [0.00390625, 0.0, -448.0]]
    """
    if used_ptr is not None:
        num_rows = tl.load(used_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    mask_m, column = first + tl.arange(0, BLOCK_M) < num_rows, tl.arange(0, BLOCK_N)[None, :]
    mask = mask_m[:, None] & (column < codes.columns)
    code_MN = tl.load(row_ptrs(codes, first, BLOCK_M) + column, mask=mask, other=0)
    scale_M1 = tl.load(row_ptrs(scales, first, BLOCK_M), mask=mask_m[:, None], other=0.0)
    value_MN = (decode(code_MN) * scale_M1).to(out.ptr.dtype.element_ty)
    tl.store(row_ptrs(out, first, BLOCK_M) + column, value_MN, mask=mask)
