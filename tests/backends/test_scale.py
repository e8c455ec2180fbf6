"""Rows times one factor each: the kernels agree with torch."""

import pytest
import torch

from ultraep.backends.triton import products as kernels
from ultraep.backends.triton.device import default_device
from ultraep.ops import products

DEVICE = default_device()
SIZES = [(1, 1), (3, 7), (5, 64), (9, 1500)]


def drawn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_agree_with_torch(size, dtype, scale_type):
    rows, d_out = (drawn(*size, dtype=dtype, seed=seed) for seed in (0, 1))
    scale = drawn(size[0], dtype=scale_type, seed=2)
    results = []
    for engine in (products, kernels):
        out, d_scale = torch.full_like(rows, torch.nan), torch.full_like(scale, torch.nan)
        engine.scale_rows(rows, scale, out)
        d_rows = engine.scale_rows_backward(d_out, rows, scale, d_scale)
        results.append((out, d_rows, d_scale))
    (out, d_rows, d_scale), (by_kernel, d_rows_by_kernel, d_scale_by_kernel) = results
    assert torch.equal(by_kernel, out)
    assert torch.equal(d_rows_by_kernel, d_rows)
    close = 1e-2 if scale_type == torch.bfloat16 else 1e-5
    torch.testing.assert_close(d_scale_by_kernel, d_scale, rtol=close, atol=close * size[1] ** 0.5)


def test_rows_of_part_of_a_tensor():
    wide, scale = drawn(6, 20), drawn(6)
    out = torch.zeros(8, 10, device=DEVICE)
    kernels.scale_rows(wide[:, 5:15], scale, out[1:7])
    assert torch.equal(out[1:7], wide[:, 5:15] * scale[:, None])
    assert not out[0].any()
    assert not out[7].any()


def test_unsupported_rows_are_left_to_torch():
    for rows in (drawn(4, 6, dtype=torch.float64), drawn(6, 4).T, drawn(0, 6)):
        scale, out = drawn(len(rows), dtype=rows.dtype), torch.empty_like(rows)
        kernels.scale_rows(rows, scale, out)
        assert torch.equal(out, rows * scale[:, None])
        d_scale = torch.empty_like(scale)
        d_rows = kernels.scale_rows_backward(rows, rows, scale, d_scale)
        assert torch.equal(d_rows, rows * scale[:, None])
        torch.testing.assert_close(d_scale, (rows * rows).sum(dim=1))
