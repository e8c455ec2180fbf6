"""FP8 (e4m3) numbers of experts: quantised weights and rows.

Every row of a weight and every routed row has one scale. An e4m3 number has three mantissa bits:
its error is at most 2^-4 of itself, and 2^-10 of the scale for small numbers. Scales computed here
are powers of two, so that bfloat16 holds the dequantised numbers exactly; scales of checkpoints may
be any positive numbers.

A packed row is sent as bytes: its codes, then its scale. Backward multiplies dequantised weights
and rows. Rounding to FP8 passes gradients straight through to the weights.

Shapes: A rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ultraep.ops.modes import outside_dispatch_modes

Quantise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Dequantise = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
E4M3 = torch.float8_e4m3fn
SCALES = {"gate_up_proj": "gate_up_scales", "down_proj": "down_scales"}  # of the weights
ALIGNMENT = 16  # bytes, of a packed row and of the scale in it
CARRY = 0x1FFFFF  # carries into the exponent for mantissas above 1.75, as 448 = 1.75 * 2**8
LARGEST = 8  # exponent of the largest number, 448
LEAST = 127 - 40  # biased exponent of the smallest scale
ONE = 127  # biased exponent


def quantise(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise rows `[..., K]` into `codes`, of the same shape, and `scales` `[..., 1]`."""
    exponents = exponents_of(values.float().abs().amax(dim=-1, keepdim=True))
    scaled = values.float() * _powers(2 * ONE - exponents)
    codes.copy_(torch.where(scaled.isinf(), torch.nan, scaled))
    scales.copy_(_powers(exponents))


@outside_dispatch_modes
def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers, rounded once if the dtype cannot hold them."""
    return codes.to(dtype).mul_(scales)


def exponents_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the least biased exponents that scale rows with these maxima to 448 or less.

    >>> (exponents_of(torch.tensor([448.0, 449.0, 0.4375, 0.0])) - ONE).tolist()
    [0, 1, -10, 0]
    """
    exponents = ((largest.view(torch.int32) + CARRY) >> 23) - LARGEST
    return torch.where(largest == 0, ONE, exponents.clamp(min=LEAST)).to(torch.int32)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents << 23).view(torch.float32)


@outside_dispatch_modes  # writes parts of a tensor, which selective checkpointing must not keep
def pack(rows_AK: torch.Tensor, quantise: Quantise = quantise) -> torch.Tensor:
    """Return rows as bytes: the codes of a row, then its scale."""
    packed = empty_packed(len(rows_AK), rows_AK.shape[1], rows_AK.device)
    quantise(rows_AK, *parts(packed, rows_AK.shape[1]))
    return packed


def empty_packed(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    nbytes = _scale_offset(columns) + ALIGNMENT
    return torch.empty(rows, nbytes, dtype=torch.uint8, device=device)


def parts(packed: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of packed rows: `[A, K]` codes and `[A, 1]` scales."""
    begin = _scale_offset(columns)
    assert packed.shape[1] == begin + ALIGNMENT, (packed.shape, columns)
    return packed[:, :columns].view(E4M3), packed[:, begin : begin + 4].view(torch.float32)


def unpack(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the `[A, K]` numbers of packed rows."""
    return dequantise(*parts(packed, columns), dtype)


def _scale_offset(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT
