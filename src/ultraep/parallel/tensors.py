"""What a rank has of a tensor that may be a DTensor; without its import, which takes a second."""

from __future__ import annotations

import math
from typing import Any

import torch


def mesh_of(tensor: torch.Tensor) -> Any:
    """The ranks of a DTensor; None for any other tensor."""
    return getattr(tensor, "device_mesh", None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    distributed: Any = tensor
    return tensor if mesh_of(tensor) is None else distributed.to_local()


def pieces(tensor: torch.Tensor) -> int:
    """Into how many parts it is split."""
    if mesh_of(tensor) is None:
        return 1
    distributed: Any = tensor
    placed = zip(mesh_of(tensor).shape, distributed.placements, strict=True)
    return math.prod(ranks for ranks, placement in placed if placement.is_shard())
