"""Memory that ranks map: GPUs of a process group, or the one device of a process alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ultraep.comm import Gathers, Peers, Region, raise_together
from ultraep.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OnePeer:
    """The memory of a process that is the whole group."""

    rank, size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its number

    def allocate(self, _name: str, nbytes: int) -> Region:
        local = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return Region(local, torch.tensor([local.data_ptr()], device=self.device))

    def close(self) -> None:
        """Do nothing: the last tensor frees the memory."""


class SymmetricPeers:
    """One rank of a group whose GPUs map each other's memory: torch's symmetric memory.

    Several processes may share one device for development, with
    `TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1` in the environment.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | str | None = None) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.device = torch.empty(0, device=device or "cuda").device
        if self.device.type != "cuda":
            raise ConfigError(f"symmetric memory needs GPUs, got device {self.device}")
        self._regions: list[Region] = []

    def allocate(self, name: str, nbytes: int) -> Region:
        import torch.distributed._symmetric_memory as symmetric_memory

        check_same(self.gather_objects((name, nbytes)))
        empty = partial(symmetric_memory.empty, nbytes, dtype=torch.uint8, device=self.device)
        what = f"share {nbytes} bytes for {name!r}"
        with torch.cuda.device(self.device), torch.inference_mode(False):
            local = together(self, what, empty)
            handle = together(self, what, partial(symmetric_memory.rendezvous, local, self.group))
            local.zero_()
            torch.cuda.synchronize()
            addresses = torch.tensor(list(handle.buffer_ptrs), device=self.device)
        torch.distributed.barrier(self.group)  # no rank writes before all have zeros
        region = Region(local, addresses, handle)
        self._regions.append(region)
        return region

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Free the memory; the group stays."""
        self._regions.clear()


def check_same(requests: list[tuple[str, int]]) -> None:
    """Raise if ranks allocate memory with different names or sizes."""
    if len(set(requests)) > 1:
        listed = "; ".join(
            f"rank {rank}: {size} bytes for {name!r}" for rank, (name, size) in enumerate(requests)
        )
        raise ConfigError(f"ranks allocate different memory: {listed}")


def together(peers: Gathers, what: str, act: Callable[[], Any]) -> Any:
    """Return the result of `act`; if it fails on any rank, raise on all of them."""
    result, failure = None, None
    try:
        result = act()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0] or repr(error)
        failure = CommunicationError(f"cannot {what} with its peers: {reason}")
    raise_together(peers, failure)
    return result


def mapped_by(group: ProcessGroup, device: torch.device) -> Peers:
    """Return memory of the ranks' GPUs that all ranks map, whatever backend the group has."""
    if device.type != "cuda":
        raise ConfigError(f"tokens are on {device}, and only GPUs map each other's memory")
    return OnePeer(device) if group.size() == 1 else SymmetricPeers(group, device)
