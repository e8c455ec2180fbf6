"""Data planes: what they are, and how the ranks of a balancer choose one.

All ranks choose together at the first microbatch, when they know the device of the tokens. `PLANES`
has the data planes in order of preference; the last one serves every group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ultraep.backends import kernels_obstacle
from ultraep.comm import Communicator, Peers
from ultraep.config import AUTO, check_choice
from ultraep.errors import CommunicationError, ConfigError, PlanMismatch
from ultraep.inputs import Inputs
from ultraep.microbatch import Context, Microbatch
from ultraep.position import differing
from ultraep.runtime.hosts import FastLinks
from ultraep.runtime.streams import capturing
from ultraep.topology import Topology

logger = logging.getLogger(__name__)


class DataPlane(Protocol):
    """Runs the microbatches of one rank and owns the memory that outlives them."""

    @property
    def name(self) -> str:
        """`messages`, `mapped` or `hybrid`."""

    @property
    def topology(self) -> Topology: ...

    def begin(self, inputs: Inputs, /) -> Microbatch:
        """Return a microbatch with these inputs."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for slots and transfers."""

    def check(self) -> None:
        """Wait for the device and raise the errors that it has recorded."""

    def close(self) -> None:
        """Free the memory. The process group stays open."""


class PlaneRequest(NamedTuple):
    """Where a data plane is needed: one rank of a group, with tokens on this device."""

    comm: Communicator
    topology: Topology
    links: FastLinks
    device: torch.device
    peers: Peers | None = None  # mapped memory that the user passed


class PlaneKind(NamedTuple):
    """A data plane that balancers can use.

    connect: collective; returns the function that makes the plane. If the group cannot be served,
        raises ConfigError or CommunicationError with the reason.
    obstacle: why this rank cannot use the plane, found without messages; empty if it can. None: the
        plane serves every group, so ranks need not compare their obstacles.
    passed_over: why data_plane="auto" does not try the plane here; empty if it does.
    reason: shown by `repr(balancer)` when the plane is chosen, with {size} ranks.
    """

    name: str
    connect: Callable[[PlaneRequest], Callable[[Context], DataPlane]]
    obstacle: Callable[[PlaneRequest], str] | None = None
    passed_over: Callable[[PlaneRequest], str] = lambda _: ""
    reason: str = "requested"


# -- mapped: one GPU per rank, all of which map each other's memory --------------------------------


def _mapped_passed_over(request: PlaneRequest) -> str:
    if request.peers is not None:
        return ""
    if request.links.groups > 1:
        return f"no fast link joins all ranks ({request.links.reason})"
    return "tokens are on the CPU" if request.device.type == "cpu" else ""


def _mapped(request: PlaneRequest) -> Callable[[Context], DataPlane]:
    """Map the memory of all ranks; collective."""
    peers = request.peers
    if peers is None:
        peers = request.comm.peers(request.device)
        peers.allocate("probe", 64)
    from ultraep.runtime.mapped.plane import MappedPlane  # imports triton

    return partial(MappedPlane, peers=peers)


# -- hybrid: mapped memory inside of a domain, messages between domains ----------------------------


def _hybrid_passed_over(request: PlaneRequest) -> str:
    if request.topology.num_domains == 1:
        return request.links.reason
    if request.links.groups == 1 and _of_messages(request):
        return "tokens are on the CPU"
    return ""


def _hybrid_obstacle(request: PlaneRequest) -> str:
    topology = request.topology
    if topology.num_domains == 1:
        return (
            f"all {topology.ranks} ranks are in one domain: pass domain=, the number of "
            "consecutive ranks that a fast link joins"
        )
    return "" if _of_messages(request) else kernels_obstacle()


def _of_messages(request: PlaneRequest) -> bool:
    """Whether rows also move by messages inside of a domain: CPU ranks have no mapped memory."""
    return request.device.type == "cpu" and request.peers is None


def _hybrid(request: PlaneRequest) -> Callable[[Context], DataPlane]:
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


# -- messages: any group of torch.distributed ------------------------------------------------------


def _messages(_: PlaneRequest) -> Callable[[Context], DataPlane]:
    from ultraep.runtime.messages.plane import MessagesPlane

    return MessagesPlane


PLANES = (
    PlaneKind(
        "mapped",
        _mapped,
        lambda _: kernels_obstacle(),
        _mapped_passed_over,
        reason="all {size} ranks map each other's memory",
    ),
    PlaneKind(
        "hybrid",
        _hybrid,
        _hybrid_obstacle,
        _hybrid_passed_over,
        reason="fast links join the ranks of each domain",
    ),
    PlaneKind("messages", _messages),
)


# -- the choice ------------------------------------------------------------------------------------


def plane_kinds(name: str) -> tuple[PlaneKind, ...]:
    """Return the data planes to try for `data_plane=name`, in order of preference."""
    check_choice("data_plane", name, (AUTO, *(kind.name for kind in PLANES)))
    return tuple(kind for kind in PLANES if name in (AUTO, kind.name))


class Choice(NamedTuple):
    """A data plane, the reason for it, and the function that makes it."""

    kind: PlaneKind
    reason: str
    make: Callable[[Context], DataPlane]


def choose(name: str, request: PlaneRequest, compare_places: Callable[[], object]) -> Choice:
    """Choose the data plane for `data_plane=name`, the same on all ranks; collective.

    compare_places: raises if not all ranks have come here.
    """
    if capturing(request.device):
        raise ConfigError(
            "a data plane cannot be chosen while a graph is captured: run a step before the capture"
        )
    reason, size = "", request.comm.size
    for kind in plane_kinds(name):
        if name == AUTO and (skipped := kind.passed_over(request)):
            reason = reason or skipped
            continue
        if kind.obstacle is None:
            return Choice(kind, reason or kind.reason, kind.connect(request))
        if request.peers is None:
            compare_places()
        make, obstacles = _try(kind, request)
        if make is not None:
            choice = Choice(kind, kind.reason.format(size=size), make)
            logger.info("data plane of %d ranks: %s (%s)", size, kind.name, choice.reason)
            return choice
        if name != AUTO:
            where = request.links.map(request.topology.domain_size, _devices_of(request))
            raise ConfigError(
                f"data_plane={name!r} is not possible: {'; '.join(obstacles)} ({where})"
            )
        reason = obstacles[0]
        logger.warning(
            "data plane of %d ranks: not %s, because %s; pass data_plane='messages' to request "
            "the slower messages without this warning",
            size,
            kind.name,
            reason,
        )
    raise AssertionError("the last data plane serves every group")


def _devices_of(request: PlaneRequest) -> list[str]:
    """Return the device of the tokens of every rank; collective."""
    devices: list[str] = request.comm.gather_objects(str(request.device))
    return devices


def _try(
    kind: PlaneKind, request: PlaneRequest
) -> tuple[Callable[[Context], DataPlane] | None, list[str]]:
    """Connect the ranks, or return the obstacles of all ranks; collective."""
    make, obstacle = None, "" if kind.obstacle is None else kind.obstacle(request)
    for connecting in (False, True):  # connecting is collective: only if no rank has an obstacle
        if connecting:
            try:
                make = kind.connect(request)
            except (ConfigError, CommunicationError) as error:
                obstacle = str(error)
        gathered = request.comm.gather_objects((request.device.type, obstacle))
        devices = [device for device, _ in gathered]
        if len(set(devices)) > 1:
            where = request.links.map(request.topology.domain_size, devices)
            text = f"ranks disagree about the device of their tokens: {where}"
            raise PlanMismatch(text, ranks=differing(devices))
        obstacles = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text]
        if obstacles:
            return None, obstacles
    return make, []
