"""Quantised formats: how weights and rows are quantised and dequantised.

An e4m3 number has three mantissa bits: its error is at most 2^-4 of itself, and 2^-10 of the scale
for small numbers. Groups of numbers share a scale. Scales computed here are powers of two, so that
dequantised numbers fit bfloat16; scales of checkpoints may be any positive numbers. Groups of one
row use the scale of the largest group if it is within REACH of their own: e4m3 has an exponent, so
that hardly any precision is lost, and where scales do not change, partial sums need no scaling.

    quantise, dequantise    weights: e4m3 codes and scales, two tensors
    pack, unpack            rows: the codes of a row, then its scales, as bytes that can be sent
    WEIGHT_ONLY             formats of checkpoints whose weights are only dequantised

Shapes: A rows, N and K of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ultraep.errors import ConfigError

E4M3 = torch.float8_e4m3fn
ALIGNMENT = 16  # bytes, of a packed row and of the scales in it
CARRY = 0x1FFFFF  # carries into the exponent for mantissas above 1.75, as 448 = 1.75 * 2**8
LARGEST = 8  # exponent of the largest number, 448
LEAST = 127 - 40  # biased exponent of the smallest scale: ratios of scales stay below 2**96
ONE = 127  # biased exponent
REACH = 4  # powers of two by which a group's scale may be raised to the row's


@dataclass(frozen=True)
class Format:
    """How weights are quantised, and the rows they are multiplied with.

    height, width: rows and columns of a weight that share a scale; width 0: all columns.
    scale_type: float32, or uint8 for the exponents of powers of two (ue8m0).
    packs: rows are quantised, too, in groups of `width`; otherwise weights are dequantised.
    """

    name: str
    height: int
    width: int
    scale_type: torch.dtype = torch.float32
    packs: bool = True

    def groups(self, columns: int) -> int:
        """Return the number of scales of a row."""
        return _pieces(columns, self.width) if self.width else 1

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of weights `[..., N, K]`."""
        *outer, height, columns = shape
        return *outer, _pieces(height, self.height), self.groups(columns)

    def scales_at(self, columns: int) -> int:
        """Return the offset of the scales in a packed row, in bytes."""
        return ALIGNMENT * _pieces(columns, ALIGNMENT)

    def row_bytes(self, columns: int) -> int:
        """Return the size of a packed row in bytes."""
        scales = ALIGNMENT * _pieces(4 * self.groups(columns), ALIGNMENT)
        return self.scales_at(columns) + scales

    def parts(self, packed: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of packed rows: [A, K] e4m3 codes and [A, groups] float32 scales."""
        assert packed.shape[1] == self.row_bytes(columns), (packed.shape, columns)
        at = self.scales_at(columns)
        scales = packed[:, at : at + 4 * self.groups(columns)]
        return packed[:, :columns].view(E4M3), scales.view(torch.float32)


FORMATS = {
    form.name: form
    for form in (
        Format("fp8", 128, 128),
        Format("fp8_rows", 1, 0),
        Format("mxfp8", 1, 32, scale_type=torch.uint8, packs=False),
    )
}


def format_named(name: str) -> Format:
    """Return the format of that name."""
    if name in WEIGHT_ONLY:
        raise ConfigError(
            f"format {name!r} is for weights only; use ExpertsFrom with weight_only({name!r}), or "
            f"choose from {', '.join(FORMATS)}"
        )
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; choose from {', '.join(FORMATS)}")
    return FORMATS[name]


def quantise(form: Format, values: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise weights `[..., N, K]` into e4m3 codes and their scales."""
    codes, exponents = _quantise(values, form.height, form.width or values.shape[-1])
    data.copy_(codes)
    scales.copy_(exponents if scales.dtype == torch.uint8 else _powers(exponents))


def dequantise(
    form: Format, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return weights [..., N, K], rounded once if the dtype cannot hold them."""
    return _dequantise(data, scales, form.height, form.width or data.shape[-1], dtype)


def pack(form: Format, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [A, K] as bytes: the codes of a row, then its scales."""
    columns = rows.shape[1]
    if not len(rows):
        return rows.new_empty(0, form.row_bytes(columns), dtype=torch.uint8)
    data, exponents = _quantise(rows, 1, form.width or columns, level=True)
    numbers, scales = data.view(torch.uint8), _powers(exponents).view(torch.uint8)
    numbers = pad(numbers, (0, form.scales_at(columns) - columns))
    left = form.row_bytes(columns) - numbers.shape[1] - scales.shape[1]
    return torch.cat([numbers, pad(scales, (0, left))], dim=1)


def unpack(form: Format, packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [A, K]; dtypes with three or more mantissa bits hold them exactly."""
    data, scales = form.parts(packed, columns)
    return _dequantise(data, scales, 1, form.width or columns, dtype)


def _quantise(
    values: torch.Tensor, height: int, width: int, *, level: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes, and the exponent of the scale of each height x width group."""
    rows, columns = values.shape[-2:]
    values = values.float()
    groups = pad(values, (0, -columns % width, 0, -rows % height))
    groups = groups.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    largest = groups.abs().amax(dim=(-3, -1))
    exponents = exponents_of(largest)
    if level:
        exponents = _levelled(exponents, largest)
    scaled = values * _spread(_powers(2 * ONE - exponents), height, width, values.shape)
    return torch.where(scaled.isinf(), torch.nan, scaled).to(E4M3), exponents


def _dequantise(
    data: torch.Tensor, scales: torch.Tensor, height: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if scales.dtype == torch.uint8:
        scales = _powers(scales.to(torch.int32))
    factors = _spread(scales.to(wide), height, width, data.shape)
    return (data.to(wide) * factors).to(dtype)


def exponents_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the least biased exponents that scale groups with these maxima to 448 or less.

    >>> (exponents_of(torch.tensor([448.0, 449.0, 0.4375, 0.0])) - ONE).tolist()
    [0, 1, -10, 0]
    """
    exponents = ((largest.view(torch.int32) + CARRY) >> 23) - LARGEST
    return torch.where(largest == 0, ONE, exponents.clamp(min=LEAST)).to(torch.int32)


def _levelled(exponents: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Raise exponents to the row's highest where it is within REACH or the group is zero.

    >>> largest = torch.tensor([[448.0, 3.5, 100.0, 0.0, 28.0]])
    >>> (_levelled(exponents_of(largest), largest) - ONE).tolist()
    [[0, -7, 0, 0, 0]]
    """
    top = exponents.where(largest != 0, 0).amax(dim=-1, keepdim=True)
    near = (largest == 0) | (top - exponents <= REACH)
    return torch.where(near & (top > 0), top, exponents)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return two to the power of biased exponents."""
    return (exponents << 23).view(torch.float32)


def _spread(factors: torch.Tensor, height: int, width: int, shape: torch.Size) -> torch.Tensor:
    """[..., N, K] the factor of every element, from the factor of its group."""
    spread = factors.repeat_interleave(height, dim=-2)[..., : shape[-2], :]
    return spread.repeat_interleave(width, dim=-1)[..., : shape[-1]]


def _pieces(number: int, size: int) -> int:
    return -(-number // size)


# Weight-only formats: two codes share a byte, the low one first; groups of columns share a scale.


@dataclass(frozen=True)
class WeightOnly:
    """A format of checkpoints.

    parts: the tensors of a weight, codes first.
    numbers: returns the `[..., N, K]` numbers that the codes stand for, without scales.
    """

    parts: tuple[str, ...]
    numbers: Callable[[torch.Tensor], torch.Tensor]

    def dequantise(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return weights `[..., N, K]`, rounded once if the dtype cannot hold them."""
        numbers, scales = self.numbers(parts["proj"]), parts["scales"]
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        if numbers.shape[:-1] != scales.shape[:-1] or numbers.shape[-1] % scales.shape[-1]:
            raise ConfigError(
                f"weights {list(numbers.shape)} need scales for each row and for groups of equal "
                f"width, got {list(scales.shape)}"
            )
        width = numbers.shape[-1] // scales.shape[-1]
        if "zeros" in parts:
            numbers = numbers - _spread(parts["zeros"], 1, width, numbers.shape)
        if "scale" in parts:
            scales = scales.float() * parts["scale"][..., None, None]
        return _dequantise(numbers, scales, 1, width, dtype)


def _codes(packed: torch.Tensor) -> torch.Tensor:
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    magnitudes = packed.new_tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32)
    return torch.cat([magnitudes, -magnitudes])[_codes(packed).int()]


WEIGHT_ONLY = {
    "mxfp4": WeightOnly(("proj", "scales"), _e2m1),  # scales: ue8m0
    "nvfp4": WeightOnly(("proj", "scales", "scale"), _e2m1),  # scales: e4m3; scale: one float32
    "int8": WeightOnly(("proj", "scales"), lambda codes: codes),
    "int4": WeightOnly(("proj", "scales", "zeros"), lambda packed: _codes(packed).to(torch.int8)),
}
