"""Ranks that share one GPU: their processes, and a balancer for each data plane."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from mps import ThroughHost, rank_environment
from ranks import RankPool

from ultraep import Balancer
from ultraep.runtime.connect import connect

PATIENCE = 120.0  # seconds; enough to compile kernels


@contextmanager
def processes(size: int, directories: dict[str, str]) -> Iterator[RankPool]:
    """Processes that share the GPU; directories: of CUDA MPS, empty: they take turns."""
    with pytest.MonkeyPatch.context() as patch:
        environment = directories | rank_environment(size)
        if not directories:
            del environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
        for name, value in environment.items():
            patch.setenv(name, value)
        with RankPool(size) as pool:
            yield pool


def mapped(group: dist.ProcessGroup, **options: Any) -> Balancer:
    """A rank whose memory the others map."""
    warnings.simplefilter("default")  # torch's symmetric memory warns
    return Balancer._with_settings(group, data_plane="mapped", timeout=PATIENCE, **options)


def messages(group: dist.ProcessGroup, **options: Any) -> Balancer:
    """A rank of the same group that uses messages."""
    communicator = ThroughHost(connect(group, timeout=PATIENCE))
    return Balancer._with_settings(communicator, data_plane="messages", **options)


def hybrid(group: dist.ProcessGroup, **options: Any) -> Balancer:
    """A rank of the same group that maps the memory of its domain."""
    warnings.simplefilter("default")  # torch's symmetric memory warns
    communicator = ThroughHost(connect(group, timeout=PATIENCE))
    return Balancer._with_settings(communicator, data_plane="hybrid", timeout=PATIENCE, **options)
