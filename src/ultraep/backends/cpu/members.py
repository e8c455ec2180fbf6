"""Twin of `reference/members.py`.

Experts are renumbered by home rank, so that the experts of a rank are neighbours; `first` says
where each rank begins. Every attempt writes its replicas (expert, host, quota) into the rows of
`placed` and returns (peak, number of replicas).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from ultraep.arrays import IntArray
from ultraep.config import MAX_ROWS, MAX_THRESHOLD, PARTS


class SortedDomain(NamedTuple):
    """Loads and limits of a domain, sorted once for all attempts; the lower index on a tie."""

    loads: IntArray  # [E] rows of every expert
    first: IntArray  # [R + 1]
    rank_loads: IntArray  # [R] rows of every rank
    hottest_first: IntArray  # [E] experts of every rank, most rows first
    emptiest_first: IntArray  # [R]
    fullest_first: IntArray  # [R]
    slots: int
    min_tokens: int
    max_replicas: int
    speeds: IntArray  # [R] or empty


@njit(cache=True)
def sort_all(expert_loads, limits):
    """Return all domains as one; experts and ranks are numbered within each domain."""
    loads, first_of_rank = expert_loads[limits.experts_by_rank], limits.first_of_rank
    ranks, size = len(first_of_rank) - 1, limits.domain
    rank_loads, keys = np.zeros(ranks, np.int64), np.empty(max(len(loads), ranks), np.int64)
    hottest_first = np.empty(len(loads), np.int64)
    emptiest_first, fullest_first = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for begin in range(0, ranks, size):
        for rank in range(begin, begin + size):
            first, end = first_of_rank[rank], first_of_rank[rank + 1]
            line, offset = hottest_first[first:end], first_of_rank[begin]
            for expert in range(first, end):
                rank_loads[rank] += loads[expert]
                place = expert - first
                insert(line, keys, place, expert - offset, loads[expert])
        end = begin + size
        sort_ranks(rank_loads[begin:end], emptiest_first[begin:end], fullest_first[begin:end], keys)
    return SortedDomain(
        loads, first_of_rank, rank_loads, hottest_first, emptiest_first, fullest_first,
        limits.slots, limits.min_tokens, min(limits.max_replicas, size * limits.slots),
        limits.speeds,
    )  # fmt: skip


@njit(cache=True)
def sort_ranks(rank_loads, emptiest_first, fullest_first, keys):
    """Sort the ranks of a domain by load, both ways; the lower rank on a tie."""
    size = len(rank_loads)
    for rank in range(size):
        insert(emptiest_first, keys, rank, rank, -rank_loads[rank])
    for place in range(size):  # sorted but for ties
        rank = emptiest_first[size - 1 - place]
        insert(fullest_first, keys, place, rank, rank_loads[rank])


@njit(cache=True)
def domain_at(every, begin, size):
    """Return the domain that begins with this rank."""
    end = begin + size
    first = every.first[begin : end + 1]
    experts = slice(first[0], first[-1])
    return SortedDomain(
        every.loads[experts], first - first[0], every.rank_loads[begin:end],
        every.hottest_first[experts], every.emptiest_first[begin:end],
        every.fullest_first[begin:end], every.slots, every.min_tokens, every.max_replicas,
        every.speeds[begin:end],
    )  # fmt: skip


@njit(cache=True)
def relative_to(domain, threshold):
    """Return a domain and a threshold that is the limit of all its ranks, for one attempt.

    With speeds, the loads of that domain are rows above each rank's own limit, and the threshold
    is 0.
    """
    if len(domain.speeds) == 0:
        return domain, threshold
    heights = domain.rank_loads - limits_at(domain, threshold)
    ranks = len(heights)
    emptiest_first, fullest_first = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    sort_ranks(heights, emptiest_first, fullest_first, np.empty(ranks, np.int64))
    return SortedDomain(
        domain.loads, domain.first, heights, domain.hottest_first, emptiest_first, fullest_first,
        domain.slots, domain.min_tokens, domain.max_replicas, domain.speeds,
    ), 0  # fmt: skip


@njit(cache=True)
def limits_at(domain, threshold):
    """[R] most rows of every rank."""
    if len(domain.speeds) == 0:
        return np.full(len(domain.rank_loads), threshold, np.int64)
    return np.minimum(min(threshold, MAX_THRESHOLD) * domain.speeds // PARTS, MAX_ROWS)


@njit(cache=True)
def peak_of(domain, rank_loads):
    """Return the least threshold that allows these loads."""
    if len(domain.speeds) == 0:
        return rank_loads.max()
    peak = 0
    for rank in range(len(rank_loads)):
        peak = max(peak, -(-rank_loads[rank] * PARTS // domain.speeds[rank]))
    return peak


@njit(cache=True)
def peak_after(domain, relative, rank_loads):
    """Return the peak of an attempt that `relative_to` prepared, from its final loads."""
    if len(domain.speeds) == 0:
        return rank_loads.max()
    return peak_of(domain, rank_loads - relative.rank_loads + domain.rank_loads)


@njit(cache=True)
def replicate(expert, donor, host, quota, at_home, rank_loads, free_slots, placed, num_copies):
    """Move rows of the donor's expert to a new replica on the host; return the replicas so far."""
    placed[num_copies, 0], placed[num_copies, 1], placed[num_copies, 2] = expert, host, quota
    at_home[expert] -= quota
    rank_loads[donor] -= quota
    rank_loads[host] += quota
    free_slots[host] -= 1
    return num_copies + 1


