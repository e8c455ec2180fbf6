"""Twin of `reference/members.py`.

Experts are renumbered rank by rank, so that the home experts of a rank are neighbours; `first`
says where each rank begins. Every attempt writes its copies (expert, host, quota) into the rows
of its `placed` and returns (peak, number of copies).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from ultraep.arrays import IntArray


class SortedDomain(NamedTuple):
    """Loads and limits of a domain, sorted once for all attempts; the lower index on a tie."""

    loads: IntArray  # [E] tokens of every expert
    first: IntArray  # [R + 1]
    rank_loads: IntArray  # [R] tokens of every rank
    hottest_first: IntArray  # [E] the experts of every rank, the one with the most tokens first
    emptiest_first: IntArray  # [R]
    fullest_first: IntArray  # [R]
    slots: int
    min_tokens: int
    max_replicas: int


@njit(cache=True)
def sort_all(loads, first_of_rank, size, slots, min_tokens, max_replicas):
    """All domains in one; experts and ranks are numbered inside each of them."""
    rank_loads = starting_loads(loads, first_of_rank)
    ranks, keys = len(rank_loads), np.empty(max(len(loads), len(rank_loads)), np.int64)
    hottest_first = np.empty(len(loads), np.int64)
    emptiest_first, fullest_first = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for begin in range(0, ranks, size):
        for rank in range(begin, begin + size):
            first, end = first_of_rank[rank], first_of_rank[rank + 1]
            line, offset = hottest_first[first:end], first_of_rank[begin]
            for expert in range(first, end):
                put_in(line, keys, expert - first, expert - offset, loads[expert])
        line = emptiest_first[begin : begin + size]
        for rank in range(size):
            put_in(line, keys, rank, rank, -rank_loads[begin + rank])
        for place in range(size):  # sorted but for ties
            rank = line[size - 1 - place]
            put_in(fullest_first[begin:], keys, place, rank, rank_loads[begin + rank])
    return SortedDomain(
        loads, first_of_rank, rank_loads, hottest_first, emptiest_first, fullest_first,
        slots, min_tokens, max_replicas,
    )  # fmt: skip


@njit(cache=True)
def domain_at(every, begin, size):
    """The domain that begins with this rank."""
    end = begin + size
    first = every.first[begin : end + 1]
    experts = slice(first[0], first[-1])
    return SortedDomain(
        every.loads[experts], first - first[0], every.rank_loads[begin:end],
        every.hottest_first[experts], every.emptiest_first[begin:end],
        every.fullest_first[begin:end], every.slots, every.min_tokens, every.max_replicas,
    )  # fmt: skip


@njit(cache=True)
def hottest(at_home, first, rank):
    best = first[rank]
    for expert in range(best + 1, first[rank + 1]):
        if at_home[expert] > at_home[best]:
            best = expert
    return best


@njit(cache=True)
def starting_loads(loads, first):
    rank_loads = np.zeros(len(first) - 1, np.int64)
    for rank in range(len(rank_loads)):
        for expert in range(first[rank], first[rank + 1]):
            rank_loads[rank] += loads[expert]
    return rank_loads


@njit(cache=True)
def move(quota, expert, donor, host, at_home, rank_loads, free_slots):
    """Tokens of the donor's expert go to a new copy on the host."""
    at_home[expert] -= quota
    rank_loads[donor] -= quota
    rank_loads[host] += quota
    free_slots[host] -= 1


@njit(cache=True)
def put_in(line, keys, count, rank, key):
    """One rank joins a line: the largest key first, then the lower rank."""
    place = count
    while place > 0:
        before = place - 1
        if keys[before] > key or (keys[before] == key and line[before] < rank):
            break
        line[place], keys[place] = line[before], keys[before]
        place = before
    line[place], keys[place] = rank, key


@njit(cache=True)
def take_out(line, keys, count, begin, end):
    """Remove the places from begin to end from a line."""
    for place in range(end, count):
        line[place - end + begin], keys[place - end + begin] = line[place], keys[place]


@njit(cache=True)
def sink(line, keys, count, place, key):
    """Move a rank of a line to the place of its new, smaller key."""
    rank = line[place]
    while place + 1 < count:
        after = place + 1
        if keys[after] < key or (keys[after] == key and line[after] > rank):
            break
        line[place], keys[place] = line[after], keys[after]
        place = after
    line[place], keys[place] = rank, key


