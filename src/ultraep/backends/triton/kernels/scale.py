"""Rows times one number each, and back: what the seam does around a network of others.

Shapes: A rows; tiles of M rows and N columns.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.swiglu import at_rows


@triton.jit(do_not_specialize=["num_rows"])
def scale_rows(
    rows, scale, out, num_rows, width, rows_stride, out_stride, M: tl.constexpr, N: tl.constexpr
):
    """[A, width] rows times `scale` [A], which is rounded to their type before.

    >>> half = torch.bfloat16
    >>> example(scale_rows, 2, rows=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]],
    ...         scale=[0.5, 2.0, -1.0], out=room(3, 3, dtype=half), num_rows=3, width=3,
    ...         rows_stride=3, out_stride=3, M=2, N=2)
    out = [[0.5, 1.0, 1.5], [8.0, 10.0, 12.0], [-7.0, -8.0, -9.0]]
    """
    first, row_M, column_N = tl.program_id(0).to(tl.int64) * M, tl.arange(0, M), tl.arange(0, N)
    there_M = first + row_M < num_rows
    scale_M = tl.load(scale + first + row_M, mask=there_M, other=0.0)
    scale_M = scale_M.to(rows.dtype.element_ty).to(tl.float32)
    for begin in range(0, width, N):
        column = begin + column_N[None, :]
        mask = there_M[:, None] & (column < width)
        row = tl.load(at_rows(rows, first, rows_stride, M) + column, mask=mask, other=0.0)
        scaled = (row.to(tl.float32) * scale_M[:, None]).to(out.dtype.element_ty)
        tl.store(at_rows(out, first, out_stride, M) + column, scaled, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def scale_rows_backward(
    d_out,
    rows,
    scale,
    d_rows,
    d_scale,
    num_rows,
    width,
    d_out_stride,
    rows_stride,
    d_rows_stride,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """[A, width] gradients of rows, and [A] of their scale, from those of scaled rows.

    >>> example(scale_rows_backward, 2, d_out=[[1.0, 2.0, 3.0], [1.0, 0.0, 1.0], [2.0, 2.0, 2.0]],
    ...         rows=[[1.0, 1.0, 2.0], [4.0, 5.0, 6.0], [0.5, 1.0, 1.5]], scale=[0.5, 2.0, -1.0],
    ...         d_rows=room(3, 3, dtype=torch.float32), d_scale=room(3, dtype=torch.float32),
    ...         num_rows=3, width=3, d_out_stride=3, rows_stride=3, d_rows_stride=3, M=2, N=2)
    d_rows = [[0.5, 1.0, 1.5], [2.0, 0.0, 2.0], [-2.0, -2.0, -2.0]]
    d_scale = [9.0, 10.0, 6.0]
    """
    first, row_M, column_N = tl.program_id(0).to(tl.int64) * M, tl.arange(0, M), tl.arange(0, N)
    there_M = first + row_M < num_rows
    scale_M = tl.load(scale + first + row_M, mask=there_M, other=0.0)
    scale_M = scale_M.to(rows.dtype.element_ty).to(tl.float32)
    dot_MN = tl.zeros((M, N), tl.float32)
    for begin in range(0, width, N):
        column = begin + column_N[None, :]
        mask = there_M[:, None] & (column < width)
        row = tl.load(at_rows(rows, first, rows_stride, M) + column, mask=mask, other=0.0)
        grad = tl.load(at_rows(d_out, first, d_out_stride, M) + column, mask=mask, other=0.0)
        grad = grad.to(tl.float32)
        dot_MN += grad * row.to(tl.float32)
        scaled = (grad * scale_M[:, None]).to(d_rows.dtype.element_ty)
        tl.store(at_rows(d_rows, first, d_rows_stride, M) + column, scaled, mask=mask)
    tl.store(d_scale + first + row_M, tl.sum(dot_MN, 1), mask=there_M)
