"""Mapped memory and messages between ranks: are they right, and how fast is every pair?

Bandwidths are measured by all ranks at the same time: rank r with r + 1, then r + 2, and so on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from ultraep.comm import Communicator, Message, Peers
from ultraep.runtime.mapped.peers import together
from ultraep_tools.check.report import Finding

MESSAGE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
MAPPED_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}
MOST_SHIFTS = 16  # distances of pairs that are measured in a large group
REPEATS = 5
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
    nbytes, ranks = MAPPED_BYTES[device.type], range(domain.size)
    peers = domain.peers(device)
    handle: Any = peers.allocate("check", nbytes).handle

    def map_all() -> list[torch.Tensor]:
        return [handle.get_buffer(peer, (nbytes // 4,), torch.int32) for peer in ranks]

    views: list[torch.Tensor] = together(domain, "map memory", map_all)
    target = torch.empty_like(views[0])
    wrong = _wrong_views(domain, views)
    rates = _rates(domain, device, nbytes, lambda _, source: target.copy_(views[source]))
    _signal(domain, peers, first_rank)
    wait_for_ranks(domain, device)  # others still copy
    peers.close()
    return {"wrong": wrong, "rates": rates}


def _wrong_views(domain: Communicator, views: Sequence[torch.Tensor]) -> list[int]:
    """Write the number of this rank into its block of every view; return the views that differ."""
    block = len(views[0]) // domain.size
    for view in views:
        view[domain.rank * block : (domain.rank + 1) * block] = 1 + domain.rank
    wait_for_ranks(domain, views[0].device)
    numbers = torch.arange(1, domain.size + 1, dtype=torch.int32, device=views[0].device)
    expected = numbers.repeat_interleave(block)
    wrong = [
        peer for peer, view in enumerate(views) if not torch.equal(view[: len(expected)], expected)
    ]
    wait_for_ranks(domain, views[0].device)
    return wrong


def _signal(domain: Communicator, peers: Peers, first_rank: int) -> None:
    """Let kernels of all ranks wait for each other; raise with the rank that does not signal."""
    from ultraep.backends.triton.signals import Signals  # imports triton

    signals = Signals(peers, slots=0, buffers=0, timeout=domain.timeout, first_rank=first_rank)
    wait_for_ranks(domain, peers.device)  # one may have compiled longer
    for _ in range(REPEATS):
        signals.barrier("rows")
    signals.check()


def message_rates(comm: Communicator, device: torch.device) -> list[float]:
    """Return the bytes per second of messages from every rank; collective."""
    sent = torch.ones(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange(to: int, source: int) -> None:
        comm.exchange([Message(to, sent)], [Message(source, received)])

    rates = _rates(comm, device, len(sent), exchange)
    # A rank sends as it receives and waits for both, so the faster end of a pair measured the pair.
    everyone = comm.gather_objects(rates)
    ends = [everyone[source][(2 * source - comm.rank) % comm.size] for source in range(comm.size)]
    return list(map(max, rates, ends))


def _rates(
    comm: Communicator, device: torch.device, nbytes: int, act: Callable[[int, int], object]
) -> list[float]:
    """Return the bytes per second from every rank; 0: not measured.

    act: moves `nbytes`; gets the ranks that this rank sends to and receives from.
    """
    rates = [0.0] * comm.size
    for shift in shifts(comm.size):
        to, source = (comm.rank - shift) % comm.size, (comm.rank + shift) % comm.size
        seconds = seconds_of(partial(act, to, source), comm, device, REPEATS)
        rates[source] = nbytes / median(seconds)
    return rates


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


def judge_rates(part: str, verb: str, facts: Sequence[Mapping[str, Any]]) -> Finding:
    """Return a finding with the bandwidth of all pairs, and a warning about a slow pair.

    facts: of every rank, the `rates` from the ranks of its domain, which begins at rank `first`.
    """
    rates = {
        (own.get("first", 0) + index, rank): rate / GB
        for rank, own in enumerate(facts)
        for index, rate in enumerate(own["rates"])
        if rate
    }
    if not rates:
        return Finding(part, "one rank has no partner")
    usual, slowest = median(rates.values()), min(rates, key=lambda pair: rates[pair])
    least, pair = rates[slowest], "rank {} to rank {}".format(*slowest)
    finding = Finding(part, f"{verb} at {digits(usual)} GB/s, slowest {pair}, {digits(least)} GB/s")
    finding.facts = {"GB/s": {f"{source}->{to}": rate for (source, to), rate in rates.items()}}
    if least < SLOW_PAIR * usual:
        finding.warnings = [
            f"{part} from {pair}: {digits(least)} GB/s, median of all pairs {digits(usual)}"
        ]
    if 2 < len(facts) <= WIDEST_TABLE:
        ranks = range(len(facts))
        finding.table = [["GB/s, to", *(f"from {source}" for source in ranks)]]
        for to in ranks:
            cells = [digits(rates.get((source, to), 0.0)) for source in ranks]
            finding.table.append([f"rank {to}", *cells])
    return finding


def digits(rate: float) -> str:
    """Return a rate with two digits or more; "-" for none.

    >>> digits(412.3), digits(4.123), digits(0.0)
    ('412', '4.1', '-')
    """
    return "-" if not rate else f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
