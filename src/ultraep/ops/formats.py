"""Numbers of eight bits with scales: how weights and rows are quantised, and made plain again.

An e4m3 number has three bits behind its first one: it is off by 2^-4 of itself at most, and by
2^-10 of the scale where it is small. Numbers in groups share a scale. Scales that are made here are
powers of two, so that dequantised numbers have no more bits than bfloat16 has; those of checkpoints
may be any positive ones. Groups of one row take the scale of the largest of them where it is within
reach of their own: an e4m3 number has an exponent itself, so that hardly any bit is lost, and where
scales do not change, products need not be scaled before they are added.

    quantise, dequantise    weights: e4m3 numbers and their scales, two tensors
    pack, unpack            rows: each with its scales behind it, one row of bytes, which travels

Shapes: A rows, N and K those of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ultraep.errors import ConfigError

E4M3 = torch.float8_e4m3fn
ALIGNMENT = 16  # bytes, of a packed row and of the scales in it
CARRY = 0x1FFFFF  # into the exponent, from a mantissa above that of 448 = 1.75 * 2**8
LARGEST = 8  # exponent of the largest number, 448
LEAST = 127 - 40  # biased exponent of the smallest scale: two of them never differ by 2**96
ONE = 127  # biased exponent
REACH = 4  # powers of two by which the scale of a row may be above that of a group


@dataclass(frozen=True)
class Format:
    """How a weight is quantised, and the rows that it meets.

    height, width: rows and columns of a weight that share a scale; width 0: all columns.
    bytes_of_exponents: scales are one byte, a power of two (ue8m0); else float32.
    packs: rows are quantised as well, in groups of `width`; else they meet dequantised weights.
    """

    name: str
    height: int
    width: int
    bytes_of_exponents: bool = False
    packs: bool = True

    @property
    def scale_type(self) -> torch.dtype:
        return torch.uint8 if self.bytes_of_exponents else torch.float32

    def groups(self, columns: int) -> int:
        """Scales of a row of so many columns."""
        return _pieces(columns, self.width) if self.width else 1

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of weights `[..., N, K]`."""
        *outer, height, columns = shape
        return *outer, _pieces(height, self.height), self.groups(columns)

    def scales_at(self, columns: int) -> int:
        """Bytes of a packed row before its scales."""
        return ALIGNMENT * _pieces(columns, ALIGNMENT)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a packed row."""
        scales = ALIGNMENT * _pieces(4 * self.groups(columns), ALIGNMENT)
        return self.scales_at(columns) + scales

    def parts(self, packed: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[A, K] e4m3 numbers and [A, groups] float32 scales: views of packed rows."""
        assert packed.shape[1] == self.row_bytes(columns), (packed.shape, columns)
        at = self.scales_at(columns)
        scales = packed[:, at : at + 4 * self.groups(columns)]
        return packed[:, :columns].view(E4M3), scales.view(torch.float32)


FORMATS = {
    form.name: form
    for form in (
        Format("fp8", 128, 128),
        Format("fp8_rows", 1, 0),
        Format("mxfp8", 1, 32, bytes_of_exponents=True, packs=False),
    )
}


def format_named(name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def quantise(form: Format, values: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Weights `[..., N, K]` into e4m3 numbers and their scales."""
    made, exponents = _quantise(values, form.height, form.width or values.shape[-1])
    data.copy_(made)
    scales.copy_(exponents if form.bytes_of_exponents else _powers(exponents))


def dequantise(
    form: Format, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[..., N, K] weights, rounded once where the type cannot hold them."""
    return _dequantise(data, scales, form.height, form.width or data.shape[-1], dtype)


def pack(form: Format, rows: torch.Tensor) -> torch.Tensor:
    """[A, bytes] rows `[A, K]`, each with its scales behind it."""
    columns = rows.shape[1]
    if not len(rows):
        return rows.new_empty(0, form.row_bytes(columns), dtype=torch.uint8)
    data, exponents = _quantise(rows, 1, form.width or columns, level=True)
    numbers, scales = data.view(torch.uint8), _powers(exponents).view(torch.uint8)
    numbers = pad(numbers, (0, form.scales_at(columns) - columns))
    left = form.row_bytes(columns) - numbers.shape[1] - scales.shape[1]
    return torch.cat([numbers, pad(scales, (0, left))], dim=1)


def unpack(form: Format, packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[A, K] rows; types of three bits and more hold them exactly."""
    data, scales = form.parts(packed, columns)
    return _dequantise(data, scales, 1, form.width or columns, dtype)


def _quantise(
    values: torch.Tensor, height: int, width: int, *, level: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4m3 numbers, and the exponent of a scale for each group of height x width of them."""
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
    factors = _spread(_as_numbers(scales).to(wide), height, width, data.shape)
    return (data.to(wide) * factors).to(dtype)


def exponents_of(largest: torch.Tensor) -> torch.Tensor:
    """Biased exponents of the scales of groups with such largest numbers: the least that suffice.

    >>> (exponents_of(torch.tensor([448.0, 449.0, 0.4375, 0.0])) - ONE).tolist()
    [0, 1, -10, 0]
    """
    found = ((largest.view(torch.int32) + CARRY) >> 23) - LARGEST
    return torch.where(largest == 0, ONE, found.clamp(min=LEAST)).to(torch.int32)


def _levelled(exponents: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Raise those of the groups of a row to the highest, where it is in reach or they are zero.

    >>> largest = torch.tensor([[448.0, 3.5, 100.0, 0.0, 28.0]])
    >>> (_levelled(exponents_of(largest), largest) - ONE).tolist()
    [[0, -7, 0, 0, 0]]
    """
    top = exponents.where(largest != 0, 0).amax(dim=-1, keepdim=True)
    near = (largest == 0) | (top - exponents <= REACH)
    return torch.where(near & (top > 0), top, exponents)


def _as_numbers(scales: torch.Tensor) -> torch.Tensor:
    return _powers(scales.to(torch.int32)) if scales.dtype == torch.uint8 else scales


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Two to the power of biased exponents."""
    return (exponents << 23).view(torch.float32)


def _spread(factors: torch.Tensor, height: int, width: int, shape: torch.Size) -> torch.Tensor:
    """[..., N, K] the factor of every number, from that of its group."""
    spread = factors.repeat_interleave(height, dim=-2)[..., : shape[-2], :]
    return spread.repeat_interleave(width, dim=-1)[..., : shape[-1]]


def _pieces(number: int, size: int) -> int:
    return -(-number // size)
