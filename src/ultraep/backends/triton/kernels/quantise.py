"""Numbers to e4m3 and back on the GPU: twins of `formats`, which says what is what.

    quantise          groups of numbers, one scale for each: weights, and rows before they travel
    swiglu_quantise   what stands between two products of quantised rows
    dequantise        back

Codes are made and read as integers, alike on every GPU: no instruction for e4m3 is needed here.

Shapes: tiles of M rows and N columns.
"""

import triton
import triton.language as tl

CARRY = tl.constexpr(0x1FFFFF)
LARGEST = tl.constexpr(8)
LEAST = tl.constexpr(127 - 40)
ONE = tl.constexpr(127)
NORMAL = tl.constexpr(2.0**-6)  # the smallest number that is not stored as a multiple of 2**-9
SHIFT = tl.constexpr(16384.0)  # numbers of float32 from here on are multiples of 2**-9
SHIFT_BITS = tl.constexpr(0x46800000)
NAN, HALF_NAN = tl.constexpr(0x7F), tl.constexpr(0x7E00)


@triton.jit
def encode(values):
    """The nearest e4m3 codes of numbers up to 448; of two that are as near, the even one."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    near = size + 0x7FFFF + ((size >> 20) & 1)
    normal = tl.minimum((near >> 20) - ((ONE - 7) << 3), NAN)
    small = (tl.abs(values) + SHIFT).to(tl.int32, bitcast=True) - SHIFT_BITS
    code = tl.where(tl.abs(values) < NORMAL, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(codes):
    """The numbers of e4m3 codes, exact, as float16."""
    codes = codes.to(tl.int16)
    size = codes & NAN
    bits = tl.where(size == NAN, HALF_NAN, size << 7) | ((codes & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def scale_of(largest):
    """Biased exponent of the least power of two that scales such numbers to 448 or less."""
    found = ((largest.to(tl.int32, bitcast=True) + CARRY) >> 23) - LARGEST
    return tl.where(largest == 0.0, ONE, tl.maximum(found, LEAST))


@triton.jit
def power_of(exponent):
    """Two to the power of a biased exponent."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_scale(at, exponent, mask):
    """A scale as a number, or as its exponent."""
    if at.dtype.element_ty == tl.uint8:
        tl.store(at, exponent.to(tl.uint8), mask=mask)
    else:
        tl.store(at, power_of(exponent), mask=mask)


