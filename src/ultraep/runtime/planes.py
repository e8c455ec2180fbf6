"""What a data plane is, and how balancers find one; `connect.PLANES` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ultraep.comm import Communicator, Peers
from ultraep.inputs import Inputs
from ultraep.microbatch import Context, Microbatch
from ultraep.runtime.hosts import FastLinks
from ultraep.topology import Topology


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
