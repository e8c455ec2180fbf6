"""FP8 (e4m3) quantisation on the GPU: twins of `ops.formats`, which defines the formats.

    quantise          weights, or rows before they are sent
    swiglu_quantise   the activation between two products of quantised rows
    dequantise        back to floating point

Codes are encoded and decoded with integer operations, so results do not depend on the GPU.

Shapes: tiles of BLOCK_M rows and BLOCK_N columns, or of G groups of BLOCK_N columns.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.tiles import Matrix

CARRY = tl.constexpr(0x1FFFFF)
LARGEST = tl.constexpr(8)
LEAST = tl.constexpr(127 - 40)
ONE = tl.constexpr(127)
REACH = tl.constexpr(4)
NORMAL = tl.constexpr(2.0**-6)  # the smallest normal e4m3 number; below, multiples of 2**-9
SHIFT = tl.constexpr(16384.0)  # float32 numbers from here on are multiples of 2**-9
SHIFT_BITS = tl.constexpr(0x46800000)
NAN, HALF_NAN = tl.constexpr(0x7F), tl.constexpr(0x7E00)


class MatrixStack(NamedTuple):
    """Matrices of equal shape, `stride_outer` apart."""

    ptr: Any
    stride_outer: Any
    stride: Any


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
def decode(codes):
    """Return e4m3 codes as float16, exactly."""
    codes = codes.to(tl.int16)
    size = codes & NAN
    bits = tl.where(size == NAN, HALF_NAN, size << 7) | ((codes & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def scale_of(largest):
    """Return the biased exponent of the least power of two that suffices as a scale."""
    exponent = ((largest.to(tl.int32, bitcast=True) + CARRY) >> 23) - LARGEST
    return tl.where(largest == 0.0, ONE, tl.maximum(exponent, LEAST))


@triton.jit
def power_of(exponent):
    """Return two to the power of a biased exponent."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_scale(ptr, exponent, mask):
    """Store a scale as float32, or as its biased exponent if `ptr` is uint8."""
    if ptr.dtype.element_ty == tl.uint8:
        tl.store(ptr, exponent.to(tl.uint8), mask=mask)
    else:
        tl.store(ptr, power_of(exponent), mask=mask)


@triton.jit
def highest(exponent_MG, largest_MG):
    """[M, 1] the highest exponent among the nonzero groups of a row; 0 if all are zero."""
    return tl.max(tl.where(largest_MG != 0.0, exponent_MG, 0), 1)[:, None]


@triton.jit
def levelled(exponent_MG, largest_MG, top_M1):
    """Raise exponents to the row's highest where it is within REACH or the group is zero."""
    near_MG = (largest_MG == 0.0) | (top_M1 - exponent_MG <= REACH)
    return tl.where(near_MG & (top_M1 > 0), top_M1, exponent_MG)


@triton.jit
def quantise(
    values: MatrixStack,
    data: MatrixStack,
    scales: MatrixStack,
    promised_ptr,
    kept_ptr,
    height,
    width,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, o): quantise tile i of matrix o: BLOCK_M rows and G groups of columns.

    GROUP: columns that share a scale; BLOCK_N: the next power of two.
    WHOLE: the rows of a tile share the scale, too.   LEVEL: see `levelled`; the tile then holds
    whole rows.   promised_ptr, kept_ptr: nothing is written while both hold the same number, not 0.

    >>> values = [[1.0, 448.0, 0.25], [0.0, 0.0, -449.0], [3.0, 7.0, 1.0]]
    >>> example(quantise, (2, 1), values=[values], data=empty(1, 3, 3, dtype=torch.uint8),
    ...         scales=empty(1, 3, 2, dtype=torch.float32), promised_ptr=None, kept_ptr=None,
    ...         height=3, width=3, GROUP=2, WHOLE=False, LEVEL=True, BLOCK_M=2, BLOCK_N=2)
    data = [[[56, 126, 120], [0, 0, 246], [116, 126, 104]]]
    scales = [[[1.0, 0.0009765625], [2.0, 2.0], [0.015625, 0.015625]]]
    """
    wanted = True
    if promised_ptr is not None:
        promised = tl.load(promised_ptr)
        wanted = (promised == 0) | (promised != tl.load(kept_ptr))
    if wanted:
        quantise_tile(values, data, scales, height, width, GROUP, WHOLE, LEVEL, BLOCK_M, G, BLOCK_N)


@triton.jit
def quantise_tile(
    values, data, scales, height, width,
    GROUP: tl.constexpr, WHOLE: tl.constexpr, LEVEL: tl.constexpr,
    BLOCK_M: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Quantise one tile; see `quantise`."""
    outer, num_n = tl.program_id(1).to(tl.int64), tl.cdiv(tl.cdiv(width, GROUP), G)
    high = tl.program_id(0) // num_n
    offs_m, offs_n = high * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    group_G = tl.program_id(0) % num_n * G + tl.arange(0, G)
    column_GN = group_G[:, None] * GROUP + offs_n[None, :]
    mask_gn = (offs_n < GROUP)[None, :] & (column_GN < width)
    mask = (offs_m < height)[:, None, None] & mask_gn[None]
    far_M = offs_m.to(tl.int64)
    row_M = outer * values.stride_outer + far_M * values.stride
    ptr = values.ptr + row_M[:, None, None] + column_GN[None]
    values_MGN = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    largest_MG = tl.max(tl.abs(values_MGN), 2)
    scale_row_M, stored_M = far_M, offs_m < height
    if WHOLE:
        largest_MG = tl.zeros_like(largest_MG) + tl.max(largest_MG, 0)[None, :]
        scale_row_M, stored_M = tl.zeros_like(far_M) + high, tl.arange(0, BLOCK_M) == 0
    exponent_MG = scale_of(largest_MG)
    if LEVEL:
        exponent_MG = levelled(exponent_MG, largest_MG, highest(exponent_MG, largest_MG))
    row_M = outer * scales.stride_outer + scale_row_M * scales.stride
    mask_mg = stored_M[:, None] & (group_G * GROUP < width)[None, :]
    store_scale(scales.ptr + row_M[:, None] + group_G[None, :], exponent_MG, mask_mg)
    codes = encode(values_MGN * power_of(-exponent_MG + 2 * ONE)[:, :, None])
    row_M = outer * data.stride_outer + far_M * data.stride
    tl.store(data.ptr + row_M[:, None, None] + column_GN[None], codes, mask=mask)