@njit(cache=True)
def alias(domain, threshold, links, thrifty, placed):
    """`alias` of the reference, or `thrifty`. Its peak, copies, and most transfers of one rank.

    Hosts stand in a line by their room, donors in another by their load, the largest first.
    """
    rank_loads, at_home = domain.rank_loads.copy(), domain.loads.copy()
    ranks, min_tokens = len(rank_loads), domain.min_tokens
    slots = min(domain.slots, links)
    free_slots, given = np.full(ranks, slots, np.int64), np.zeros(ranks, np.int64)
    most_hosts = ranks + domain.max_replicas  # one leaves with every copy, and may come back
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
    made, transfers = 0, 0
    while made < domain.max_replicas and num_donors > 0 and num_hosts > 0:
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
        placed[made, 0], placed[made, 1], placed[made, 2] = expert, host, quota
        made += 1
        given[donor] += at_home[expert] == domain.loads[expert]
        move(quota, expert, donor, host, at_home, rank_loads, free_slots)
        transfers = max(transfers, given[donor], slots - free_slots[host])
        if tight:
            slack -= wasted
            free_slots[host] = 0
        if host_at == 0:
            hosts, rooms = hosts[1:], rooms[1:]
        else:
            take_out(hosts, rooms, num_hosts, host_at, host_at + 1)
        num_hosts -= 1
        if rank_loads[donor] > threshold:
            hot[donor] = hottest_movable(at_home, domain, donor, links)
            heat[donor] = at_home[hot[donor]]
            sink(donors, held, num_donors, donor_at, rank_loads[donor])
        else:
            take_out(donors, held, num_donors, donor_at, donor_at + 1)
            num_donors -= 1
        for rank in (host, donor):
            if threshold - rank_loads[rank] >= min_tokens and free_slots[rank] > 0:
                put_in(hosts, rooms, num_hosts, rank, threshold - rank_loads[rank])
                num_hosts += 1
    return rank_loads.max(), made, transfers


@njit(cache=True)
def hottest_movable(at_home, domain, rank, links):
    """The expert with the most tokens at home among those that the rank may give away."""
    begin, end = domain.first[rank], domain.first[rank + 1]
    best = domain.hottest_first[begin]
    for place in range(begin + 1, min(end, begin + links)):
        expert = domain.hottest_first[place]
        if at_home[expert] > at_home[best] or (at_home[expert] == at_home[best] and expert < best):
            best = expert
    return best


@njit(cache=True)
def fullest_that_can(need, line, donors, heat):
    """The fullest donor that can give it all; if none can, the one with the hottest expert."""
    found = 0
    for place in range(donors):
        if heat[line[place]] >= need:
            return place
        if heat[line[place]] > heat[line[found]]:
            found = place
    return found


@njit(cache=True)
def tightest_pair(donors, held, num_donors, rooms, num_hosts, heat, threshold, min_tokens):
    """The last donor whose surplus one expert can carry, and the last host with room for it."""
    for donor_at in range(num_donors - 1, -1, -1):
        surplus = held[donor_at] - threshold
        if min_tokens <= surplus <= heat[donors[donor_at]]:
            low, high = 0, num_hosts  # all before `low` have room, none from `high` on
            while low < high:
                middle = (low + high) // 2
                if rooms[middle] >= surplus:
                    low = middle + 1
                else:
                    high = middle
            return (donor_at, low - 1) if low > 0 else (-1, 0)
    return -1, 0


@njit(cache=True)
def hottest_of_all(at_home, first, rank_loads, threshold):
    """The hottest expert of every rank above the threshold."""
    hot = np.zeros(len(rank_loads), np.int64)
    for rank in range(len(rank_loads)):
        if rank_loads[rank] > threshold:
            hot[rank] = hottest(at_home, first, rank)
    return hot


@njit(cache=True)
def window(loads, first, slots, threshold, min_tokens, max_replicas, emptiest_first, placed):
    """Every donor gives its surplus to as few hosts as possible, and to the tightest such."""
    rank_loads, at_home = starting_loads(loads, first), loads.copy()
    ranks = len(rank_loads)
    free_slots = np.full(ranks, slots, np.int64)
    hosts, rooms, num_hosts = np.empty(ranks, np.int64), np.empty(ranks, np.int64), 0
    for rank in emptiest_first:
        if threshold - rank_loads[rank] >= min_tokens and slots > 0:
            hosts[num_hosts], rooms[num_hosts] = rank, threshold - rank_loads[rank]
            num_hosts += 1
    made = 0
    while True:
        donor = -1
        for rank in range(ranks):
            if rank_loads[rank] > threshold and (donor < 0 or rank_loads[rank] < rank_loads[donor]):
                donor = rank
        if donor < 0:
            break
        expert = hottest(at_home, first, donor)
        surplus = min(rank_loads[donor] - threshold, at_home[expert])
        begin, end = tightest(rooms[:num_hosts], surplus)
        if begin == end:
            break
        for place in range(begin, end):
            quota = min(rooms[place], max(surplus, min_tokens))
            if made >= max_replicas or at_home[expert] < quota:
                return rank_loads.max(), made
            placed[made, 0], placed[made, 1], placed[made, 2] = expert, hosts[place], quota
            made += 1
            surplus -= quota
            move(quota, expert, donor, hosts[place], at_home, rank_loads, free_slots)
        last = hosts[end - 1]  # all others are full
        take_out(hosts, rooms, num_hosts, begin, end)
        num_hosts -= end - begin
        if threshold - rank_loads[last] >= min_tokens and free_slots[last] > 0:
            put_in(hosts, rooms, num_hosts, last, threshold - rank_loads[last])
            num_hosts += 1
    return rank_loads.max(), made


@njit(cache=True)
def tightest(rooms, surplus):
    """Begin and end of the last run of as few neighbours as possible that hold the surplus."""
    length, held = 0, 0
    while held < surplus and length < len(rooms):
        held += rooms[length]
        length += 1
    if held < surplus:
        return 0, 0
    begin = 0
    while begin + length < len(rooms) and held - rooms[begin] + rooms[begin + length] >= surplus:
        held += rooms[begin + length] - rooms[begin]
        begin += 1
    return begin, begin + length
