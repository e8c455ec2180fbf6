"""Greedy heuristics that try to meet a threshold.

alias     the emptiest rank takes exactly what it lacks from the fullest
thrifty   alias, but a surplus that fits tightly into one host goes there alone

A threshold limits the rows of every rank. Without speeds it counts rows, and all ranks have the
same limit. With speeds it counts thousandths of a row at nominal speed, and limits are in
proportion to speeds.

Shapes: R ranks and E experts of a domain, C replicas. Ranks and experts are numbered within the
domain, experts by home rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import MAX_ROWS, MAX_THRESHOLD, UNLIMITED

NOBODY = -1
MOST_RANKS = 1 << 20  # times `MAX_ROWS`, less than 2**52


class Domain(NamedTuple):
    """The ranks of one fast-link domain."""

    loads: IntArray  # [E] rows of every expert
    first: IntArray  # [R + 1] rank r is home of the experts from first[r] to first[r + 1]
    hottest_first: IntArray  # [E] home experts of every rank, most rows first, then by index
    rank_loads: IntArray  # [R]
    emptiest_first: IntArray  # [R] ranks by the least threshold that allows their loads
    weights: IntArray  # [R] speeds, or 1 for all
    scale: int  # a rank may hold threshold * weight // scale rows
    unit: int  # of thresholds, per row at nominal speed
    mean: int  # the least threshold whose limits together allow all rows
    slots: int
    min_tokens: int
    max_replicas: int


class Attempt(NamedTuple):
    """A plan of one domain, or the best that could be done."""

    threshold: int
    peak: int  # the least threshold that it meets
    transfers: int  # most replicas that one rank receives, or experts that it gives away
    heights: IntArray  # [R] rows of every rank above its limit; negative: below
    replicas: IntArray  # [C, 3] expert, host and quota of every replica


def limits_at(threshold: int, weights: IntArray, scale: int) -> IntArray:
    """[R] most rows of every rank."""
    if scale == 1:
        return np.full(len(weights), min(threshold, MAX_ROWS), np.int64)
    limits = np.empty_like(weights)
    for rank, weight in enumerate(weights):
        limits[rank] = min(min(threshold, MAX_THRESHOLD) * weight // scale, MAX_ROWS)
    return limits


def peak_of(domain: Domain, rank_loads: IntArray) -> int:
    """Return the least threshold that allows these loads."""
    if domain.scale == 1:
        return int(rank_loads.max())
    peak = 0
    for rank, weight in enumerate(domain.weights):
        peak = max(peak, -(-rank_loads[rank] * domain.scale // weight))
    return peak


def alias(domain: Domain, threshold: int) -> Attempt:
    """Let the emptiest rank take exactly what it lacks from the fullest.

    As in Walker's alias method the donor may fall below the threshold; it is then itself served as
    the emptiest. With one slot per home expert on every rank and equal speeds, this always meets
    the mean.
    """
    return attempt(domain, threshold, UNLIMITED, False)


def thrifty(domain: Domain, threshold: int, links: int) -> Attempt:
    """Like `alias`, but a surplus that fits tightly into one host goes there alone.

    One replica then settles two ranks and wastes the remaining room of the host. All donors
    together may waste the slack, each an even share of it. Less than a row per rank is not worth
    the search: that is the rounding of the mean.

    links: most replicas that a rank may receive, and most of its experts that it may give away.
    """
    return attempt(domain, threshold, links, True)


def attempt(domain: Domain, threshold: int, links: int, in_pairs: bool) -> Attempt:
    """Make one replica after another until no rank is above its limit, or no host is left.

    `donors` and `hosts` are sorted lines of keys, which `alias` serves from the end.
    """
    limits = limits_at(threshold, domain.weights, domain.scale)
    heights, at_home = domain.rank_loads - limits, domain.loads.copy()
    free_slots = np.full(len(limits), min(domain.slots, links), np.int64)
    hottest, heat = np.zeros_like(limits), np.zeros_like(limits)  # expert of a donor, and its rows
    donors, hosts, num_donors, num_hosts = np.empty_like(limits), np.empty_like(limits), 0, 0
    first, hottest_first = domain.first, domain.hottest_first
    for rank in domain.emptiest_first:
        if heights[rank] > 0:
            num_donors = insert(donors, num_donors, key_of(heights[rank], rank))
            hottest[rank] = hottest_first[first[rank]]
            heat[rank] = at_home[hottest[rank]]
    for rank in domain.emptiest_first[::-1]:
        if -heights[rank] >= domain.min_tokens and free_slots[rank] > 0:
            num_hosts = insert(hosts, num_hosts, key_of(-heights[rank], rank))
    slack = -heights.sum()
    in_pairs = in_pairs and slack >= len(limits)
    num_given, num_received, transfers = np.zeros_like(limits), np.zeros_like(limits), 0
    replicas, number = np.empty((domain.max_replicas, 3), np.int64), 0
    while number < domain.max_replicas and num_donors > 0 and num_hosts > 0:
        donor_at = host_at = NOBODY
        if in_pairs:
            donor_at, host_at = tightest_pair(
                donors[:num_donors], hosts[:num_hosts], heat, domain.min_tokens, slack
            )
        tight = host_at != NOBODY
        if not tight:
            donor_at, host_at = take(donors[:num_donors], hosts[:num_hosts], heat)
        donor, host = rank_of(donors[donor_at]), rank_of(hosts[host_at])
        quota = heights[donor] if tight else min(-heights[host], heat[donor])
        if quota < domain.min_tokens:
            break
        expert = hottest[donor]
        replicas[number, 0], replicas[number, 1], replicas[number, 2] = expert, host, quota
        number += 1
        num_given[donor] += at_home[expert] == domain.loads[expert]
        num_received[host] += 1
        transfers = max(transfers, num_given[donor], num_received[host])
        at_home[expert] -= quota
        heights[donor] -= quota
        heights[host] += quota
        free_slots[host] -= 1
        if tight:  # the rest of the room is wasted
            slack += heights[host]
            free_slots[host] = 0
        begin, end = first[donor], min(first[donor + 1], first[donor] + links)
        hottest[donor] = hottest_of(hottest_first[begin:end], at_home)
        heat[donor] = at_home[hottest[donor]]
        num_donors = remove(donors, num_donors, donor_at)
        num_hosts = remove(hosts, num_hosts, host_at)
        for rank in (donor, host):
            if heights[rank] > 0:
                num_donors = insert(donors, num_donors, key_of(heights[rank], rank))
            elif -heights[rank] >= domain.min_tokens and free_slots[rank] > 0:
                num_hosts = insert(hosts, num_hosts, key_of(-heights[rank], rank))
    peak = peak_of(domain, heights + limits)
    return Attempt(threshold, peak, transfers, heights, replicas[:number])


def take(donors: IntArray, hosts: IntArray, heat: IntArray) -> tuple[int, int]:
    """Return the places of the fullest donor that can give the emptiest host all it lacks, and of
    that host.

    If no donor can, take from the one with the hottest expert.
    """
    host_at, donor_at, most = len(hosts) - 1, NOBODY, NOBODY
    for place in range(len(donors) - 1, -1, -1):
        rows = heat[rank_of(donors[place])]
        if rows > most:
            donor_at, most = place, rows
        if rows >= rows_of(hosts[host_at]):
            return place, host_at
    return donor_at, host_at


def tightest_pair(
    donors: IntArray, hosts: IntArray, heat: IntArray, min_tokens: int, slack: int
) -> tuple[int, int]:
    """Return the places of the least surplus that one expert carries and of its tightest host.

    The host is NOBODY if none has room, or if the pair would waste more than its share of the
    slack.
    """
    for place in range(len(donors)):
        surplus = rows_of(donors[place])
        if min_tokens <= surplus <= heat[rank_of(donors[place])]:
            host_at = first_with(hosts, surplus)
            if host_at < len(hosts) and (rows_of(hosts[host_at]) - surplus) * len(donors) <= slack:
                return place, host_at
            return place, NOBODY
    return NOBODY, NOBODY


def hottest_of(experts: IntArray, at_home: IntArray) -> int:
    """Return the expert with the most rows at home; the lower index on a tie."""
    best: int = experts[0]
    for expert in experts:
        hotter = at_home[expert] - at_home[best]
        if hotter > 0 or (hotter == 0 and expert < best):
            best = expert
    return best


def key_of(rows: int, rank: int) -> int:
    """Return a number that sorts ranks by rows; on a tie, the lower rank is larger."""
    return rows * MOST_RANKS - rank


def rank_of(key: int) -> int:
    """Return the rank in a key."""
    return -key % MOST_RANKS


def rows_of(key: int) -> int:
    """Return the rows in a key."""
    return -(-key // MOST_RANKS)


def first_with(line: IntArray, rows: int) -> int:
    """Return the first place in a sorted line with at least so many rows."""
    low, high = 0, len(line)
    while low < high:
        middle = (low + high) // 2
        if rows_of(line[middle]) < rows:
            low = middle + 1
        else:
            high = middle
    return low


def insert(line: IntArray, size: int, key: int) -> int:
    """Insert a key into a sorted line; return its new size."""
    place = size
    while place > 0 and line[place - 1] > key:
        line[place] = line[place - 1]
        place -= 1
    line[place] = key
    return size + 1


def remove(line: IntArray, size: int, place: int) -> int:
    """Remove the key at a place from a sorted line; return its new size."""
    for behind in range(place + 1, size):
        line[behind - 1] = line[behind]
    return size - 1
