"""Products of stage 6 with weights of eight bits, and the weights themselves.

Forward multiplies e4m3 rows with e4m3 weights, or plain rows with dequantised weights, as the
format says. Backward is that of the network at the dequantised weights and rows, by the engine of
plain products: rounding to eight bits passes gradients straight on, to weights that are kept in
full at home.

Shapes: A rows, N and K those of a weight, F what comes out of an activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

import ultraep.formats as formats
from ultraep.errors import ConfigError
from ultraep.formats import E4M3, Format
from ultraep.products import Products, Stacks, accumulator


@dataclass(frozen=True)
class QuantisedStacks:
    """The numbers of one weight of every slot, and their scales."""

    data: Stacks
    scales: Stacks

    @property
    def width(self) -> int:
        """K of the weights [N, K]."""
        return self.data.homes.shape[2]


class QuantisedProducts:
    """The twin of the kernels: all products are made of dequantised numbers.

    It has the verbs of `Products`, for rows that are packed if the format packs them, and
    `QuantisedStacks` as weights.   plain: the engine of plain products.   dtype: of results.
    """

    numbers = formats  # whose verbs quantise

    def __init__(self, plain: Products, form: Format, dtype: torch.dtype) -> None:
        self._plain, self._form, self._dtype = plain, form, dtype

    @property
    def knows_spans(self) -> bool:
        return self._plain.knows_spans

    def packed(self, rows_AK: torch.Tensor) -> torch.Tensor:
        """Rows as they are multiplied."""
        return self.numbers.pack(self._form, rows_AK) if self._form.packs else rows_AK

    def multiply(
        self,
        rows: torch.Tensor,
        weights: QuantisedStacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._form.packs:
            plain = self._weights(weights, self._dtype)
            return self._plain.multiply(rows, plain, bias, scale=scale, out=out)
        wide = accumulator(self._dtype)
        numbers = self._rows(rows, weights.width, wide)
        found = self._plain.multiply(numbers, self._weights(weights, wide), bias).to(self._dtype)
        if scale is not None:
            found = found * scale[: len(found), None].to(self._dtype)
        if out is None:
            return found
        out[: len(found)].copy_(found)
        return out

    def multiply_transposed(
        self, rows_AN: torch.Tensor, weights: QuantisedStacks, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        plain = self._weights(weights, rows_AN.dtype)
        return self._plain.multiply_transposed(rows_AN, plain, out=out)

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
        if rows.dtype == torch.uint8:
            rows = self._rows(rows, into.homes.shape[2], d_out_AN.dtype)
        self._plain.weight_gradients(d_out_AN, rows, into, bias, scale=scale)

    def _weights(self, weights: QuantisedStacks, dtype: torch.dtype) -> Stacks:
        data, scales = weights.data, weights.scales
        return Stacks(
            self.numbers.dequantise(self._form, data.homes, scales.homes, dtype),
            self.numbers.dequantise(self._form, data.copies, scales.copies, dtype),
        )

    def _rows(self, packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self.numbers.unpack(self._form, packed, width, dtype)
