"""Peers on symmetric memory of torch.distributed: GPUs that map each other's memory.

Several processes may share one device for development, with
`TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1` in the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from ultraep.comm import Region
from ultraep.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SymmetricPeers:
    """One rank of a group whose devices map each other's memory."""

    def __init__(self, group: ProcessGroup, device: torch.device | str | None = None) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.device = torch.empty(0, device=device or "cuda").device
        if self.device.type != "cuda":
            raise ConfigError(f"symmetric memory needs GPUs, got device {self.device}")
        self._regions: list[Region] = []

    def allocate(self, name: str, nbytes: int) -> Region:
        wanted = self.gather_objects((name, nbytes))
        if len(set(wanted)) > 1:
            listed = "; ".join(
                f"rank {r}: {n} bytes for {what!r}" for r, (what, n) in enumerate(wanted)
            )
            raise ConfigError(f"ranks want different memory: {listed}")
        with torch.cuda.device(self.device), torch.inference_mode(False):
            try:
                local = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
                handle = symmetric_memory.rendezvous(local, self.group)
            except RuntimeError as error:
                raise CommunicationError(
                    f"rank {self.rank} of {self.size} cannot share {nbytes} bytes for {name!r} "
                    f"with its peers: {error}"
                ) from error
            local.zero_()
            torch.cuda.synchronize()
            addresses = torch.tensor(list(handle.buffer_ptrs), device=self.device)
        dist.barrier(self.group)  # nobody writes before all have zeros
        region = Region(local, addresses, handle)
        self._regions.append(region)
        return region

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Forget the memory; the group stays."""
        self._regions.clear()
