"""FP8 (e4m3) experts: quantised weights and rows, and their products with torch.

Every row of a weight and every routed row has one scale. An e4m3 number has three mantissa bits:
its error is at most 2^-4 of itself, and 2^-10 of the scale for small numbers. Scales computed here
are powers of two, so that bfloat16 holds the dequantised numbers exactly; scales of checkpoints may
be any positive numbers.

A packed row is sent as bytes: its codes, then its scale. Backward multiplies dequantised weights
and rows. Rounding to FP8 passes gradients straight through to the weights.

Shapes: A rows, H home experts, N and K of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ultraep.errors import ConfigError
from ultraep.ops.modes import hidden
from ultraep.ops.products import Beside, Products, Stacks

Quantise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
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


@hidden
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
    """Return two to the power of biased exponents."""
    return (exponents << 23).view(torch.float32)


@hidden  # writes parts of a tensor, which selective checkpointing must not keep
def pack(rows_AK: torch.Tensor, quantise: Quantise = quantise) -> torch.Tensor:
    """Return rows as bytes: the codes of a row, then its scale."""
    packed = empty_packed(len(rows_AK), rows_AK.shape[1], rows_AK.device)
    quantise(rows_AK, *parts(packed, rows_AK.shape[1]))
    return packed


def empty_packed(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return memory for packed rows."""
    nbytes = _scale_offset(columns) + ALIGNMENT
    return torch.empty(rows, nbytes, dtype=torch.uint8, device=device)


def parts(packed: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of packed rows: `[A, K]` codes and `[A, 1]` scales."""
    begin = _scale_offset(columns)
    assert packed.shape[1] == begin + ALIGNMENT, (packed.shape, columns)
    return packed[:, :columns].view(E4M3), packed[:, begin : begin + 4].view(torch.float32)


def _scale_offset(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FP8Stacks:
    """Codes and scales of one weight per slot."""

    codes: Stacks
    scales: Stacks

    def dequantised(self, dtype: torch.dtype) -> Stacks:
        codes, scales = self.codes, self.scales
        return Stacks(
            dequantise(codes.homes, scales.homes, dtype),
            dequantise(codes.copies, scales.copies, dtype),
        )


class FP8Products:
    """`Products` of packed rows with `FP8Stacks` as weights.

    Dequantises both, and multiplies them with `plain`; twin of the kernels.   dtype: of results.
    """

    quantise = staticmethod(quantise)

    def __init__(self, plain: Products, dtype: torch.dtype) -> None:
        self._plain, self._dtype = plain, dtype

    @property
    def knows_spans(self) -> bool:
        return self._plain.knows_spans

    def packed(self, rows_AK: torch.Tensor) -> torch.Tensor:
        """Return rows as they are multiplied."""
        return pack(rows_AK, self.quantise)

    def multiply(
        self,
        packed: torch.Tensor,
        weights: FP8Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows_AK = self._rows(packed, weights.codes.homes.shape[2])
        plain = weights.dequantised(self._dtype)
        return self._plain.multiply(rows_AK, plain, bias, scale=scale, out=out)

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: FP8Stacks,
        *,
        out: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        plain = weights.dequantised(rows_AN.dtype)
        return self._plain.multiply_transposed(rows_AN, plain, out=out, beside=beside)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        return self.packed(self._plain.activate(up))

    def activate_backward(
        self, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._plain.activate_backward(up, d_hidden_AF, scale_A)

    def row_dots(self, rows_AN: torch.Tensor, bias: Stacks, sums_A: torch.Tensor) -> None:
        self._plain.row_dots(rows_AN, bias, sums_A)

    def weight_gradients(
        self,
        d_out_AN: torch.Tensor,
        rows: torch.Tensor,
        into: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        if rows.dtype == torch.uint8:  # the packed input; recomputed activations are not packed
            rows = self._rows(rows, into.homes.shape[2])
        self._plain.weight_gradients(d_out_AN, rows, into, bias, scale=scale)

    def _rows(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        return dequantise(*parts(packed, columns), self._dtype)


def check_fp8(tensors: Mapping[str, torch.Tensor], homes: int) -> None:
    """Raise if the tensors are not the FP8 weights of `homes` experts."""
    for name, scales_name in SCALES.items():
        missing = [n for n in (name, scales_name) if n not in tensors]
        if missing:
            raise ConfigError(f"FP8 experts need {missing[0]!r}, got {', '.join(tensors)}")
        codes, scales = tensors[name], tensors[scales_name]
        if codes.ndim != 3 or len(codes) != homes or codes.dtype != E4M3:
            raise ConfigError(
                f"{name!r} must be [{homes}, N, K] {E4M3}, got {list(codes.shape)} {codes.dtype}"
            )
        expected = (*codes.shape[:2], 1)
        if tuple(scales.shape) != expected or scales.dtype != torch.float32:
            raise ConfigError(
                f"{scales_name!r} must be {list(expected)} torch.float32, one scale for each row "
                f"of {name!r}, got {list(scales.shape)} {scales.dtype}"
            )
        invalid = int((~((scales > 0) & scales.isfinite())).sum())
        if invalid:
            raise ConfigError(
                f"{scales_name!r} must be positive and finite, but {invalid} of {scales.numel()} "
                "scales are not"
            )
