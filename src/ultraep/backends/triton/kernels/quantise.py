"""Numbers to e4m3 and back on the GPU: twins of `formats`, which says what is what.

    quantise          groups of numbers, one scale for each: weights, and rows before they travel
    swiglu_quantise   what stands between two products of quantised rows
    dequantise        back

Codes are made and read as integers, alike on every GPU: no instruction for e4m3 is needed here.

Shapes: tiles of BLOCK_M rows, and BLOCK_N columns, or G groups of BLOCK_N columns.
"""

import triton
import triton.language as tl

CARRY = tl.constexpr(0x1FFFFF)
LARGEST = tl.constexpr(8)
LEAST = tl.constexpr(127 - 40)
ONE = tl.constexpr(127)
REACH = tl.constexpr(4)
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
def highest(exponent_MG, largest_MG):
    """[M, 1] the highest exponent of the groups of a row that are not zero; 0: there are none."""
    return tl.max(tl.where(largest_MG != 0.0, exponent_MG, 0), 1)[:, None]


@triton.jit
def levelled(exponent_MG, largest_MG, top_M1):
    """Exponents of the groups of rows: the highest, where it is in reach of one or that is zero."""
    near_MG = (largest_MG == 0.0) | (top_M1 - exponent_MG <= REACH)
    return tl.where(near_MG & (top_M1 > 0), top_M1, exponent_MG)


@triton.jit
def quantise(
    values_ptr,
    data_ptr,
    scales_ptr,
    height,
    width,
    outer_values,
    stride_values,
    outer_data,
    stride_data,
    outer_scales,
    stride_scales,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, o): tile i of matrix o, row by row of tiles; G groups of columns of BLOCK_M rows.

    GROUP: columns that share a scale; BLOCK_N: the power of two that holds them.
    WHOLE: rows share it as well.   LEVEL: so do groups, in reach; then all of a row are here.

    >>> values = [[1.0, 448.0, 0.25], [0.0, 0.0, -449.0], [3.0, 7.0, 1.0]]
    >>> example(quantise, (2, 1), values=values, data=room(3, 3, dtype=torch.uint8),
    ...         scales=room(3, 2, dtype=torch.float32), height=3, width=3, outer_values=9,
    ...         outer_data=9, outer_scales=6, GROUP=2, WHOLE=False, LEVEL=True, BLOCK_M=2,
    ...         BLOCK_N=2)
    data = [[56, 126, 120], [0, 0, 246], [116, 126, 104]]
    scales = [[1.0, 0.0009765625], [2.0, 2.0], [0.015625, 0.015625]]
    """
    outer, wide = tl.program_id(1).to(tl.int64), tl.cdiv(tl.cdiv(width, GROUP), G)
    high = tl.program_id(0) // wide
    offs_m, offs_n = high * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    group_G = tl.program_id(0) % wide * G + tl.arange(0, G)
    at_GN = group_G[:, None] * GROUP + offs_n[None, :]
    mask = (offs_m < height)[:, None, None] & ((offs_n < GROUP)[None, :] & (at_GN < width))[None]
    far_M = offs_m.to(tl.int64)
    at = values_ptr + outer * outer_values + (far_M * stride_values)[:, None, None] + at_GN[None]
    values_MGN = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    largest_MG = tl.max(tl.abs(values_MGN), 2)
    at_scale_M, stored_M = far_M, offs_m < height
    if WHOLE:
        largest_MG = tl.zeros_like(largest_MG) + tl.max(largest_MG, 0)[None, :]
        at_scale_M, stored_M = tl.zeros_like(far_M) + high, tl.arange(0, BLOCK_M) == 0
    exponent_MG = scale_of(largest_MG)
    if LEVEL:
        exponent_MG = levelled(exponent_MG, largest_MG, highest(exponent_MG, largest_MG))
    into = (
        scales_ptr + outer * outer_scales + (at_scale_M * stride_scales)[:, None] + group_G[None, :]
    )
    store_scale(into, exponent_MG, stored_M[:, None] & (group_G * GROUP < width)[None, :])
    codes = encode(values_MGN * power_of(-exponent_MG + 2 * ONE)[:, :, None])
    at = data_ptr + outer * outer_data + (far_M * stride_data)[:, None, None] + at_GN[None]
    tl.store(at, codes, mask=mask)


@triton.jit
def swiglu_of(at_up, at_GN, width, mask):
    """Silu of the first half of rows, times the second, and the largest of every group."""
    gate = tl.load(at_up + at_GN[None], mask=mask, other=0.0)
    value = tl.load(at_up + width + at_GN[None], mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    hidden_MGN = (wide * tl.sigmoid(wide) * value).to(gate.dtype).to(tl.float32)
    return hidden_MGN, tl.max(tl.abs(hidden_MGN), 2)


@triton.jit(do_not_specialize=["num_slots"])
def swiglu_quantise(
    up_ptr,
    offsets_ptr,
    data_ptr,
    scales_ptr,
    num_slots,
    width,
    stride_up,
    stride_data,
    stride_scales,
    GROUP: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A, 2 * width] -> [A, width]: silu of the first half, times the second; then quantised.

    Rows behind the last one, which only the device knows, are neither read nor written.
    LEVEL: the groups of a row share a scale, in reach; what they share is found first.

    >>> up = [[0.0, 32.0, 5.0, 14.0], [64.0, 32.0, 1.0, 3.5], [1.0, 1.0, 1.0, 1.0]]
    >>> example(swiglu_quantise, 1, up=up, offsets=[0, 1, 1, 2], data=room(3, 2, dtype=torch.uint8),
    ...         scales=room(3, 2, dtype=torch.float32), num_slots=3, width=2, GROUP=1, LEVEL=True,
    ...         BLOCK_M=2, G=1, BLOCK_N=1)
    data = [[0, 126], [120, 126], [179, 179]]
    scales = [[1.0, 1.0], [0.25, 0.25], [_, _]]
    """
    rows, groups = tl.load(offsets_ptr + num_slots), tl.cdiv(width, GROUP)
    offs_m, group_G, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, G), tl.arange(0, BLOCK_N)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        far_M = first + offs_m
        mask_m = far_M < rows
        at_up = up_ptr + (far_M * stride_up)[:, None, None]
        top_M1 = tl.zeros((BLOCK_M, 1), tl.int32)
        for begin in range(0, groups if LEVEL else 0, G):
            at_GN = (begin + group_G)[:, None] * GROUP + offs_n[None, :]
            mask_gn = (offs_n < GROUP)[None, :] & (at_GN < width)
            mask = mask_m[:, None, None] & mask_gn[None]
            _, largest_MG = swiglu_of(at_up, at_GN, width, mask)
            top_M1 = tl.maximum(top_M1, highest(scale_of(largest_MG), largest_MG))
        for begin in range(0, groups, G):
            at_GN = (begin + group_G)[:, None] * GROUP + offs_n[None, :]
            mask_gn = (offs_n < GROUP)[None, :] & (at_GN < width)
            mask = mask_m[:, None, None] & mask_gn[None]
            hidden_MGN, largest_MG = swiglu_of(at_up, at_GN, width, mask)
            exponent_MG = scale_of(largest_MG)
            if LEVEL:
                exponent_MG = levelled(exponent_MG, largest_MG, top_M1)
            into = scales_ptr + (far_M * stride_scales)[:, None] + (begin + group_G)[None, :]
            stored = mask_m[:, None] & (begin + group_G < groups)[None, :]
            store_scale(into, exponent_MG, stored)
            codes = encode(hidden_MGN * power_of(-exponent_MG + 2 * ONE)[:, :, None])
            tl.store(
                data_ptr + (far_M * stride_data)[:, None, None] + at_GN[None], codes, mask=mask
            )


