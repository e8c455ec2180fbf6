"""What stage 6 does row by row on the GPU, between the matrix products of `grouped`.

    swiglu, swiglu_backward    of every row
    row_dots                   of every row with the bias of its slot

Rows behind the last one, which only the device knows, are neither read nor written.

Shapes: A rows that there is room for, L slots of this rank, padded to a power of two; tiles of M
rows and N columns.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.slots import SlotTensors, of_slot


@triton.jit
def at_rows(tensor, first, stride, M: tl.constexpr):
    """[M, 1] where M rows begin, from the first one on."""
    return tensor + first * stride + tl.arange(0, M)[:, None] * stride


@triton.jit(do_not_specialize=["num_slots"])
def swiglu(
    up, offsets, out, num_slots, width, up_stride, out_stride, M: tl.constexpr, N: tl.constexpr
):
    """[A, 2 * width] -> [A, width]: silu of the first half, times the second.

    >>> up = [[0.0, 32.0, 5.0, 2.0], [1.0, 32.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    >>> example(swiglu, 1, up=up, offsets=[0, 1, 1, 2], out=room(3, 2, dtype=torch.bfloat16),
    ...         num_slots=3, width=2, up_stride=4, out_stride=2, M=2, N=2)
    out = [[0.0, 64.0], [0.73046875, 96.0], [_, _]]
    """
    rows = tl.load(offsets + num_slots)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    for first in range(tl.program_id(0).to(tl.int64) * M, rows, tl.num_programs(0) * M):
        at_up = at_rows(up, first, up_stride, M)
        at_out = at_rows(out, first, out_stride, M)
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

    >>> up = [[0.0, 32.0, 5.0, 2.0], [32.0, 0.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    >>> half = torch.bfloat16
    >>> example(swiglu_backward, 1, up=up, d_hidden=[[2.0, 1.0], [1.0, 4.0], [1.0, 1.0]],
    ...         scale=[0.5, 2.0, 1.0], offsets=[0, 1, 1, 2], d_up=room(3, 4, dtype=half),
    ...         hidden=room(3, 2, dtype=half), d_scale=room(3, dtype=torch.float32), num_slots=3,
    ...         width=2, up_stride=4, d_hidden_stride=2, d_up_stride=4, hidden_stride=2, M=2, N=2)
    d_up = [[2.5, 1.0, 0.0, 16.0], [6.0, 12.0, 64.0, 0.0], [_, _, _, _]]
    hidden = [[0.0, 32.0], [192.0, 0.0], [_, _]]
    d_scale = [64.0, 96.0, _]
    """
    rows = tl.load(offsets + num_slots)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    for first in range(tl.program_id(0).to(tl.int64) * M, rows, tl.num_programs(0) * M):
        there_M = first + row_M < rows
        at_up = at_rows(up, first, up_stride, M)
        at_d_up = at_rows(d_up, first, d_up_stride, M)
        at_d_hidden = at_rows(d_hidden, first, d_hidden_stride, M)
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
                at = at_rows(hidden, first, hidden_stride, M)
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
    """[A] += the product of every row with the bias of its slot.

    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> example(row_dots, 2, rows=rows, home_biases=[[1.0, 0.0], [0.0, 1.0]],
    ...         copy_biases=[[1.0, 1.0]], offsets=[0, 1, 2, 5],
    ...         sums=[0.0, 0.0, 0.5, 0.5, 0.5, 0.5], num_homes=2, num_slots=3, width=2,
    ...         rows_stride=2, home_stride=2, copy_stride=2, L=4, M=2, N=2)
    sums = [1.0, 4.0, 11.5, 15.5, 19.5, 0.5]
    """
    biases = SlotTensors(home_biases, copy_biases, num_homes, home_stride, copy_stride)
    slot_L = tl.arange(0, L)
    end_L = tl.load(offsets + 1 + slot_L, mask=slot_L < num_slots, other=2**31 - 1)
    rows_there = tl.load(offsets + num_slots)
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    for first in range(tl.program_id(0).to(tl.int64) * M, rows_there, tl.num_programs(0) * M):
        there_M = first + row_M < rows_there
        ended_ML = end_L[None, :] <= (first + row_M)[:, None]
        slot_M = tl.sum(ended_ML.to(tl.int32), 1)
        at_bias = of_slot(biases, slot_M)
        at_row = at_rows(rows, first, rows_stride, M)
        dot_MN = tl.zeros((M, N), tl.float32)
        for start in range(0, width, N):
            column = start + column_N[None, :]
            mask = there_M[:, None] & (column < width)
            row = tl.load(at_row + column, mask=mask, other=0.0).to(tl.float32)
            dot_MN += row * tl.load(at_bias[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        at = sums + first + row_M
        tl.store(at, tl.load(at, mask=there_M, other=0.0) + tl.sum(dot_MN, 1), mask=there_M)
