"""Which data plane for which ranks: mapped memory where all ranks map each other's, else messages.

The choice is made for the first microbatch, when it is known where its tokens are, and by all ranks
together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from ultraep.backends import BACKENDS
from ultraep.comm import Communicator, Peers
from ultraep.errors import CommunicationError, ConfigError, PlanMismatch
from ultraep.runtime.settings import Settings

logger = logging.getLogger(__name__)


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
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
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
        reasons = _told(comm, device, _obstacle())
        if not reasons:  # on all ranks: to take memory is collective
            peers, obstacle = _map(comm, device)
            reasons = _told(comm, device, obstacle)
    else:
        _told(comm, device, "")
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


def _told(comm: Communicator, device: torch.device, obstacle: str) -> list[str]:
    """The obstacles of all ranks."""
    told = comm.gather_objects((device.type, obstacle))
    _compare([kind for kind, _ in told])
    return [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]


def _obstacle() -> str:
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


def _compare(kinds: list[str]) -> None:
    if len(set(kinds)) > 1:
        listed = "; ".join(f"rank {rank} has {kind}" for rank, kind in enumerate(kinds))
        raise PlanMismatch(f"ranks disagree about the device of their tokens: {listed}")
