"""FP8 on a GPU: launches of `kernels/fp8`, and products; twin of `ultraep.ops.fp8`.

Shapes: A row capacity, N and K of a weight, F hidden width.
"""

from __future__ import annotations

import torch

import ultraep.ops.fp8 as plain
from ultraep.backends.triton.blocks import Table, multiplies_e4m3
from ultraep.backends.triton.kernels import fp8 as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.backends.triton.products import TritonProducts, matrix
from ultraep.ops.activations import Activation
from ultraep.ops.fp8 import FP8Products, FP8Stacks, empty_packed, parts
from ultraep.ops.products import Stacks

ELEMENTS, WARPS = 8192, 8  # of a tile of `quantise`
ACTIVATED, ACTIVATED_WARPS = 2048, 4  # of a tile of the activation
RESIDENT = 8  # programs of the activation per multiprocessor


def quantise(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise rows `[..., K]` into `codes`, of the same shape, and `scales` `[..., 1]`."""
    if values.dtype == torch.float64:
        plain.quantise(values, codes, scales)
        return
    rows = values.flatten(0, -2)
    if rows.numel():
        high, padded = _tile(rows.shape[1], ELEMENTS)
        quick(kernels.quantise)[(cdiv(len(rows), high),)](
            matrix(rows if rows.stride(1) == 1 else rows.contiguous()),
            matrix(codes.view(torch.uint8).flatten(0, -2)),
            matrix(scales.flatten(0, -2)),
            len(rows),
            BLOCK_M=high,
            BLOCK_N=padded,
            num_warps=WARPS,
        )


def _tile(columns: int, elements: int) -> tuple[int, int]:
    """Return rows and columns of a tile of whole rows."""
    padded = power_of_2(columns)
    return max(1, elements // padded), padded


class TritonFP8(FP8Products):
    """Products of all slots in one launch; see `TritonProducts` for the arguments.

    GPUs that cannot multiply e4m3 multiply dequantised numbers.
    """

    quantise = staticmethod(quantise)

    def __init__(
        self,
        offsets: torch.Tensor,
        activation: Activation,
        dtype: torch.dtype,
        programs: int | None = None,
        table: Table | None = None,
    ) -> None:
        self._products = TritonProducts(offsets, activation, dtype, programs, table)
        super().__init__(self._products, dtype)
        self._fused = activation.name == "swiglu"
        self._native = multiplies_e4m3(offsets.device)

    def multiply(
        self,
        packed: torch.Tensor,
        weights: FP8Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._native:
            return super().multiply(packed, weights, bias, scale=scale, out=out)
        codes, scales = parts(packed, weights.codes.homes.shape[2])
        return self._products.multiply(
            codes, weights.codes, bias, scale=scale, out=out, scales=(scales, weights.scales)
        )

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        if not self._fused:
            return super().activate(up)
        width = up.shape[1] // 2
        packed = empty_packed(len(up), width, up.device)
        codes, scales = parts(packed, width)
        high, padded = _tile(width, ACTIVATED)
        quick(kernels.swiglu_quantise)[(self._products.programs * RESIDENT,)](
            matrix(up),
            self._products.offsets,
            matrix(codes.view(torch.uint8)),
            matrix(scales),
            self._products.num_slots,
            BLOCK_M=high,
            BLOCK_N=padded,
            num_warps=ACTIVATED_WARPS,
        )
        return packed
