"""Which process group and communicator a balancer uses."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch.distributed as dist

from ultraep import __version__
from ultraep.comm import Communicator
from ultraep.config import AUTO, BalanceConfig, check_timeout
from ultraep.errors import ConfigError, NothingToBalance, PlanMismatch, errors_at
from ultraep.position import differing
from ultraep.runtime.agreement import Agreement
from ultraep.runtime.hosts import FastLinks, Host, fast_links, this_gpu_host, this_host
from ultraep.runtime.local import LocalCommunicator, LocalGroup
from ultraep.runtime.recording import open_recorder, recording_setting
from ultraep.runtime.settings import Settings, check_slots
from ultraep.topology import Topology
from ultraep.trace.record import Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALONE: Final = "alone"  # the group of this process alone
GroupOrName: TypeAlias = "ProcessGroup | Literal['alone'] | None"
Group: TypeAlias = "GroupOrName | Communicator"

logger = logging.getLogger(__name__)


def resolve_group(group: Any) -> ProcessGroup | None:
    """Return the process group for a `group` argument; None if this process is alone.

    As everywhere in torch, the argument None means the default group.
    """
    running = dist.is_available() and dist.is_initialized()
    if isinstance(group, str) and group == ALONE:
        return None
    if group is None and running:
        return dist.group.WORLD
    if group is None:
        started = os.environ.get("WORLD_SIZE", "1")
        if started.isdecimal() and started.lstrip("0") not in ("", "1"):
            raise ConfigError(
                f"the launcher started {started} processes, but torch.distributed is not "
                "initialised: call torch.distributed.init_process_group() first, or pass "
                f"group={ALONE!r} to balance nothing"
            )
        return None
    if not running or not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "group must be an initialised process group that this rank is part of, None (the "
            f"default group), {ALONE!r} or a Communicator, got {group!r}"
        )
    return group


class Ranks(NamedTuple):
    """The ranks of a balancer, before they are connected.

    communicator: that the user passed, or None: connect the group (None: this process alone).
    chosen: the caller chose these ranks explicitly, so one rank is not a mistake.
    """

    group: ProcessGroup | None
    communicator: Communicator | None
    chosen: bool


def resolve_ranks(group: Any) -> Ranks:
    """Return the ranks for the `group` argument of a balancer."""
    if hasattr(group, "gather_objects"):
        return Ranks(None, group, chosen=True)
    return Ranks(resolve_group(group), None, chosen=group == ALONE)


def idle_reason(topology: Topology, policy: str) -> str:
    """Return why a balancer never replicates an expert; empty if it does."""
    reasons = {
        "policy='none'": policy == "none",
        "there is only one rank": topology.ranks == 1,
        "slots=0": topology.slots == 0,
        f"domain={topology.domain_size}": not topology.can_replicate,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def warn_if_idle(rank: int, topology: Topology, policy: str, *, chosen: bool) -> None:
    """Warn on rank 0 if this topology cannot have replicas.

    chosen: the caller chose these ranks explicitly, so one rank is not a mistake.
    """
    reason = idle_reason(topology, policy)
    if rank > 0 or not reason or policy == "none" or (chosen and topology.ranks == 1):
        return
    remedy = "pass slots=1, a larger domain, or policy='none'"
    if topology.ranks == 1:
        remedy = (
            "start the program with torchrun and call torch.distributed.init_process_group(), or "
            f"pass group={ALONE!r}"
        )
    warnings.warn(
        f"this balancer never balances anything: {reason}; {remedy}",
        NothingToBalance,
        stacklevel=4,  # the line that creates the balancer
    )


def connect(group: ProcessGroup | None, *, timeout: float | None = None) -> Communicator:
    """Connect this rank to its group (None: this process alone); collective.

    timeout: seconds to wait for a rank; None: the timeout of the group.
    """
    check_timeout(timeout)
    if group is None:
        return LocalCommunicator(LocalGroup(1), 0)
    # Imported here, because a process alone does not need it.
    from ultraep.runtime.torch_dist import TorchDistCommunicator

    return TorchDistCommunicator(group, timeout)


class Joined(NamedTuple):
    """A rank in its group, with the settings that all ranks have agreed on."""

    comm: Communicator
    links: FastLinks
    topology: Topology
    config: BalanceConfig
    agreement: Agreement
    recorder: Recorder | None


def join(
    ranks: Ranks,
    topology: partial[Topology],
    config: BalanceConfig,
    settings: Settings,
    record: str | Path | None,
) -> Joined:
    """Connect to the other ranks and compare settings with them; collective.

    topology: without its ranks. The domain None becomes the one of the fast links.
    """
    with errors_at("the creation of the balancer"), ExitStack() as undo:
        comm = ranks.communicator or undo.enter_context(
            closing(connect(ranks.group, timeout=settings.timeout))
        )
        domain = topology.keywords["domain"]
        links = find_fast_links(comm, domain)
        whole = topology(ranks=comm.size, domain=links.domain if domain is None else domain)
        check_slots(settings.dispatcher, whole)
        if config.speeds != AUTO:
            config.speeds_for(comm.size)  # raises if their number is wrong
        compared = whole, config, settings.compared(), recording_setting(record), __version__
        agreement = Agreement(comm, repr(compared), whole.experts, whole.num_domains)
        agreement.open_flight()
        recorder = open_recorder(record, comm, whole, config)
        undo.pop_all()
    return Joined(comm, links, whole, config, agreement, recorder)


def find_fast_links(comm: Communicator, domain: int | None = None) -> FastLinks:
    """Find out which ranks fast links join; collective.

    domain: that the user chose; raises on all ranks if it differs.
    """
    gathered: list[tuple[Host, int | None]] = comm.gather_objects((this_host(), domain))
    hosts, domains = [host for host, _ in gathered], [chosen for _, chosen in gathered]
    if any(chosen != domain for chosen in domains):  # of any type
        listed = "; ".join(
            f"rank {rank}: {host.name} with domain={chosen}"
            for rank, (host, chosen) in enumerate(gathered)
        )
        text = f"ranks disagree about their domains: {listed}; pass the same on all"
        raise PlanMismatch(text, ranks=differing(domains))
    if len({host.domain for host in hosts}) > 1:  # a fabric may join them
        hosts = comm.gather_objects(this_gpu_host())
        links = fast_links(hosts)
        if comm.rank == 0:
            logger.info("%s; pass domain= to choose otherwise", links.reason)
    return fast_links(hosts)
