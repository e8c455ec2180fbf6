"""The data plane of mapped memory: one GPU per rank, all of which map each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ultraep.backends import BACKENDS
from ultraep.runtime.microbatch import PlaneKind, Shared, Site

if TYPE_CHECKING:
    from ultraep.microbatch import DataPlane


def passed_over(site: Site) -> str:
    if site.peers is not None:
        return ""
    if site.links.groups > 1:
        return f"no fast link joins all ranks ({site.links.reason})"
    return "tokens are on the CPU" if site.device.type == "cpu" else ""


def obstacle(_: Site) -> str:
    triton = next(backend for backend in BACKENDS if backend.name == "triton")
    return f"the backend 'triton' {triton.obstacle}" if triton.obstacle else ""


def _connect(site: Site) -> Callable[[Shared], DataPlane]:
    """Map the memory of all ranks; collective."""
    peers = site.peers
    if peers is None:
        peers = site.comm.peers(site.device)
        peers.allocate("probe", 64)
    from ultraep.runtime.mapped.plane import MappedPlane  # imports triton

    return partial(MappedPlane, peers=peers)


PLANE = PlaneKind(
    "mapped",
    _connect,
    obstacle,
    passed_over,
    reason="all {size} ranks map each other's memory",
    captures=True,
)