@triton.jit
def quantise(
    values,
    data,
    scales,
    height,
    width,
    values_outer,
    values_stride,
    data_outer,
    data_stride,
    scales_outer,
    scales_stride,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Program (i, j, o): M rows of group j of columns of matrix o; WHOLE: they share one scale.

    GROUP: columns that share a scale; N: the power of two that holds them.

    >>> values = [[1.0, 448.0, 0.25], [0.0, 0.0, -449.0], [3.0, 7.0, 1.0]]
    >>> example(quantise, (2, 2, 1), values=values, data=room(3, 3, dtype=torch.uint8),
    ...         scales=room(3, 2, dtype=torch.float32), height=3, width=3, values_outer=9,
    ...         values_stride=3, data_outer=9, data_stride=3, scales_outer=6, scales_stride=2,
    ...         GROUP=2, WHOLE=False, M=2, N=2)
    data = [[56, 126, 120], [0, 0, 246], [116, 126, 120]]
    scales = [[1.0, 0.0009765625], [1.0, 2.0], [0.015625, 0.00390625]]
    """
    outer = tl.program_id(2).to(tl.int64)
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    group, column_N = tl.program_id(1), tl.arange(0, N)
    at_N = group * GROUP + column_N
    there = (row_M < height)[:, None] & ((column_N < GROUP) & (at_N < width))[None, :]
    far_M = row_M.to(tl.int64)
    at = values + outer * values_outer + (far_M * values_stride)[:, None] + at_N[None, :]
    values_MN = tl.load(at, mask=there, other=0.0).to(tl.float32)
    largest_M = tl.max(tl.abs(values_MN), 1)
    at_scale_M, stored_M = far_M, row_M < height
    if WHOLE:
        largest_M = tl.zeros_like(largest_M) + tl.max(largest_M, 0)
        at_scale_M, stored_M = tl.zeros_like(far_M) + tl.program_id(0), tl.arange(0, M) == 0
    exponent_M = scale_of(largest_M)
    into = scales + outer * scales_outer + group
    store_scale(into + at_scale_M * scales_stride, exponent_M, stored_M)
    codes = encode(values_MN * power_of(-exponent_M + 2 * ONE)[:, None])
    at = data + outer * data_outer + (far_M * data_stride)[:, None] + at_N[None, :]
    tl.store(at, codes, mask=there)


@triton.jit(do_not_specialize=["num_slots"])
def swiglu_quantise(
    up,
    offsets,
    data,
    scales,
    num_slots,
    width,
    up_stride,
    data_stride,
    scales_stride,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """[A, 2 * width] -> [A, width]: silu of the first half, times the second; then quantised.

    Rows behind the last one, which only the device knows, are neither read nor written.

    >>> up = [[0.0, 32.0, 5.0, 14.0], [64.0, 32.0, 1.0, 3.5], [1.0, 1.0, 1.0, 1.0]]
    >>> example(swiglu_quantise, 1, up=up, offsets=[0, 1, 1, 2], data=room(3, 2, dtype=torch.uint8),
    ...         scales=room(3, 1, dtype=torch.float32), num_slots=3, width=2, up_stride=4,
    ...         data_stride=2, scales_stride=1, GROUP=2, M=2, N=2)
    data = [[0, 126], [120, 126], [179, 179]]
    scales = [[1.0], [0.25], [_]]
    """
    rows = tl.load(offsets + num_slots)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    for first in range(tl.program_id(0).to(tl.int64) * M, rows, tl.num_programs(0) * M):
        far_M = first + row_M
        there_M = far_M < rows
        at_up = up + (far_M * up_stride)[:, None]
        for group in range(tl.cdiv(width, GROUP)):
            at_N = group * GROUP + column_N
            there = there_M[:, None] & ((column_N < GROUP) & (at_N < width))[None, :]
            gate = tl.load(at_up + at_N[None, :], mask=there, other=0.0).to(tl.float32)
            value = tl.load(at_up + width + at_N[None, :], mask=there, other=0.0).to(tl.float32)
            hidden = (gate * tl.sigmoid(gate) * value).to(up.dtype.element_ty).to(tl.float32)
            exponent_M = scale_of(tl.max(tl.abs(hidden), 1))
            store_scale(scales + far_M * scales_stride + group, exponent_M, there_M)
            codes = encode(hidden * power_of(-exponent_M + 2 * ONE)[:, None])
            tl.store(data + (far_M * data_stride)[:, None] + at_N[None, :], codes, mask=there)


@triton.jit
def dequantise(
    data,
    scales,
    end,
    out,
    height,
    width,
    data_outer,
    data_stride,
    scales_outer,
    scales_stride,
    out_outer,
    out_stride,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Program (i, j, o): M x N codes of matrix o, of which HIGH x WIDE share a scale.

    end: a number of rows that only the device knows, fewer than `height`; None: there is none.

    >>> example(dequantise, (1, 2, 1), data=bytes([56, 126, 120, 0, 1, 246]),
    ...         scales=[[1.0, 0.25], [2.0, 4.0]], end=[2], out=room(3, 3, dtype=torch.float32),
    ...         height=3, width=3, data_outer=6, data_stride=3, scales_outer=4, scales_stride=2,
    ...         out_outer=9, out_stride=3, HIGH=1, WIDE=2, M=4, N=2)
    out = [[1.0, 448.0, 64.0], [0.0, 0.00390625, -896.0], [_, _, _]]
    """
    outer = tl.program_id(2).to(tl.int64)
    row_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    rows = height
    if end is not None:
        rows = tl.minimum(tl.load(end), height)
    there = (row_M < rows)[:, None] & (column_N < width)[None, :]
    at = data + outer * data_outer + (row_M * data_stride)[:, None] + column_N[None, :]
    numbers = decode(tl.load(at, mask=there, other=0)).to(tl.float32)
    G: tl.constexpr = N // WIDE if WIDE < N else 1
    group_G = tl.program_id(1) * N // WIDE + tl.arange(0, G)
    at = scales + outer * scales_outer + (row_M // HIGH * scales_stride)[:, None] + group_G[None, :]
    known = (row_M < rows)[:, None] & (group_G * WIDE < width)[None, :]
    scale = tl.load(at, mask=known, other=0)
    if scales.dtype.element_ty == tl.uint8:
        scale = power_of(scale.to(tl.int32))
    numbers = tl.reshape(tl.reshape(numbers, (M, G, N // G)) * scale[:, :, None], (M, N))
    at = out + outer * out_outer + (row_M * out_stride)[:, None] + column_N[None, :]
    tl.store(at, numbers.to(out.dtype.element_ty), mask=there)
