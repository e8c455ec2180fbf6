"""Ranks that share one GPU: their processes, and a balancer for each data plane."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from ultraep import Balancer, ConfigError
from ultraep.comm import Communicator, Message, Peers
from ultraep.runtime.connect import connect
from ultraep.runtime.mapped.peers import SymmetricPeers

PATIENCE = 120.0  # seconds; enough to compile kernels


@contextmanager
def processes(size: int) -> Iterator[RankPool]:
    """Processes in which many streams run at the same time, and which may share the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        with RankPool(size) as pool:
            yield pool


def mapped(group: dist.ProcessGroup, **options: Any) -> Balancer:
    """A rank whose memory the others map."""
    warnings.simplefilter("default")  # torch's symmetric memory warns
    peers = SymmetricPeers(group, device="cuda:0")
    return Balancer(group, peers=peers, data_plane="mapped", timeout=PATIENCE, **options)


def messages(group: dist.ProcessGroup, **options: Any) -> Balancer:
    """A rank of the same group that uses messages."""
    communicator = ThroughHost(connect(group, timeout=PATIENCE))
    return Balancer(communicator=communicator, data_plane="messages", **options)


class ThroughHost:
    """Messages of a GPU through the host, because gloo cannot send all GPU tensors."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size, self.timeout = comm.rank, comm.size, comm.timeout

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._comm.all_gather(tensor.detach().cpu()).to(tensor.device)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        sent = rows.detach().cpu()
        return self._comm.all_to_all(sent, send_counts, receive_counts).to(rows.device)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        arrived = [
            Message(m.peer, torch.empty(m.tensor.shape, dtype=m.tensor.dtype)) for m in receives
        ]
        self._comm.exchange([Message(m.peer, m.tensor.detach().cpu()) for m in sends], arrived)
        for message, staged in zip(receives, arrived, strict=True):
            message.tensor.detach().copy_(staged.tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._comm.gather_objects(value)

    def hosts(self) -> Communicator | None:
        return self._comm.hosts()

    def peers(self, device: torch.device) -> Peers:
        raise ConfigError(f"messages only, also on {device}")

    def close(self) -> None:
        self._comm.close()
