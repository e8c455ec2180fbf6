"""The data plane of several fast-link domains: mapped memory inside, messages between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ultraep.microbatch import Context
from ultraep.runtime import mapped
from ultraep.runtime.planes import DataPlane, PlaneKind, PlaneRequest


def _passed_over(request: PlaneRequest) -> str:
    if request.topology.num_domains == 1:
        return request.links.reason
    if request.links.groups == 1 and request.device.type == "cpu" and request.peers is None:
        return "tokens are on the CPU"
    return ""


def _obstacle(request: PlaneRequest) -> str:
    topology = request.topology
    if topology.num_domains == 1:
        return (
            f"all {topology.ranks} ranks are in one domain: pass domain=, the number of "
            "consecutive ranks that a fast link joins"
        )
    return "" if _of_messages(request) else mapped.obstacle(request)


def _of_messages(request: PlaneRequest) -> bool:
    """Whether rows also move by messages inside of a domain: CPU ranks have no mapped memory."""
    return request.device.type == "cpu" and request.peers is None


def _connect(request: PlaneRequest) -> Callable[[Context], DataPlane]:
    """Connect the ranks of this rank's domain; collective."""
    for domain in range(request.topology.num_domains):
        request.topology.of_domain(domain)  # raises if a domain has too few experts
    inside = request.comm.part(request.topology.domain_size)
    peers = None
    if not _of_messages(request):
        peers = request.peers or inside.peers(request.device)
        peers.allocate("probe", 64)
    from ultraep.runtime.hybrid.plane import HybridPlane

    return partial(HybridPlane, comm=inside, peers=peers)


PLANE = PlaneKind(
    "hybrid",
    _connect,
    _obstacle,
    _passed_over,
    reason="fast links join the ranks of each domain",
)
