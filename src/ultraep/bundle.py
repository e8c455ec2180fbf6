"""The tensors of an expert as one row of bytes: what a spare slot holds and what travels.

A bundle is any number of tensors per expert (weights, biases, quantised data with their scales),
each stacked over the home experts of a rank, given as a tensor or as a function that returns one.
Functions are called at every use: frameworks that shard their weights move them between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ultraep.errors import ConfigError

Bundle = Mapping[str, torch.Tensor | Callable[[], torch.Tensor]]
ALIGNMENT = 64


def resolve(bundle: Bundle) -> dict[str, torch.Tensor]:
    """The tensors of a bundle, as they are now."""
    return {name: t if isinstance(t, torch.Tensor) else t() for name, t in bundle.items()}


def given_tensors(bundle: Bundle) -> list[torch.Tensor]:
    """Those tensors of a bundle that are given as such: what functions return may be new."""
    return [given for given in bundle.values() if isinstance(given, torch.Tensor)]


@dataclass(frozen=True)
class Layout:
    """Where each tensor of one expert stands in a row of bytes."""

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # name, shape, type

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], homes: int) -> Layout:
        """The layout of stacked tensors; every one must hold `homes` experts."""
        if not tensors:
            raise ConfigError("a bundle needs at least one tensor")
        for name, tensor in tensors.items():
            if not tensor.ndim or len(tensor) != homes:
                raise ConfigError(
                    f"{name!r} must be stacked over {homes} home experts, "
                    f"got shape {list(tensor.shape)}"
                )
        return cls(tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in tensors.items()))

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Begin and end of every tensor in the row."""
        spans, begin = {}, 0
        for name, shape, dtype in self.parts:
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            spans[name] = (begin, end)
            begin = -(-end // ALIGNMENT) * ALIGNMENT
        return spans

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return max(-(-end // ALIGNMENT) * ALIGNMENT for _, end in self.spans.values())

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor of the bundle `[rows, ...]` as a view of rows of bytes."""
        views = {}
        for name, shape, dtype in self.parts:
            begin, end = self.spans[name]
            views[name] = rows[:, begin:end].view(dtype).unflatten(1, shape or (1,))
            if not shape:
                views[name] = views[name].squeeze(1)
        return views

    def pack(self, tensors: Mapping[str, torch.Tensor], index: int) -> torch.Tensor:
        """The row of bytes of one stacked expert."""
        some = next(iter(tensors.values()))
        row = torch.zeros(1, self.nbytes, dtype=torch.uint8, device=some.device)
        for name, view in self.views(row).items():
            view[0].copy_(tensors[name][index].detach())
        return row[0]


def kinds(tensors: Mapping[str, torch.Tensor], **others: torch.Tensor | None) -> str:
    """What ranks must have alike: names, shapes and types of tensors, and who wants gradients."""
    named = {**tensors, **{name: t for name, t in others.items() if t is not None}}
    learning = torch.is_grad_enabled()
    return ", ".join(
        f"{name} {list(t.shape[1:])} {t.dtype}{' with gradient' * (learning and t.requires_grad)}"
        for name, t in named.items()
    )
