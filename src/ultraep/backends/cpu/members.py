"""Twin of `reference/members.py`.

Experts are renumbered by home rank, so that the experts of a rank are neighbours; `first` says
where each rank begins. Every attempt writes its replicas (expert, host, quota) into the rows of
`placed` and returns (peak, number of replicas).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from ultraep.arrays import IntArray
from ultraep.backends.reference.members import EMPTIEST, FULLEST
from ultraep.config import MAX_ROWS, MAX_THRESHOLD, PARTS, UNLIMITED


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


@njit(cache=True)
def window(domain, threshold, placed):
    """Let every donor give its surplus to the fewest hosts, and to the tightest such."""
    original = domain
    domain, threshold = relative_to(original, threshold)
    rank_loads, at_home = domain.rank_loads.copy(), domain.loads.copy()
    ranks, min_tokens = len(rank_loads), domain.min_tokens
    free_slots = np.full(ranks, domain.slots, np.int64)
    hosts, rooms, num_hosts = np.empty(ranks, np.int64), np.empty(ranks, np.int64), 0
    for rank in domain.emptiest_first:
        if threshold - rank_loads[rank] >= min_tokens and domain.slots > 0:
            hosts[num_hosts], rooms[num_hosts] = rank, threshold - rank_loads[rank]
            num_hosts += 1
    num_copies = 0
    while True:
        donor = -1
        for rank in range(ranks):
            if rank_loads[rank] > threshold and (donor < 0 or rank_loads[rank] < rank_loads[donor]):
                donor = rank
        if donor < 0:
            break
        expert = hottest_movable(at_home, domain, donor, UNLIMITED)
        surplus = min(rank_loads[donor] - threshold, at_home[expert])
        begin, end = tightest(rooms[:num_hosts], surplus)
        if begin == end:
            break
        for place in range(begin, end):
            quota = min(rooms[place], max(surplus, min_tokens))
            if num_copies >= domain.max_replicas or at_home[expert] < quota:
                return peak_after(original, domain, rank_loads), num_copies
            num_copies = replicate(
                expert, donor, hosts[place], quota,
                at_home, rank_loads, free_slots, placed, num_copies,
            )  # fmt: skip
            surplus -= quota
        last = hosts[end - 1]  # the others are full
        remove(hosts, rooms, num_hosts, begin, end)
        num_hosts -= end - begin
        if threshold - rank_loads[last] >= min_tokens and free_slots[last] > 0:
            insert(hosts, rooms, num_hosts, last, threshold - rank_loads[last])
            num_hosts += 1
    return peak_after(original, domain, rank_loads), num_copies


@njit(cache=True)
def tightest(rooms, surplus):
    """Return begin and end of the last run of as few neighbours as possible with enough room."""
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


@njit(cache=True)
def first_like(height, place):
    """Return the first place in the line with the same height."""
    while place > 0 and height[place - 1] == height[place]:
        place -= 1
    return place


@njit(cache=True)
def tight_pair(line, height, donors, count, heat, min_tokens, allowed):
    """Return the largest surplus that one host takes with little waste, and the tightest host."""
    host = count
    for donor in range(donors):
        surplus = height[donor]
        while host > donors and height[host - 1] <= -surplus:
            host -= 1
        fits = host < count and -height[host] - surplus <= allowed
        if fits and min_tokens <= surplus <= heat[line[donor]]:
            return donor, host
    return -1, -1


@njit(cache=True)
def pair_that_leaves_one(
    line, height, donors, count, heat, domain, allowed, anchor_kind, at_home, hot, ready
):
    """Return the places of a donor and a host that it fills, so that its rest fits another rank.

    ready: scratch memory for the places of donors that one replica can settle.
    """
    hosted, anchor = anchor_kind == EMPTIEST, 0
    if anchor_kind != FULLEST:
        anchor = first_like(height, count - 1 if hosted else donors - 1)
    num_ready = 0
    for place in range(donors):
        if domain.min_tokens <= height[place] <= heat[line[place]]:
            ready[num_ready] = place
            num_ready += 1
    best, partner = allowed + 1, -1
    host_at, donor_at = count, num_ready  # of the tightest others; the rest only ever falls
    for other in range(donors) if hosted else range(donors, count):
        donor, host = (other, anchor) if hosted else (anchor, other)
        rest, room = height[donor] + height[host], -height[host]
        if heat[line[donor]] < room:
            continue
        if rest > 0:
            while host_at > donors and -height[host_at - 1] >= rest:
                host_at -= 1
            at = host_at + (host_at == host)
            if at >= count:
                continue
            waste = -height[at] - rest
        else:
            while donor_at > 0 and height[ready[donor_at - 1]] <= -rest:
                donor_at -= 1
            at = donor_at + (donor_at < num_ready and ready[donor_at] == donor)
            if at == num_ready:
                continue
            waste = -height[ready[at]] - rest
        tie_lost = waste == best and partner >= 0 and line[other] > line[partner]
        if waste > min(best, allowed) or tie_lost:
            continue
        giver = line[donor]
        at_home[hot[giver]] -= room
        heat_after = at_home[hottest_movable(at_home, domain, giver, UNLIMITED)]
        at_home[hot[giver]] += room
        if rest <= 0 or domain.min_tokens <= rest <= heat_after:
            best, partner = waste, other
    if partner < 0:
        return -1, -1
    return (partner, anchor) if hosted else (anchor, partner)


@njit(cache=True)
def close_circles(domain, threshold, halves, anchor_kind, placed):
    """Close a circle of two; or prepare one with a replica; or do as `alias` does.

    Ranks are sorted by height (load above the threshold), then by rank: first all donors, the
    fullest first, then all hosts, the tightest first. Settled ranks are removed.
    """
    original = domain
    domain, threshold = relative_to(original, threshold)
    rank_loads, at_home = domain.rank_loads.copy(), domain.loads.copy()
    ranks, first, min_tokens = len(rank_loads), domain.first, domain.min_tokens
    free_slots = np.full(ranks, domain.slots, np.int64)
    hot, heat = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    ready = np.empty(ranks, np.int64)
    line, height = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    donors, count, slack, num_copies = 0, 0, 0, 0
    for rank in domain.emptiest_first[::-1]:
        high = rank_loads[rank] - threshold
        if high > 0 or (high <= -min_tokens and domain.slots > 0):
            insert(line, height, count, rank, high)
            count += 1
            donors += high > 0
            slack -= high
        if high > 0:
            hot[rank] = domain.hottest_first[first[rank]]
            heat[rank] = at_home[hot[rank]]
    while 0 < donors < count and num_copies < domain.max_replicas:
        allowed = max(0, slack) * halves // (2 * donors)
        donor_at, host_at = tight_pair(line, height, donors, count, heat, min_tokens, allowed)
        closed = donor_at >= 0
        if not closed:
            donor_at, host_at = pair_that_leaves_one(
                line, height, donors, count, heat, domain, allowed, anchor_kind, at_home, hot, ready
            )
        if donor_at < 0:
            host_at = first_like(height, count - 1)
            donor_at = fullest_that_can(-height[host_at], line, donors, heat)
        donor, host = line[donor_at], line[host_at]
        quota = height[donor_at] if closed else min(-height[host_at], heat[donor])
        if quota < min_tokens:
            break
        slack += height[donor_at] + height[host_at]
        remove(line, height, count, host_at, host_at + 1)
        remove(line, height, count - 1, donor_at, donor_at + 1)
        count -= 2
        donors -= 1
        num_copies = replicate(
            hot[donor], donor, host, quota, at_home, rank_loads, free_slots, placed, num_copies
        )
        hot[donor] = hottest_movable(at_home, domain, donor, UNLIMITED)
        heat[donor] = at_home[hot[donor]]
        for rank in (donor, host):
            high = rank_loads[rank] - threshold
            can_host = high <= -min_tokens and free_slots[rank] > 0
            if high > 0 or (can_host and not closed):
                insert(line, height, count, rank, high)
                count += 1
                donors += high > 0
                slack -= high
    return peak_after(original, domain, rank_loads), num_copies