@njit(cache=True)
def insert(line, keys, hole, rank, key):
    """Insert a rank into a line at a hole or before it: largest key first, then the lower rank."""
    while hole > 0:
        before = hole - 1
        if keys[before] > key or (keys[before] == key and line[before] < rank):
            break
        line[hole], keys[hole] = line[before], keys[before]
        hole = before
    line[hole], keys[hole] = rank, key


@njit(cache=True)
def remove(line, keys, count, begin, end):
    """Remove the ranks at places `begin` to `end` from a line."""
    for place in range(end, count):
        line[place - end + begin], keys[place - end + begin] = line[place], keys[place]


@njit(cache=True)
def alias(domain, threshold, links, thrifty, placed):
    """`alias` or `thrifty` of the reference; return peak, replicas, and most transfers of one rank.

    Hosts are sorted by room, donors by load, the largest first.
    """
    original = domain
    domain, threshold = relative_to(original, threshold)
    rank_loads, at_home = domain.rank_loads.copy(), domain.loads.copy()
    ranks, min_tokens = len(rank_loads), domain.min_tokens
    slots = min(domain.slots, links)
    free_slots, num_given = np.full(ranks, slots, np.int64), np.zeros(ranks, np.int64)
    most_hosts = ranks + domain.max_replicas  # one leaves with every replica, and may return
    hosts, rooms, num_hosts = np.empty(most_hosts, np.int64), np.empty(most_hosts, np.int64), 0
    donors, held, num_donors = np.empty(ranks, np.int64), np.empty(ranks, np.int64), 0
    hot, heat = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for rank in domain.emptiest_first:
        if threshold - rank_loads[rank] < min_tokens or slots == 0:
            break
        hosts[num_hosts], rooms[num_hosts] = rank, threshold - rank_loads[rank]
        num_hosts += 1
    for rank in domain.fullest_first:
        if rank_loads[rank] <= threshold:
            break
        donors[num_donors], held[num_donors] = rank, rank_loads[rank]
        hot[rank] = domain.hottest_first[domain.first[rank]]
        heat[rank] = at_home[hot[rank]]
        num_donors += 1
    slack = threshold * ranks - rank_loads.sum()
    thrifty = thrifty and slack >= ranks
    num_copies, transfers = 0, 0
    while num_copies < domain.max_replicas and num_donors > 0 and num_hosts > 0:
        donor_at, host_at, wasted = -1, 0, -1
        if thrifty:
            donor_at, host_at = tightest_pair(
                donors, held, num_donors, rooms, num_hosts, heat, threshold, min_tokens
            )
            wasted = rooms[host_at] + threshold - held[donor_at] if donor_at >= 0 else -1
        tight = wasted >= 0 and wasted * num_donors <= slack
        if not tight:
            host_at, donor_at = 0, fullest_that_can(rooms[0], donors, num_donors, heat)
        donor, host = donors[donor_at], hosts[host_at]
        expert = hot[donor]
        quota = held[donor_at] - threshold if tight else min(rooms[0], heat[donor])
        if quota < min_tokens:
            break
        num_given[donor] += at_home[expert] == domain.loads[expert]
        num_copies = replicate(
            expert, donor, host, quota, at_home, rank_loads, free_slots, placed, num_copies
        )
        transfers = max(transfers, num_given[donor], slots - free_slots[host])
        if tight:
            slack -= wasted
            free_slots[host] = 0
        if host_at == 0:
            hosts, rooms = hosts[1:], rooms[1:]
        else:
            remove(hosts, rooms, num_hosts, host_at, host_at + 1)
        num_hosts -= 1
        remove(donors, held, num_donors, donor_at, donor_at + 1)
        num_donors -= 1
        if rank_loads[donor] > threshold:
            hot[donor] = hottest_movable(at_home, domain, donor, links)
            heat[donor] = at_home[hot[donor]]
            insert(donors, held, num_donors, donor, rank_loads[donor])
            num_donors += 1
        for rank in (host, donor):
            if threshold - rank_loads[rank] >= min_tokens and free_slots[rank] > 0:
                insert(hosts, rooms, num_hosts, rank, threshold - rank_loads[rank])
                num_hosts += 1
    return peak_after(original, domain, rank_loads), num_copies, transfers


@njit(cache=True)
def hottest_movable(at_home, domain, rank, links):
    """Return the expert with the most rows at home that the rank may give away."""
    begin, end = domain.first[rank], domain.first[rank + 1]
    best = domain.hottest_first[begin]
    for place in range(begin + 1, min(end, begin + links)):
        expert = domain.hottest_first[place]
        if at_home[expert] > at_home[best] or (at_home[expert] == at_home[best] and expert < best):
            best = expert
    return best


@njit(cache=True)
def fullest_that_can(need, line, donors, heat):
    """Return the fullest donor that can give it all, or the one with the hottest expert."""
    hottest_at = 0
    for place in range(donors):
        if heat[line[place]] >= need:
            return place
        if heat[line[place]] > heat[line[hottest_at]]:
            hottest_at = place
    return hottest_at


@njit(cache=True)
def tightest_pair(donors, held, num_donors, rooms, num_hosts, heat, threshold, min_tokens):
    """Return the last donor whose surplus one expert can carry, and the last host with room."""
    for donor_at in range(num_donors - 1, -1, -1):
        surplus = held[donor_at] - threshold
        if min_tokens <= surplus <= heat[donors[donor_at]]:
            low, high = 0, num_hosts  # hosts before `low` have room, hosts from `high` on have not
            while low < high:
                middle = (low + high) // 2
                if rooms[middle] >= surplus:
                    low = middle + 1
                else:
                    high = middle
            return (donor_at, low - 1) if low > 0 else (-1, 0)
    return -1, 0
