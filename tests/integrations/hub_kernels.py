"""Strict stand-ins for the kernels that transformers downloads for quantised experts.

The kernels need a GPU and the `kernels` package. These functions have their signatures and refuse
the calls that they refuse. They multiply every row on its own, so that the output of a row has the
same bits beside any other rows.

    finegrained-fp8             matmul_2d, matmul_batched, matmul_grouped
    gpt-oss-triton-kernels      matmul_ogs, routing, swiglu, tensor, tensor_details

Shapes: S rows, E experts, N and K of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers.integrations.finegrained_fp8 as fp8
import transformers.quantizers.quantizer_finegrained_fp8 as fp8_quantizer

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LARGEST = 448.0
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ROWS = (torch.float32, torch.bfloat16, torch.float16)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the FP4 numbers of bytes with two codes each, the low one first."""
    codes = packed.view(torch.uint8).long()
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return torch.cat([FP4, -FP4])[codes]


def spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    wide = scales.float().repeat_interleave(rows // scales.shape[-2], dim=-2)
    return wide.repeat_interleave(columns // scales.shape[-1], dim=-1)


# finegrained-fp8


def quantised_row(row: torch.Tensor, width: int, static: torch.Tensor | None) -> torch.Tensor:
    """Round a row to e4m3 in groups, as the kernels do before they multiply."""
    groups = row.float().unflatten(0, (-1, width))
    scale = groups.abs().amax(dim=1, keepdim=True) / LARGEST if static is None else static.float()
    scale = torch.as_tensor(scale).clamp(min=1e-12)
    return ((groups / scale).to(E4M3).float() * scale).flatten()


def multiply(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows [S, K] with the transpose of one weight [N, K], or of [N, K / 2] bytes."""
    assert A.ndim == 2
    assert A.dtype in ROWS
    assert B.dtype in (E4M3, torch.int8)
    assert Bs.dtype in (torch.float32, E8M0)
    assert B.is_contiguous()
    assert Bs.is_contiguous()
    weight = unpacked(B) if B.dtype == torch.int8 else B.float()
    (rows, columns), width = weight.shape, 32
    assert A.shape[1] == columns
    if B.dtype == torch.int8:
        assert Bs.dtype == E8M0
        assert Bs.shape == (rows, columns // 32)
    elif block_size is None or list(block_size) == [rows, columns]:
        assert Bs.numel() == 1
        Bs, width = Bs.reshape(1, 1), columns
    else:
        height, width = block_size
        assert rows % height == 0
        assert columns % width == 0
        assert Bs.shape == (rows // height, columns // width)
    weight = weight * spread(Bs, rows, columns)
    products = [weight @ quantised_row(row, width, activation_scale) for row in A]
    result = torch.stack(products) if products else A.new_empty(0, rows)
    return result.to(output_dtype or A.dtype)


def matmul_2d(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    assert B.ndim == 2
    assert activation_scale is None or activation_scale.numel() == 1
    rows = A.reshape(-1, A.shape[-1])
    result = multiply(rows, B, Bs, block_size, output_dtype, activation_scale)
    return result.view(*A.shape[:-1], -1)


def matmul_batched(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    expert_ids: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    assert B.ndim == Bs.ndim == 3
    assert B.is_contiguous()
    assert expert_ids.shape == A.shape[:1]
    assert ((expert_ids >= 0) & (expert_ids < len(B))).all()
    results = [
        multiply(row[None], B[expert], Bs[expert], block_size, output_dtype)
        for row, expert in zip(A, expert_ids.tolist(), strict=True)
    ]
    return torch.cat(results)


def matmul_grouped(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    assert A.is_contiguous()
    assert B.is_contiguous()
    assert B.ndim == Bs.ndim == 3
    assert len(B) == len(Bs) == len(offsets) == len(tokens_per_expert)
    assert offsets.dtype == torch.int32
    counts = tokens_per_expert.to(torch.int64)
    assert torch.equal(counts.cumsum(0), offsets.to(torch.int64))
    assert int(offsets[-1]) == len(A)
    parts = zip(A.split(counts.tolist()), B, Bs, strict=True)
    return torch.cat([multiply(*part, block_size, output_dtype) for part in parts])


@contextmanager
def fp8_kernels() -> Iterator[None]:
    """Load FP8 models on a CPU without dequantising them, and multiply with the stand-ins."""
    kernels = fp8.FineGrainedFP8(
        matmul=matmul_2d, batched_matmul=matmul_batched, grouped_matmul=matmul_grouped
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "_FINEGRAINED_FP8", kernels)
        patch.setattr(
            fp8_quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None
        )
        yield
