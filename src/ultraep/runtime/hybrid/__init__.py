"""The data plane of several fast-link domains: mapped memory inside, messages between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ultraep.comm import Communicator, Peers
from ultraep.config import AUTO
from ultraep.runtime import mapped
from ultraep.runtime.microbatch import PlaneKind, Shared, Site

if TYPE_CHECKING:
    from ultraep.microbatch import DataPlane


def _passed_over(site: Site) -> str:
    if site.topology.num_domains == 1:
        return site.links.reason
    if site.links.groups == 1 and site.device.type == "cpu" and site.peers is None:
        return "tokens are on the CPU"
    return ""


def _obstacle(site: Site) -> str:
    topology = site.topology
    if topology.num_domains == 1:
        return (
            f"all {topology.ranks} ranks are in one domain: pass domain=, the number of "
            "consecutive ranks that a fast link joins"
        )
    return "" if _of_messages(site) else mapped.obstacle(site)


def _of_messages(site: Site) -> bool:
    """Whether rows also move by messages inside of a domain: CPU ranks have no mapped memory."""
    return site.device.type == "cpu" and site.peers is None


def _connect(site: Site) -> Callable[[Shared], DataPlane]:
    """Connect the ranks of this rank's domain; collective."""
    for domain in range(site.topology.num_domains):
        site.topology.of_domain(domain)  # raises if a domain has too few experts
    inside = site.comm.part(site.topology.domain_size)
    if _of_messages(site):
        return partial(_make, inside=inside, peers=None)
    peers = site.peers or inside.peers(site.device)
    peers.allocate("probe", 64)
    return partial(_make, inside=inside, peers=peers)


def _make(shared: Shared, inside: Communicator, peers: Peers | None) -> DataPlane:
    """Return the plane of this rank; with a fixed capacity, no stage waits for the host."""
    if peers is None:
        from ultraep.runtime.hybrid.plane import HybridPlane

        return HybridPlane(shared, inside)
    if shared.capacity.setting == AUTO:
        from ultraep.runtime.hybrid.mapped_inside import MappedHybridPlane  # imports triton

        return MappedHybridPlane(shared, inside, peers)
    from ultraep.runtime.hybrid.static import StaticPlane  # imports triton

    return StaticPlane(shared, inside, peers)


PLANE = PlaneKind(
    "hybrid",
    _connect,
    _obstacle,
    _passed_over,
    reason="fast links join the ranks of each domain",
    captures=True,
)
