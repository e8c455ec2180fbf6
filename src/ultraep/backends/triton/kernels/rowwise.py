"""What stage 6 does row by row on the GPU, between the matrix products of `grouped`.

    swiglu, swiglu_backward            of every row
    row_dots                           of every row with the bias of its slot
    scale_rows, scale_rows_backward    rows times one number each, around a network of others

Rows behind the last one, which only the device knows, are neither read nor written; `scale_rows`
is given their number by the host.

Shapes: A rows that there is room for, L slots of this rank, padded to a power of two; tiles of
BLOCK_M rows and BLOCK_N columns.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.tiles import SlotTensors, of_slot


@triton.jit
def at_rows(tensor, first, stride, BLOCK_M: tl.constexpr):
    """[M, 1] where BLOCK_M rows begin, from the first one on."""
    return tensor + first * stride + tl.arange(0, BLOCK_M)[:, None] * stride


@triton.jit(do_not_specialize=["num_slots"])
def swiglu(
    up_ptr,
    offsets_ptr,
    out_ptr,
    num_slots,
    width,
    stride_up,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A, 2 * width] -> [A, width]: silu of the first half, times the second.

    >>> up = [[0.0, 32.0, 5.0, 2.0], [1.0, 32.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    >>> example(swiglu, 1, up=up, offsets=[0, 1, 1, 2], out=room(3, 2, dtype=torch.bfloat16),
    ...         num_slots=3, width=2, BLOCK_M=2, BLOCK_N=2)
    out = [[0.0, 64.0], [0.73046875, 96.0], [_, _]]
    """
    rows = tl.load(offsets_ptr + num_slots)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        at_up = at_rows(up_ptr, first, stride_up, BLOCK_M)
        at_out = at_rows(out_ptr, first, stride_out, BLOCK_M)
        mask_m = first + offs_m < rows
        for begin in range(0, width, BLOCK_N):
            column = begin + offs_n[None, :]
            mask = mask_m[:, None] & (column < width)
            gate = tl.load(at_up + column, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(at_up + width + column, mask=mask, other=0.0).to(tl.float32)
            hidden = gate * tl.sigmoid(gate) * value
            tl.store(at_out + column, hidden.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def swiglu_backward(
    up_ptr,
    d_hidden_ptr,
    scale_ptr,
    offsets_ptr,
    d_up_ptr,
    hidden_ptr,
    d_scale_ptr,
    num_slots,
    width,
    stride_up,
    stride_d_hidden,
    stride_d_up,
    stride_hidden,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of swiglu(up) * scale: [A, 2 * width] d_up, [A, width] the result, [A] d_scale.

    The gradients of scaled results are given, as if they were not scaled. A tile of `hidden` is
    stored after the same tile of `d_hidden` has been read: both may be one tensor.

    >>> up = [[0.0, 32.0, 5.0, 2.0], [32.0, 0.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    >>> half = torch.bfloat16
    >>> example(swiglu_backward, 1, up=up, d_hidden=[[2.0, 1.0], [1.0, 4.0], [1.0, 1.0]],
    ...         scale=[0.5, 2.0, 1.0], offsets=[0, 1, 1, 2], d_up=room(3, 4, dtype=half),
    ...         hidden=room(3, 2, dtype=half), d_scale=room(3, dtype=torch.float32), num_slots=3,
    ...         width=2, BLOCK_M=2, BLOCK_N=2)
    d_up = [[2.5, 1.0, 0.0, 16.0], [6.0, 12.0, 64.0, 0.0], [_, _, _, _]]
    hidden = [[0.0, 32.0], [192.0, 0.0], [_, _]]
    d_scale = [64.0, 96.0, _]
    """
    rows = tl.load(offsets_ptr + num_slots)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        mask_m = first + offs_m < rows
        at_up = at_rows(up_ptr, first, stride_up, BLOCK_M)
        at_d_up = at_rows(d_up_ptr, first, stride_d_up, BLOCK_M)
        at_d_hidden = at_rows(d_hidden_ptr, first, stride_d_hidden, BLOCK_M)
        scale_M = tl.full((BLOCK_M,), 1.0, tl.float32)
        if scale_ptr is not None:
            scale_M = tl.load(scale_ptr + first + offs_m, mask=mask_m, other=0.0)
        dot_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, width, BLOCK_N):
            column = start + offs_n[None, :]
            mask = mask_m[:, None] & (column < width)
            gate = tl.load(at_up + column, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(at_up + width + column, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(at_d_hidden + column, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            dot_MN += grad * (silu * value)
            grad *= scale_M[:, None]
            d_gate = grad * value * (sigmoid + silu * (1 - sigmoid))
            tl.store(at_d_up + column, d_gate.to(d_up_ptr.dtype.element_ty), mask=mask)
            d_value = grad * silu
            tl.store(at_d_up + width + column, d_value.to(d_up_ptr.dtype.element_ty), mask=mask)
            if hidden_ptr is not None:
                scaled = silu * value * scale_M[:, None]
                at = at_rows(hidden_ptr, first, stride_hidden, BLOCK_M)
                tl.store(at + column, scaled.to(hidden_ptr.dtype.element_ty), mask=mask)
        if d_scale_ptr is not None:
            tl.store(d_scale_ptr + first + offs_m, tl.sum(dot_MN, 1), mask=mask_m)


@triton.jit(do_not_specialize=["num_homes", "num_slots"])
def row_dots(
    rows_ptr,
    home_biases_ptr,
    copy_biases_ptr,
    offsets_ptr,
    sums_ptr,
    num_homes,
    num_slots,
    width,
    stride_rows,
    stride_homes,
    stride_copies,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A] += the product of every row with the bias of its slot.

    >>> rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
    >>> example(row_dots, 2, rows=rows, home_biases=[[1.0, 0.0], [0.0, 1.0]],
    ...         copy_biases=[[1.0, 1.0]], offsets=[0, 1, 2, 5], sums=[0.0, 0.0, 0.5, 0.5, 0.5, 0.5],
    ...         num_homes=2, num_slots=3, width=2, L=4, BLOCK_M=2, BLOCK_N=2)
    sums = [1.0, 4.0, 11.5, 15.5, 19.5, 0.5]
    """
    biases = SlotTensors(home_biases_ptr, copy_biases_ptr, num_homes, stride_homes, stride_copies)
    slot_L = tl.arange(0, L)
    end_L = tl.load(offsets_ptr + 1 + slot_L, mask=slot_L < num_slots, other=2**31 - 1)
    rows_there = tl.load(offsets_ptr + num_slots)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    for first in range(
        tl.program_id(0).to(tl.int64) * BLOCK_M, rows_there, tl.num_programs(0) * BLOCK_M
    ):
        mask_m = first + offs_m < rows_there
        ended_ML = end_L[None, :] <= (first + offs_m)[:, None]
        slot_M = tl.sum(ended_ML.to(tl.int32), 1)
        at_bias = of_slot(biases, slot_M)
        at_row = at_rows(rows_ptr, first, stride_rows, BLOCK_M)
        dot_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, width, BLOCK_N):
            column = start + offs_n[None, :]
            mask = mask_m[:, None] & (column < width)
            row = tl.load(at_row + column, mask=mask, other=0.0).to(tl.float32)
            dot_MN += row * tl.load(at_bias[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        at = sums_ptr + first + offs_m
        tl.store(at, tl.load(at, mask=mask_m, other=0.0) + tl.sum(dot_MN, 1), mask=mask_m)


@triton.jit(do_not_specialize=["num_rows"])
def scale_rows(
    rows_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    width,
    stride_rows,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A, width] rows times `scale` [A], which is rounded to their type before.

    >>> half = torch.bfloat16
    >>> example(scale_rows, 2, rows=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]],
    ...         scale=[0.5, 2.0, -1.0], out=room(3, 3, dtype=half), num_rows=3, width=3, BLOCK_M=2,
    ...         BLOCK_N=2)
    out = [[0.5, 1.0, 1.5], [8.0, 10.0, 12.0], [-7.0, -8.0, -9.0]]
    """
    first, offs_m, offs_n = (
        tl.program_id(0).to(tl.int64) * BLOCK_M,
        tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_N),
    )
    mask_m = first + offs_m < num_rows
    scale_M = tl.load(scale_ptr + first + offs_m, mask=mask_m, other=0.0)
    scale_M = scale_M.to(rows_ptr.dtype.element_ty).to(tl.float32)
    for begin in range(0, width, BLOCK_N):
        column = begin + offs_n[None, :]
        mask = mask_m[:, None] & (column < width)
        row = tl.load(at_rows(rows_ptr, first, stride_rows, BLOCK_M) + column, mask=mask, other=0.0)
        scaled = (row.to(tl.float32) * scale_M[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(at_rows(out_ptr, first, stride_out, BLOCK_M) + column, scaled, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def scale_rows_backward(
    d_out_ptr,
    rows_ptr,
    scale_ptr,
    d_rows_ptr,
    d_scale_ptr,
    num_rows,
    width,
    stride_d_out,
    stride_rows,
    stride_d_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A, width] gradients of rows, and [A] of their scale, from those of scaled rows.

    >>> example(scale_rows_backward, 2, d_out=[[1.0, 2.0, 3.0], [1.0, 0.0, 1.0], [2.0, 2.0, 2.0]],
    ...         rows=[[1.0, 1.0, 2.0], [4.0, 5.0, 6.0], [0.5, 1.0, 1.5]], scale=[0.5, 2.0, -1.0],
    ...         d_rows=room(3, 3, dtype=torch.float32), d_scale=room(3, dtype=torch.float32),
    ...         num_rows=3, width=3, BLOCK_M=2, BLOCK_N=2)
    d_rows = [[0.5, 1.0, 1.5], [2.0, 0.0, 2.0], [-2.0, -2.0, -2.0]]
    d_scale = [9.0, 10.0, 6.0]
    """
    first, offs_m, offs_n = (
        tl.program_id(0).to(tl.int64) * BLOCK_M,
        tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_N),
    )
    mask_m = first + offs_m < num_rows
    scale_M = tl.load(scale_ptr + first + offs_m, mask=mask_m, other=0.0)
    scale_M = scale_M.to(rows_ptr.dtype.element_ty).to(tl.float32)
    dot_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, width, BLOCK_N):
        column = begin + offs_n[None, :]
        mask = mask_m[:, None] & (column < width)
        row = tl.load(at_rows(rows_ptr, first, stride_rows, BLOCK_M) + column, mask=mask, other=0.0)
        grad = tl.load(
            at_rows(d_out_ptr, first, stride_d_out, BLOCK_M) + column, mask=mask, other=0.0
        )
        grad = grad.to(tl.float32)
        dot_MN += grad * row.to(tl.float32)
        scaled = (grad * scale_M[:, None]).to(d_rows_ptr.dtype.element_ty)
        tl.store(at_rows(d_rows_ptr, first, stride_d_rows, BLOCK_M) + column, scaled, mask=mask)
    tl.store(d_scale_ptr + first + offs_m, tl.sum(dot_MN, 1), mask=mask_m)
