"""The process group of the ranks, and the core of each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ultraep_tools.launch.processes import RankPlace


@contextmanager
def process_group(place: RankPlace) -> Iterator[dist.ProcessGroup]:
    """Yield the group of all ranks."""
    store = "env://" if place.store is None else f"file://{place.store}"
    dist.init_process_group("gloo", store, rank=place.rank, world_size=place.size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def settle(place: RankPlace) -> None:
    """Bind this process to one core and one thread."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place.local % len(cores)]})
