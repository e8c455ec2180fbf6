"""Local parts of tensors that may be DTensors, without importing DTensor (one second)."""

from __future__ import annotations

import math
from typing import Any

import torch


def mesh_of(tensor: torch.Tensor) -> Any:
    """Return the device mesh of a DTensor; None for other tensors."""
    return getattr(tensor, "device_mesh", None)


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor on this rank."""
    part: torch.Tensor = tensor if mesh_of(tensor) is None else tensor.to_local()
    return part


def num_shards(tensor: Any) -> int:
    """Return the number of parts that a tensor is split into."""
    if mesh_of(tensor) is None:
        return 1
    sizes = zip(mesh_of(tensor).shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())
