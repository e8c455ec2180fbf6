"""The data plane of mapped memory: one GPU per rank, all of which map each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ultraep.backends import kernels_obstacle
from ultraep.microbatch import Context
from ultraep.runtime.planes import DataPlane, PlaneKind, PlaneRequest


def passed_over(request: PlaneRequest) -> str:
    if request.peers is not None:
        return ""
    if request.links.groups > 1:
        return f"no fast link joins all ranks ({request.links.reason})"
    return "tokens are on the CPU" if request.device.type == "cpu" else ""


def obstacle(_: PlaneRequest) -> str:
    return kernels_obstacle()


def _connect(request: PlaneRequest) -> Callable[[Context], DataPlane]:
    """Map the memory of all ranks; collective."""
    peers = request.peers
    if peers is None:
        peers = request.comm.peers(request.device)
        peers.allocate("probe", 64)
    from ultraep.runtime.mapped.plane import MappedPlane  # imports triton

    return partial(MappedPlane, peers=peers)


PLANE = PlaneKind(
    "mapped",
    _connect,
    obstacle,
    passed_over,
    reason="all {size} ranks map each other's memory",
)
