"""Mapped memory and messages between ranks: are they right, and how fast is every pair?

Bandwidths are measured by all ranks at the same time: rank r with r + 1, then r + 2, and so on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from ultraep.comm import Communicator, Message, Peers
from ultraep.runtime.mapped.peers import together
from ultraep_tools.check.report import Finding, named

Pairs = Mapping[tuple[int, int], float]  # bytes per second, by receiving and sending rank
MESSAGE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
MAPPED_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
MOST_SHIFTS = 16  # distances of pairs that are measured in a large group
REPEATS, IN_A_ROW = 5, 4
SLOW_PAIR = 0.5  # of the median bandwidth
WIDEST_TABLE = 8  # ranks; more do not fit into 80 columns
GB = 1e9


def try_mapped_memory(
    domain: Communicator, device: torch.device, first_rank: int = 0
) -> dict[str, Any]:
    """Write into the memory of every rank, read it, time copies and exchange signals; collective.

    Returns the ranks whose memory holds wrong values, and the bytes per second from every rank.
    first_rank: number of the domain's first rank, for errors.
    """
    if domain.size == 1:
        return {"wrong": [], "rates": [0.0]}
    nbytes = MAPPED_BYTES[device.type]
    peers = domain.peers(device)
    handle: Any = peers.allocate("check", nbytes).handle
    view_of = lambda peer: handle.get_buffer(peer, (nbytes // 4,), torch.int32)  # noqa: E731
    views = together(domain, "map memory", lambda: list(map(view_of, range(peers.size))))
    target = torch.empty_like(views[0])

    def copy(shift: int) -> None:
        for _ in range(IN_A_ROW):
            target.copy_(views[(domain.rank + shift) % domain.size])

    wrong = _wrong_views(domain, views)
    seconds = _seconds_by_shift(domain, device, copy)
    _signal(domain, peers, first_rank)
    wait_for_ranks(domain, device)  # others still copy
    peers.close()
    rates = {
        (domain.rank + shift) % domain.size: IN_A_ROW * nbytes / took
        for shift, took in seconds.items()
    }
    return {"wrong": wrong, "rates": [rates.get(peer, 0.0) for peer in range(domain.size)]}


def _signal(domain: Communicator, peers: Peers, first_rank: int) -> None:
    """Let kernels of all ranks wait for each other; raise with the rank that does not signal."""
    from ultraep.backends.triton.signals import Signals  # imports triton

    signals = Signals(peers, slots=0, buffers=0, timeout=domain.timeout, first_rank=first_rank)
    wait_for_ranks(domain, peers.device)  # one may have compiled longer
    for _ in range(REPEATS):
        signals.barrier("rows")
    signals.check()


def _wrong_views(domain: Communicator, views: Sequence[torch.Tensor]) -> list[int]:
    """Write the number of this rank into its block of every view; return the views that differ."""
    block = len(views[0]) // domain.size
    for view in views:
        view[domain.rank * block : (domain.rank + 1) * block] = 1 + domain.rank
    wait_for_ranks(domain, views[0].device)
    numbers = torch.arange(1, domain.size + 1, dtype=torch.int32, device=views[0].device)
    expected = numbers[:, None].expand(domain.size, block)
    wrong = [
        peer
        for peer, view in enumerate(views)
        if not torch.equal(view[: domain.size * block].view(domain.size, block), expected)
    ]
    wait_for_ranks(domain, views[0].device)
    return wrong


def time_messages(comm: Communicator, device: torch.device) -> list[float]:
    """Return the bytes per second of messages from every rank; collective."""
    sent = torch.ones(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange(shift: int) -> None:
        to, source = (comm.rank - shift) % comm.size, (comm.rank + shift) % comm.size
        comm.exchange([Message(to, sent)], [Message(source, received)])

    seconds = _seconds_by_shift(comm, device, exchange)
    rates = {(comm.rank + shift) % comm.size: len(sent) / took for shift, took in seconds.items()}
    return [rates.get(source, 0.0) for source in range(comm.size)]


def _seconds_by_shift(
    comm: Communicator, device: torch.device, act: Callable[[int], object]
) -> dict[int, float]:
    """Return the median seconds of an action with the rank at every distance."""
    return {
        shift: median(seconds_of(lambda shift=shift: act(shift), comm, device, REPEATS))  # type: ignore[misc]
        for shift in shifts(comm.size)
    }


def seconds_of(
    act: Callable[[], object], comm: Communicator, device: torch.device, times: int
) -> list[float]:
    """Return the seconds of an action of this rank, which all ranks begin together."""
    seconds = []
    for _ in range(times):
        wait_for_ranks(comm, device)
        begin = time.perf_counter()
        act()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return seconds


def wait_for_ranks(comm: Communicator, device: torch.device) -> None:
    _wait(device)
    comm.gather_objects(None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shifts(size: int) -> list[int]:
    """Return the distances of pairs: all, or a sample of a large group.

    >>> shifts(4), len(shifts(1000))
    ([1, 2, 3], 16)
    """
    step = max(1.0, (size - 1) / MOST_SHIFTS)
    return [1 + int(step * index) for index in range(min(size - 1, MOST_SHIFTS))]


def judge_pairs(part: str, verb: str, pairs: Pairs, size: int) -> Finding:
    """Return a finding with the bandwidth of all pairs, and a warning about a slow pair."""
    measured = {pair: rate / GB for pair, rate in pairs.items() if rate > 0}
    if not measured:
        return Finding(part, "one rank has no partner")
    usual, slowest = median(measured.values()), min(measured, key=lambda pair: measured[pair])
    least, named_pair = measured[slowest], f"rank {slowest[1]} to rank {slowest[0]}"
    finding = Finding(part, f"{verb} at {usual:.2f} GB/s, slowest {named_pair}, {least:.2f} GB/s")
    finding.facts = {"GB/s": {f"{source}->{to}": rate for (to, source), rate in measured.items()}}
    if least < SLOW_PAIR * usual:
        finding.warnings.append(
            f"{part} from {named_pair}: {least:.2f} GB/s, median of all pairs {usual:.2f}"
        )
    if 2 < size <= WIDEST_TABLE:
        finding.table = [["GB/s, to", *(f"from {rank}" for rank in range(size))]]
        for to in range(size):
            rates = [measured.get((to, source)) for source in range(size)]
            cells = ["-" if rate is None else f"{rate:.1f}" for rate in rates]
            finding.table.append([f"rank {to}", *cells])
    return finding


def wrong_memory(wrong: Sequence[Sequence[int]]) -> list[str]:
    """Return a line for every rank that reads wrong values."""
    return [
        f"rank {rank} reads wrong values from the memory of {named(peers)}"
        for rank, peers in enumerate(wrong)
        if peers
    ]