@triton.jit
def swiglu_of(up_ptr, group_G, width, mask_m, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return silu of the first half times the second half, and the largest of every group.

    Also returns the columns of the groups, and the mask of elements that exist.
    """
    column_GN = group_G[:, None] * GROUP + tl.arange(0, BLOCK_N)[None, :]
    mask_gn = (tl.arange(0, BLOCK_N) < GROUP)[None, :] & (column_GN < width)
    mask = mask_m[:, None, None] & mask_gn[None]
    gate = tl.load(up_ptr + column_GN[None], mask=mask, other=0.0)
    value = tl.load(up_ptr + width + column_GN[None], mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    hidden_MGN = (wide * tl.sigmoid(wide) * value).to(gate.dtype).to(tl.float32)
    return hidden_MGN, tl.max(tl.abs(hidden_MGN), 2), column_GN, mask


@triton.jit(do_not_specialize=["num_slots"])
def swiglu_quantise(
    up: Matrix,
    offsets_ptr,
    data: Matrix,
    scales: Matrix,
    num_slots,
    GROUP: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A, 2F] -> [A, F] e4m3 codes: silu of the first half, times the second half, quantised.

    Rows behind `offsets[-1]` are neither read nor written.   LEVEL: see `levelled`; a first pass
    over the row finds its highest exponent.
    """
    rows, width = tl.load(offsets_ptr + num_slots), data.columns
    groups = tl.cdiv(width, GROUP)
    offs_m, group_G = tl.arange(0, BLOCK_M), tl.arange(0, G)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        far_M = first + offs_m
        mask_m = far_M < rows
        up_ptr = up.ptr + (far_M * up.stride)[:, None, None]
        top_M1 = tl.zeros((BLOCK_M, 1), tl.int32)
        for begin in range(0, groups if LEVEL else 0, G):
            _, largest_MG, _, _ = swiglu_of(up_ptr, begin + group_G, width, mask_m, GROUP, BLOCK_N)
            top_M1 = tl.maximum(top_M1, highest(scale_of(largest_MG), largest_MG))
        for begin in range(0, groups, G):
            hidden_MGN, largest_MG, column_GN, mask = swiglu_of(
                up_ptr, begin + group_G, width, mask_m, GROUP, BLOCK_N
            )
            exponent_MG = scale_of(largest_MG)
            if LEVEL:
                exponent_MG = levelled(exponent_MG, largest_MG, top_M1)
            scale_ptr = scales.ptr + (far_M * scales.stride)[:, None] + (begin + group_G)[None, :]
            mask_mg = mask_m[:, None] & (begin + group_G < groups)[None, :]
            store_scale(scale_ptr, exponent_MG, mask_mg)
            codes = encode(hidden_MGN * power_of(-exponent_MG + 2 * ONE)[:, :, None])
            data_ptr = data.ptr + (far_M * data.stride)[:, None, None] + column_GN[None]
            tl.store(data_ptr, codes, mask=mask)


@triton.jit
def dequantise(
    data: MatrixStack,
    scales: MatrixStack,
    end_ptr,
    out: MatrixStack,
    height,
    width,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, o): dequantise tile i of matrix o; HIGH x WIDE codes share a scale.

    end_ptr: number of rows to write, at most `height`; None: all.
    """
    outer, num_n = tl.program_id(1).to(tl.int64), tl.cdiv(width, BLOCK_N)
    offs_m = (tl.program_id(0) // num_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % num_n * BLOCK_N
    offs_n = column + tl.arange(0, BLOCK_N)
    rows = height
    if end_ptr is not None:
        rows = tl.minimum(tl.load(end_ptr), height)
    mask = (offs_m < rows)[:, None] & (offs_n < width)[None, :]
    row_M = outer * data.stride_outer + offs_m * data.stride
    code_MN = tl.load(data.ptr + row_M[:, None] + offs_n[None, :], mask=mask, other=0)
    value_MN = decode(code_MN).to(tl.float32)
    G: tl.constexpr = BLOCK_N // WIDE if WIDE < BLOCK_N else 1
    group_G = column // WIDE + tl.arange(0, G)
    row_M = outer * scales.stride_outer + offs_m // HIGH * scales.stride
    mask_mg = (offs_m < rows)[:, None] & (group_G * WIDE < width)[None, :]
    scale_MG = tl.load(scales.ptr + row_M[:, None] + group_G[None, :], mask=mask_mg, other=0)
    if scales.ptr.dtype.element_ty == tl.uint8:
        scale_MG = power_of(scale_MG.to(tl.int32))
    value_MGN = tl.reshape(value_MN, (BLOCK_M, G, BLOCK_N // G)) * scale_MG[:, :, None]
    value_MN = tl.reshape(value_MGN, (BLOCK_M, BLOCK_N))
    row_M = outer * out.stride_outer + offs_m * out.stride
    out_ptr = out.ptr + row_M[:, None] + offs_n[None, :]
    tl.store(out_ptr, value_MN.to(out.ptr.dtype.element_ty), mask=mask)
