"""Ranks that share one GPU: their processes, and a balancer for each data plane."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from mps import ThroughHost
from ranks import RankPool

from ultraep import Balancer
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


def hybrid(group: dist.ProcessGroup, **options: Any) -> Balancer:
    """A rank of the same group that maps the memory of its domain."""
    warnings.simplefilter("default")  # torch's symmetric memory warns
    communicator = ThroughHost(connect(group, timeout=PATIENCE))
    return Balancer(communicator=communicator, data_plane="hybrid", timeout=PATIENCE, **options)
