"""What stage 6 does row by row on the GPU, between the matrix products of `grouped`.

    swiglu, swiglu_backward    of every row
    row_dots                   of every row with the bias of its slot

Rows behind the last one, which only the device knows, are neither read nor written.

Shapes: A rows that there is room for, L slots of this rank, padded to a power of two; tiles of M
rows and N columns.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.grouped import of_slot


@triton.jit(do_not_specialize=["num_slots"])
def swiglu(
    up, offsets, out, num_slots, width, up_stride, out_stride, M: tl.constexpr, N: tl.constexpr
):
    """[A, 2 * width] -> [A, width]: silu of the first half, times the second."""
    rows = tl.load(offsets + num_slots)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    for first in range(tl.program_id(0).to(tl.int64) * M, rows, tl.num_programs(0) * M):
        at_up = up + first * up_stride + row_M[:, None] * up_stride
        at_out = out + first * out_stride + row_M[:, None] * out_stride
        there_M = first + row_M < rows
        for begin in range(0, width, N):
            column = begin + column_N[None, :]
            mask = there_M[:, None] & (column < width)
            gate = tl.load(at_up + column, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(at_up + width + column, mask=mask, other=0.0).to(tl.float32)
            hidden = gate * tl.sigmoid(gate) * value
            tl.store(at_out + column, hidden.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def swiglu_backward(
    up,
    d_hidden,
    scale,
    offsets,
    d_up,
    hidden,
    d_scale,
    num_slots,
    width,
    up_stride,
    d_hidden_stride,
    d_up_stride,
    hidden_stride,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Gradients of swiglu(up) * scale: [A, 2 * width] d_up, [A, width] the result, [A] d_scale.

    The gradients of scaled results are given, as if they were not scaled. A tile of `hidden` is
    stored after the same tile of `d_hidden` has been read: both may be one tensor.
    """
    rows = tl.load(offsets + num_slots)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    for first in range(tl.program_id(0).to(tl.int64) * M, rows, tl.num_programs(0) * M):
        there_M = first + row_M < rows
        at_up = up + first * up_stride + row_M[:, None] * up_stride
        at_d_up = d_up + first * d_up_stride + row_M[:, None] * d_up_stride
        at_d_hidden = d_hidden + first * d_hidden_stride + row_M[:, None] * d_hidden_stride
        scale_M = tl.full((M,), 1.0, tl.float32)
        if scale is not None:
            scale_M = tl.load(scale + first + row_M, mask=there_M, other=0.0)
        dot_MN = tl.zeros((M, N), tl.float32)
        for start in range(0, width, N):
            column = start + column_N[None, :]
            mask = there_M[:, None] & (column < width)
            gate = tl.load(at_up + column, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(at_up + width + column, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(at_d_hidden + column, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            dot_MN += grad * (silu * value)
            grad *= scale_M[:, None]
            d_gate = grad * value * (sigmoid + silu * (1 - sigmoid))
            tl.store(at_d_up + column, d_gate.to(d_up.dtype.element_ty), mask=mask)
            d_value = grad * silu
            tl.store(at_d_up + width + column, d_value.to(d_up.dtype.element_ty), mask=mask)
            if hidden is not None:
                scaled = silu * value * scale_M[:, None]
                at = hidden + first * hidden_stride + row_M[:, None] * hidden_stride
                tl.store(at + column, scaled.to(hidden.dtype.element_ty), mask=mask)
        if d_scale is not None:
            tl.store(d_scale + first + row_M, tl.sum(dot_MN, 1), mask=there_M)


@triton.jit(do_not_specialize=["num_homes", "num_slots"])
def row_dots(
    rows,
    home_biases,
    copy_biases,
    offsets,
    sums,
    num_homes,
    num_slots,
    width,
    rows_stride,
    home_stride,
    copy_stride,
    L: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """[A] += the product of every row with the bias of its slot."""
    slot_L = tl.arange(0, L)
    end_L = tl.load(offsets + 1 + slot_L, mask=slot_L < num_slots, other=2**31 - 1)
    rows_there = tl.load(offsets + num_slots)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    for first in range(tl.program_id(0).to(tl.int64) * M, rows_there, tl.num_programs(0) * M):
        there_M = first + row_M < rows_there
        ended_ML = end_L[None, :] <= (first + row_M)[:, None]
        slot_M = tl.sum(ended_ML.to(tl.int32), 1)
        at_bias = of_slot(home_biases, copy_biases, slot_M, num_homes, home_stride, copy_stride)
        at_row = rows + first * rows_stride + row_M[:, None] * rows_stride
        dot_MN = tl.zeros((M, N), tl.float32)
        for start in range(0, width, N):
            column = start + column_N[None, :]
            mask = there_M[:, None] & (column < width)
            row = tl.load(at_row + column, mask=mask, other=0.0).to(tl.float32)
            dot_MN += row * tl.load(at_bias[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        at = sums + first + row_M
        tl.store(at, tl.load(at, mask=there_M, other=0.0) + tl.sum(dot_MN, 1), mask=there_M)
