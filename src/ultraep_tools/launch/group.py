"""The process group of the ranks, and the core or GPU of each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ultraep.errors import ConfigError
from ultraep_tools.launch.processes import RankPlace

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@contextmanager
def process_group(
    place: RankPlace | None = None, device: str = "cpu"
) -> Iterator[dist.ProcessGroup]:
    """Yield the group of all ranks; without a place, of torchrun or of this process alone."""
    backend = BACKENDS[device]
    place = place or RankPlace.of_torchrun()
    if place is None:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    elif place.store is None:
        dist.init_process_group(backend)
    else:
        store = f"file://{place.store}"
        dist.init_process_group(backend, init_method=store, rank=place.rank, world_size=place.size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gpus() -> int:
    """Return the number of GPUs; raise if torch finds no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, but torch finds none; use --device cpu")
    return torch.cuda.device_count()


def settle(place: RankPlace, device: str, *, shared: bool = False) -> torch.device:
    """Bind this process to one core and thread, or to one GPU; return the device.

    shared: several ranks may use the same GPU.
    """
    if device == "cuda":
        if place.local >= gpus() and not shared:
            raise ConfigError(
                f"rank {place.rank} has no GPU: local rank {place.local}, but torch finds "
                f"{gpus()}; start fewer ranks per host"
            )
        gpu = torch.device("cuda", place.local % gpus())
        torch.cuda.set_device(gpu)
        return gpu
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:  # not yet bound by torchrun
            os.sched_setaffinity(0, {cores[place.local % len(cores)]})
    return torch.device("cpu")