@triton.jit
def dequantise(
    data_ptr,
    scales_ptr,
    end_ptr,
    out_ptr,
    height,
    width,
    outer_data,
    stride_data,
    outer_scales,
    stride_scales,
    outer_out,
    stride_out,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, o): tile i of matrix o, row by row of tiles; HIGH x WIDE codes share a scale.

    end_ptr: a number of rows that only the device knows, fewer than `height`; None: there is none.

    >>> example(dequantise, (2, 1), data=bytes([56, 126, 120, 0, 1, 246]), stride_data=3,
    ...         scales=[[1.0, 0.25], [2.0, 4.0]], end=[2], out=room(3, 3, dtype=torch.float32),
    ...         height=3, width=3, outer_data=6, outer_scales=4, outer_out=9, HIGH=1, WIDE=2,
    ...         BLOCK_M=4, BLOCK_N=2)
    out = [[1.0, 448.0, 64.0], [0.0, 0.00390625, -896.0], [_, _, _]]
    """
    outer, wide = tl.program_id(1).to(tl.int64), tl.cdiv(width, BLOCK_N)
    offs_m = (tl.program_id(0) // wide).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % wide * BLOCK_N
    offs_n = column + tl.arange(0, BLOCK_N)
    rows = height
    if end_ptr is not None:
        rows = tl.minimum(tl.load(end_ptr), height)
    mask = (offs_m < rows)[:, None] & (offs_n < width)[None, :]
    at = data_ptr + outer * outer_data + (offs_m * stride_data)[:, None] + offs_n[None, :]
    numbers = decode(tl.load(at, mask=mask, other=0)).to(tl.float32)
    G: tl.constexpr = BLOCK_N // WIDE if WIDE < BLOCK_N else 1
    group_G = column // WIDE + tl.arange(0, G)
    at = (
        scales_ptr
        + outer * outer_scales
        + (offs_m // HIGH * stride_scales)[:, None]
        + group_G[None, :]
    )
    known = (offs_m < rows)[:, None] & (group_G * WIDE < width)[None, :]
    scale = tl.load(at, mask=known, other=0)
    if scales_ptr.dtype.element_ty == tl.uint8:
        scale = power_of(scale.to(tl.int32))
    numbers = tl.reshape(
        tl.reshape(numbers, (BLOCK_M, G, BLOCK_N // G)) * scale[:, :, None], (BLOCK_M, BLOCK_N)
    )
    at = out_ptr + outer * outer_out + (offs_m * stride_out)[:, None] + offs_n[None, :]
    tl.store(at, numbers.to(out_ptr.dtype.element_ty), mask=mask)
