"""Products of stage 6 with FP8 weights, and the FP8 weights of home experts.

Forward multiplies e4m3 rows with e4m3 weights, or plain rows with dequantised weights, as the
format says. Backward uses the dequantised weights and rows. Rounding to FP8 passes gradients
straight through to the master weights at home.

Shapes: A rows, N and K of a weight, F output width of an activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

import ultraep.ops.formats as formats
from ultraep.bundle import Promise, Weights, bundle_versions
from ultraep.errors import ConfigError
from ultraep.ops.formats import E4M3, Format
from ultraep.ops.modes import hidden
from ultraep.ops.products import Beside, Products, Stacks, accumulator


@dataclass(frozen=True)
class QuantisedStacks:
    """Codes and scales of one weight per slot."""

    data: Stacks
    scales: Stacks


class QuantisedProducts:
    """`Products` of packed rows, if the format packs them, with `QuantisedStacks` as weights.

    Dequantises both, and multiplies them with `plain`; twin of the kernels.   dtype: of results.
    """

    numbers = formats  # the module that quantises

    def __init__(self, plain: Products, form: Format, dtype: torch.dtype) -> None:
        self._plain, self._form, self._dtype = plain, form, dtype

    @property
    def knows_spans(self) -> bool:
        return self._plain.knows_spans

    def packed(self, rows_AK: torch.Tensor) -> torch.Tensor:
        """Return rows as they are multiplied."""
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
        numbers = self._rows(rows, weights.data.homes.shape[2], wide)
        product = self._plain.multiply(numbers, self._weights(weights, wide), bias).to(self._dtype)
        if scale is not None:
            product = product * scale[: len(product), None].to(self._dtype)
        if out is None:
            return product
        out[: len(product)].copy_(product)
        return out

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: QuantisedStacks,
        *,
        out: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        plain = self._weights(weights, rows_AN.dtype)
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


NAN_BYTE = 255  # as a ue8m0 scale
WEIGHTS = {"gate_up_proj": "gate_up_scales", "down_proj": "down_scales"}  # and their scales


class QuantisedWeights:
    """FP8 weights of home experts, quantised from master weights into persistent memory."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._held: dict[str, torch.Tensor] = {}
        self._source: tuple[int, Weights] = (0, [])
        self._kept: torch.Tensor | None = None  # the promise under which a graph quantised last

    @hidden
    @torch.no_grad()
    def refresh(
        self, full: Mapping[str, torch.Tensor], numbers: ModuleType, promise: Promise
    ) -> None:
        """Quantise the weights, with the functions of `formats` or its twin `numbers`.

        promise: while it stays the same, weights that torch considers unchanged are not quantised
            again. In a captured graph, the device decides that at every replay.
        """
        if _captured(full):
            self._capture(full, numbers, promise.on_device)
            return
        if self._kept is None:
            with torch.inference_mode(False):
                device = full["down_proj"].device
                self._kept = torch.zeros(1, dtype=torch.int32, device=device)
        source = promise.number, bundle_versions(full)
        if promise.number and source == self._source:
            return
        for name, weight in full.items():
            numbers.quantise(self._form, weight.detach(), *self._memory(name, weight))
        self._source = source

    def _capture(
        self,
        full: Mapping[str, torch.Tensor],
        numbers: ModuleType,
        promised: torch.Tensor | None,
    ) -> None:
        """Capture kernels that quantise the weights once per promise, or always without one."""
        kept = None if promised is None or self._kept is None else (promised, self._kept)
        for name, weight in full.items():
            numbers.quantise(self._form, weight.detach(), *self._memory(name, weight), kept)
        self._source = 0, []
        if kept is not None:
            kept[1].copy_(kept[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return codes and scales by name."""
        return dict(self._held)

    def _memory(self, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data = self._held.get(name)
        if data is None or (data.shape, data.device) != (weight.shape, weight.device):
            shape = self._form.scale_shape(tuple(weight.shape))
            with torch.inference_mode(False):
                self._held[name] = weight.new_empty(weight.shape, dtype=E4M3)
                self._held[WEIGHTS[name]] = weight.new_empty(shape, dtype=self._form.scale_type)
        return self._held[name], self._held[WEIGHTS[name]]


def _captured(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a graph capture uses these tensors."""
    cuda = any(tensor.is_cuda for tensor in tensors.values())
    return cuda and torch.cuda.is_current_stream_capturing()


def check_quantised(form: Format, tensors: Mapping[str, torch.Tensor], homes: int) -> None:
    """Raise if the tensors are not the weights of `homes` experts in that format."""
    for name, scales_name in WEIGHTS.items():
        missing = [n for n in (name, scales_name) if n not in tensors]
        if missing:
            raise ConfigError(f"{form.name} needs {missing[0]!r}, got {', '.join(tensors)}")
        data, scales = tensors[name], tensors[scales_name]
        if data.ndim != 3 or len(data) != homes or data.dtype != E4M3:
            raise ConfigError(
                f"{name!r} must be [{homes}, N, K] {E4M3}, got {list(data.shape)} {data.dtype}"
            )
        wanted = form.scale_shape(tuple(data.shape))
        if tuple(scales.shape) != wanted or scales.dtype != form.scale_type:
            raise ConfigError(
                f"{scales_name!r} must be {list(wanted)} {form.scale_type} for {name!r} "
                f"{list(data.shape)} in {form.name}, got {list(scales.shape)} {scales.dtype}"
            )
        valid = scales != NAN_BYTE
        if scales.is_floating_point():
            valid = (scales > 0) & scales.isfinite()
        if not valid.all():
            raise ConfigError(
                f"{scales_name!r} must be positive and finite, but {int((~valid).sum())} of "
                f"{scales.numel()} scales are not"
            )
