"""Mapped memory between processes of a gloo group, without a GPU."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ultraep.runtime.mapped import peers


class SharedPeers(peers.SharedPeers):
    """One rank of a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()
        super().__init__(self)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values
