"""Which communicator for which group."""

from __future__ import annotations

import logging
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
    host, torch.distributed elsewhere. "shared" and "sockets" are taken at their word. `timeout` is
    how many seconds to wait for a rank; None means what is usual for the transport.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(
            f"transport is one of {', '.join(TRANSPORTS)}, got {transport!r}; "
            "for memory that GPUs share there is ultraep.DeviceBalancer"
        )
    check_timeout(timeout)
    if group is None:
        return local.alone()
    # Here, not above: a group of one needs no torch.distributed.
    from ultraep.runtime import shared_memory, torch_dist

    if transport == "auto":
        transport = "shared" if shared_memory.usable(group, timeout) else "sockets"
        logger.info("transport of %d ranks: %s", group.size(), transport)
    if transport == "sockets":
        return torch_dist.TorchDistCommunicator(group, timeout)
    if timeout is None:
        return shared_memory.SharedMemoryCommunicator(group)
    return shared_memory.SharedMemoryCommunicator(group, timeout)
