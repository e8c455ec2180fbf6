"""Weights in eight bits for benchmarks, as they are quantised here and as checkpoints have them."""

from __future__ import annotations

import torch
from grouped_mlp import as_stacks
from torch.nn.functional import pad

from ultraep.ops.formats import E4M3, Format

LARGEST = 448.0


class Quantised:
    """A weight of every slot in one format, and the rows that it meets."""

    def __init__(
        self, form: Format, weights: torch.Tensor, rows: torch.Tensor, any_scales: bool = False
    ) -> None:
        from ultraep.backends.triton import quantise
        from ultraep.ops.quantised import QuantisedStacks

        self.form, self._verbs = form, quantise
        self.data = torch.empty_like(weights, dtype=E4M3)
        shape = form.scale_shape(tuple(weights.shape))
        self.scales = weights.new_empty(shape, dtype=form.scale_type)
        quantise.quantise(form, weights, self.data, self.scales)
        if any_scales:
            take_any_scales(form, weights, self.data, self.scales)
        self.stacks = QuantisedStacks(as_stacks(self.data), as_stacks(self.scales))
        self.rows, self._width = rows, rows.shape[1]
        self.given = quantise.pack(form, rows) if form.packs else rows

    def exact(self, slot: int, part: slice) -> torch.Tensor:
        """The product of the numbers that are multiplied."""
        weight = self._verbs.dequantise(
            self.form, self.data[slot], self.scales[slot], torch.float32
        )
        rows = self.rows[part]
        if self.form.packs:
            rows = self._verbs.unpack(self.form, self.given[part], self._width, torch.float32)
        return rows.double() @ weight.double().T


def take_any_scales(
    form: Format, weights: torch.Tensor, data: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantise weights as many checkpoints are: the largest number of every block becomes 448."""
    rows, columns = weights.shape[1:]
    padded = pad(weights, (0, -columns % form.width, 0, -rows % form.height))
    blocks = padded.unflatten(2, (-1, form.width)).unflatten(1, (-1, form.height))
    scales.copy_(blocks.abs().amax(dim=(2, 4)).float() / LARGEST)
    spread = scales.repeat_interleave(form.height, dim=1)[:, :rows]
    spread = spread.repeat_interleave(form.width, dim=2)[..., :columns]
    data.copy_((weights / spread).clamp(-LARGEST, LARGEST))
