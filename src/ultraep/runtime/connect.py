"""Which communicator for which group."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from ultraep.comm import Communicator
from ultraep.config import check_timeout
from ultraep.errors import ConfigError
from ultraep.runtime import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TRANSPORTS = ("auto", "shared", "sockets")

logger = logging.getLogger(__name__)


def connect(
    group: ProcessGroup | None, *, transport: str = "auto", timeout: float | None = None
) -> Communicator:
    """The communicator of this rank; all ranks of the group call it with the same arguments.

    No group means a group of one. "auto" takes shared memory where all ranks are CPU ranks of one
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
    # Here, not above: a group of one needs no torch.distributed, and sockets no shared memory.
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
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return connect(hosts, timeout=timeout)
