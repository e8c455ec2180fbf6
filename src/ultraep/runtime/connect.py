"""Which process group a balancer uses, and which communicator carries its messages."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch.distributed as dist

from ultraep.comm import Communicator
from ultraep.config import check_timeout
from ultraep.errors import ConfigError, NothingToBalance
from ultraep.runtime import local
from ultraep.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TRANSPORTS = ("auto", "shared", "sockets")
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
    if rank > 0 or topology.can_copy or policy == "none" or (chosen and topology.ranks == 1):
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
    return TorchDistCommunicator(group, timeout)


def connect_hosts(group: ProcessGroup, timeout: float | None = None) -> Communicator:
    """The hosts of a group of GPUs, whose messages wait for no device; collective."""
    ranks = dist.get_process_group_ranks(group)
    hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return connect(hosts, timeout=timeout)
