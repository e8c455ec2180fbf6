"""Which process group, communicator and data plane a balancer uses.

The data plane is chosen for the first microbatch, when it is known where its tokens are, and by all
ranks together: mapped memory where all ranks map each other's, else messages.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ultraep.backends import BACKENDS
from ultraep.comm import Communicator, Peers
from ultraep.config import check_timeout
from ultraep.errors import CommunicationError, ConfigError, NothingToBalance, PlanMismatch
from ultraep.runtime import local
from ultraep.runtime.settings import TRANSPORTS, Settings
from ultraep.runtime.streams import capturing
from ultraep.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALONE: Final = "alone"  # the group of this process and no other
GroupOrName: TypeAlias = "ProcessGroup | Literal['alone'] | None"

logger = logging.getLogger(__name__)


def resolve_group(group: Any) -> ProcessGroup | None:
    """Return the process group that a caller's `group` means; None: this process alone.

    As everywhere in torch, None means the default group.
    """
    running = dist.is_available() and dist.is_initialized()
    if isinstance(group, str) and group == ALONE:
        return None
    if group is None and running:
        return dist.group.WORLD
    if group is None:
        started = os.environ.get("WORLD_SIZE", "1")
        if started.isdecimal() and int(started) > 1:
            raise ConfigError(
                f"the launcher started {started} processes, but torch.distributed is not "
                "initialised: call torch.distributed.init_process_group() first, or pass "
                f"group={ALONE!r} to balance nothing"
            )
        return None
    if not running or not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "group must be an initialised process group that this rank is part of, None (the "
            f"default group) or {ALONE!r}, got {group!r}"
        )
    return group


def warn_if_idle(rank: int, topology: Topology, policy: str, *, chosen: bool) -> None:
    """Warn on rank 0 if this topology has nowhere to put a replica, whatever the loads.

    chosen: the caller asked for exactly these ranks, so one rank is no mistake.
    """
    if rank > 0 or topology.can_replicate or policy == "none" or (chosen and topology.ranks == 1):
        return
    if topology.ranks == 1:
        cause = "it has one rank"
        remedy = (
            "start the program with torchrun and call torch.distributed.init_process_group(), or "
            f"pass group={ALONE!r}"
        )
    elif topology.slots == 0:
        cause, remedy = "slots=0 leaves no place for replicas", "pass slots=1 or policy='none'"
    else:
        cause = f"domain={topology.domain_size} keeps replicas on their home rank"
        remedy = "pass a larger domain or policy='none'"
    warnings.warn(
        f"this balancer never balances anything: {cause}; {remedy}",
        NothingToBalance,
        stacklevel=3,  # the line that makes the balancer
    )


def connect(
    group: ProcessGroup | None, *, transport: str = "auto", timeout: float | None = None
) -> Communicator:
    """The communicator of this rank; all ranks of the group call it with the same arguments.

    None means this process alone. "auto" takes shared memory where all ranks are CPU ranks of one
    host that has enough of it, torch.distributed elsewhere. "shared" and "sockets" are taken at
    their word. `timeout` is how many seconds to wait for a rank; None: as long as the group does.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport is one of {', '.join(TRANSPORTS)}, got {transport!r}")
    check_timeout(timeout)
    if group is None:
        return local.alone()
    if transport == "auto" and sys.platform != "linux":
        transport = "sockets"
    # Here, not above: a process alone needs neither.
    if transport != "sockets":
        from ultraep.runtime import shared_memory

        if transport == "shared" or shared_memory.usable(group, timeout):
            logger.info("transport of %d ranks: shared", group.size())
            return shared_memory.SharedMemoryCommunicator(group, timeout)
    from ultraep.runtime.torch_dist import TorchDistCommunicator

    logger.info("transport of %d ranks: sockets", group.size())
    return TorchDistCommunicator(group, timeout, connect_hosts=connect_hosts)


def connect_hosts(group: ProcessGroup, timeout: float | None = None) -> Communicator:
    """The hosts of a group of GPUs, whose messages wait for no device; collective."""
    ranks = dist.get_process_group_ranks(group)
    hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return connect(hosts, timeout=timeout)


class Choice(NamedTuple):
    """A data plane, and the reason for it."""

    name: str
    reason: str
    peers: Peers | None = None


def choose(
    comm: Communicator,
    settings: Settings,
    device: torch.device,
    peers: Peers | None,
    meet: Callable[[], None],
) -> Choice:
    """The plane for tokens on this device, alike on all ranks; collective if it must be found out.

    peers: memory that ranks map, if it is given.   meet: raises if not all ranks are here.
    """
    wanted = settings.data_plane
    if capturing(device):
        raise ConfigError(
            "no data plane is chosen yet, and none can be in a graph: run a step before, outside "
            "of a graph, or `prepare`"
        )
    if wanted == "messages":
        return Choice("messages", "asked for")
    if wanted == "auto" and device.type == "cpu" and peers is None:
        return Choice("messages", "tokens are on the CPU")
    reasons: list[str] = []
    if peers is None:
        meet()
        reasons = _obstacles(comm, device, _obstacle_here())
        if not reasons:  # on all ranks: to take memory is collective
            peers, obstacle = _map(comm, device)
            reasons = _obstacles(comm, device, obstacle)
    else:
        _obstacles(comm, device, "")
    if reasons and wanted == "mapped":
        raise ConfigError(f"data_plane='mapped' is not possible: {'; '.join(reasons)}")
    if reasons:
        found = Choice("messages", reasons[0])
        logger.warning(
            "data plane of %d ranks: messages, slower than mapped memory, because %s; pass "
            "data_plane='messages' if that is intended",
            comm.size,
            found.reason,
        )
        return found
    found = Choice("mapped", f"all {comm.size} ranks map each other's memory", peers)
    logger.info("data plane of %d ranks: %s (%s)", comm.size, found.name, found.reason)
    return found


def _obstacles(comm: Communicator, device: torch.device, obstacle: str) -> list[str]:
    """The obstacles of all ranks."""
    told = comm.gather_objects((device.type, obstacle))
    _compare_devices([kind for kind, _ in told])
    return [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]


def _obstacle_here() -> str:
    triton = next(info for info in BACKENDS if info.name == "triton")
    return f"the backend 'triton' {triton.obstacle}" if triton.obstacle else ""


def _map(comm: Communicator, device: torch.device) -> tuple[Peers | None, str]:
    """Memory that all ranks map, or why there is none."""
    try:
        peers = comm.peers(device)
        peers.allocate("probe", 64)
    except (ConfigError, CommunicationError) as error:
        return None, str(error)
    return peers, ""


def _compare_devices(kinds: list[str]) -> None:
    if len(set(kinds)) > 1:
        listed = "; ".join(f"rank {rank} has {kind}" for rank, kind in enumerate(kinds))
        raise PlanMismatch(f"ranks disagree about the device of their tokens: {listed}")
