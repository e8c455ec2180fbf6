"""Row-wise parts of stage 6 on the GPU.

    swiglu, swiglu_backward            between the matrix products of `grouped`
    row_dots                           dot product of every row with the bias of its slot
    scale_rows, scale_rows_backward    one factor per row, around user-supplied experts

Rows behind `offsets[-1]`, which only the device knows, are neither read nor written. `scale_rows`
receives the number of rows from the host.

Shapes: A row capacity, L slots of this rank, padded to a power of two; tiles of BLOCK_M rows and
BLOCK_N columns.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.tiles import Matrix, SlotTensors, slot_ptr


@triton.jit
def row_ptrs(matrix, first, BLOCK_M: tl.constexpr):
    """[M, 1] pointers to BLOCK_M rows, from row `first` on."""
    return matrix.ptr + first * matrix.stride + tl.arange(0, BLOCK_M)[:, None] * matrix.stride


@triton.jit(do_not_specialize=["num_slots"])
def swiglu(
    up: Matrix, offsets_ptr, out: Matrix, num_slots, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[A, 2F] -> [A, F]: silu of the first half, times the second half."""
    rows, width = tl.load(offsets_ptr + num_slots), out.columns
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        up_ptr, out_ptr = row_ptrs(up, first, BLOCK_M), row_ptrs(out, first, BLOCK_M)
        mask_m = first + offs_m < rows
        for begin in range(0, width, BLOCK_N):
            column = begin + offs_n[None, :]
            mask = mask_m[:, None] & (column < width)
            gate = tl.load(up_ptr + column, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(up_ptr + width + column, mask=mask, other=0.0).to(tl.float32)
            hidden = gate * tl.sigmoid(gate) * value
            tl.store(out_ptr + column, hidden.to(out.ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def swiglu_backward(
    up: Matrix,
    d_hidden: Matrix,
    scale_ptr,
    offsets_ptr,
    d_up: Matrix,
    hidden: Matrix,
    d_scale_ptr,
    num_slots,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Backward of swiglu(up) * scale: [A, 2F] d_up, [A, F] hidden (recomputed), [A] d_scale.

    `d_hidden` is the gradient before scaling. `hidden` may be the tensor `d_hidden`: a tile is
    stored after the same tile was read.
    """
    rows, width = tl.load(offsets_ptr + num_slots), d_hidden.columns
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        mask_m = first + offs_m < rows
        up_ptr, d_up_ptr = row_ptrs(up, first, BLOCK_M), row_ptrs(d_up, first, BLOCK_M)
        d_hidden_ptr = row_ptrs(d_hidden, first, BLOCK_M)
        scale_M = tl.load(scale_ptr + first + offs_m, mask=mask_m, other=0.0)
        dot_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, width, BLOCK_N):
            column = start + offs_n[None, :]
            mask = mask_m[:, None] & (column < width)
            gate = tl.load(up_ptr + column, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(up_ptr + width + column, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(d_hidden_ptr + column, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            dot_MN += grad * (silu * value)
            grad *= scale_M[:, None]
            d_gate = grad * value * (sigmoid + silu * (1 - sigmoid))
            tl.store(d_up_ptr + column, d_gate.to(d_up.ptr.dtype.element_ty), mask=mask)
            d_value = grad * silu
            tl.store(d_up_ptr + width + column, d_value.to(d_up.ptr.dtype.element_ty), mask=mask)
            scaled = silu * value * scale_M[:, None]
            hidden_ptr = row_ptrs(hidden, first, BLOCK_M)
            tl.store(hidden_ptr + column, scaled.to(hidden.ptr.dtype.element_ty), mask=mask)
        tl.store(d_scale_ptr + first + offs_m, tl.sum(dot_MN, 1), mask=mask_m)


@triton.jit(do_not_specialize=["num_homes", "num_slots"])
def row_dots(
    rows: Matrix,
    biases: SlotTensors,
    offsets_ptr,
    sums_ptr,
    num_homes,
    num_slots,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[A] += dot product of every row with the bias of its slot."""
    slot_L = tl.arange(0, L)
    end_L = tl.load(offsets_ptr + 1 + slot_L, mask=slot_L < num_slots, other=2**31 - 1)
    end = tl.load(offsets_ptr + num_slots)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, end, tl.num_programs(0) * BLOCK_M):
        mask_m = first + offs_m < end
        ended_ML = end_L[None, :] <= (first + offs_m)[:, None]
        slot_M = tl.sum(ended_ML.to(tl.int32), 1)
        bias_ptr = slot_ptr(biases, slot_M, num_homes)
        row_ptr = row_ptrs(rows, first, BLOCK_M)
        dot_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, rows.columns, BLOCK_N):
            column = start + offs_n[None, :]
            mask = mask_m[:, None] & (column < rows.columns)
            row = tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32)
            dot_MN += row * tl.load(bias_ptr[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        ptr = sums_ptr + first + offs_m
        tl.store(ptr, tl.load(ptr, mask=mask_m, other=0.0) + tl.sum(dot_MN, 1), mask=mask_m)


@triton.jit
def own_rows(rows_ptr, scale_ptr, num_rows, BLOCK_M: tl.constexpr):
    """Return first row, mask and scale of this program's rows; the scale in the rows' precision."""
    first, offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M, tl.arange(0, BLOCK_M)
    mask_m = first + offs_m < num_rows
    scale_M = tl.load(scale_ptr + first + offs_m, mask=mask_m, other=0.0)
    return first, mask_m, scale_M.to(rows_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def scale_rows(
    rows: Matrix, scale_ptr, out: Matrix, num_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[A, D] rows times `scale` [A], which is first rounded to the dtype of the rows."""
    first, mask_m, scale_M = own_rows(rows.ptr, scale_ptr, num_rows, BLOCK_M)
    for begin in range(0, rows.columns, BLOCK_N):
        column = begin + tl.arange(0, BLOCK_N)[None, :]
        mask = mask_m[:, None] & (column < rows.columns)
        row = tl.load(row_ptrs(rows, first, BLOCK_M) + column, mask=mask, other=0.0)
        scaled = (row.to(tl.float32) * scale_M[:, None]).to(out.ptr.dtype.element_ty)
        tl.store(row_ptrs(out, first, BLOCK_M) + column, scaled, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def scale_rows_backward(
    d_out: Matrix,
    rows: Matrix,
    scale_ptr,
    d_rows: Matrix,
    d_scale_ptr,
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Backward of `scale_rows`: [A, D] d_rows and [A] d_scale."""
    first, mask_m, scale_M = own_rows(rows.ptr, scale_ptr, num_rows, BLOCK_M)
    dot_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, rows.columns, BLOCK_N):
        column = begin + tl.arange(0, BLOCK_N)[None, :]
        mask = mask_m[:, None] & (column < rows.columns)
        row = tl.load(row_ptrs(rows, first, BLOCK_M) + column, mask=mask, other=0.0)
        grad = tl.load(row_ptrs(d_out, first, BLOCK_M) + column, mask=mask, other=0.0)
        grad = grad.to(tl.float32)
        dot_MN += grad * row.to(tl.float32)
        scaled = (grad * scale_M[:, None]).to(d_rows.ptr.dtype.element_ty)
        tl.store(row_ptrs(d_rows, first, BLOCK_M) + column, scaled, mask=mask)
    tl.store(d_scale_ptr + first + tl.arange(0, BLOCK_M), tl.sum(dot_MN, 1), mask=mask_m)
