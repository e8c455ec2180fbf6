"""Twin of `reference/circles.py`. Arrays as in `members.py`.

Ranks stand in a line, the highest first, then the lower rank: first all donors, the fullest first,
then all hosts, the tightest first. Whoever is done has left it. `height` are those of the line.
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.members import (
    fullest_that_can,
    hottest,
    hottest_of_all,
    move,
    put_in,
    starting_loads,
    take_out,
)
from ultraep.backends.reference.circles import EMPTIEST, FULLEST


@njit(cache=True)
def first_like(height, place):
    """The first place in the line that is as high as this one."""
    while place > 0 and height[place - 1] == height[place]:
        place -= 1
    return place


@njit(cache=True)
def tight_pair(line, height, donors, count, heat, min_tokens, allowed):
    """The largest surplus that one host takes, and wastes little; and the tightest such host."""
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
def hottest_then(at_home, first, donor, hot, room):
    """Tokens of the donor's hottest expert after it has filled a host."""
    most = at_home[hot] - room
    for expert in range(first[donor], first[donor + 1]):
        if expert != hot:
            most = max(most, at_home[expert])
    return most


@njit(cache=True)
def pair_that_leaves_one(
    line, height, donors, count, heat, min_tokens, allowed, anchor_kind, at_home, first, hot, ready
):
    """A donor that fills a host, so that what is left of it fits tightly with another rank.

    Their places in the line. ready: room for those of donors that one copy can free.
    """
    hosted, anchor = anchor_kind == EMPTIEST, 0
    if anchor_kind != FULLEST:
        anchor = first_like(height, count - 1 if hosted else donors - 1)
    num_ready = 0
    for place in range(donors):
        if min_tokens <= height[place] <= heat[line[place]]:
            ready[num_ready] = place
            num_ready += 1
    best, partner = allowed + 1, -1
    host_at, donor_at = count, num_ready  # of the tightest others; what is left only ever falls
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
        if waste > best or (waste == best and partner >= 0 and line[other] > line[partner]):
            continue
        giver = line[donor]
        if waste <= allowed and (
            rest <= 0 or min_tokens <= rest <= hottest_then(at_home, first, giver, hot[giver], room)
        ):
            best, partner = waste, other
    if partner < 0:
        return -1, -1
    return (partner, anchor) if hosted else (anchor, partner)


@njit(cache=True)
def close_circles(
    loads, first, slots, threshold, min_tokens, max_replicas, emptiest_first, halves, anchor_kind,
    placed,
):  # fmt: skip
    """Close a circle of two; or make a copy that leaves two that fit; or do as `alias` does."""
    rank_loads, at_home = starting_loads(loads, first), loads.copy()
    ranks = len(rank_loads)
    free_slots = np.full(ranks, slots, np.int64)
    hot = hottest_of_all(at_home, first, rank_loads, threshold)
    heat, ready = at_home[hot], np.empty(ranks, np.int64)
    line, height = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    donors, count, slack, made = 0, 0, 0, 0
    for rank in emptiest_first[::-1]:
        high = rank_loads[rank] - threshold
        if high > 0 or (high <= -min_tokens and slots > 0):
            put_in(line, height, count, rank, high)
            count += 1
            donors += high > 0
            slack -= high
    while 0 < donors < count and made < max_replicas:
        allowed = max(0, slack) * halves // (2 * donors)
        donor_at, host_at = tight_pair(line, height, donors, count, heat, min_tokens, allowed)
        closed = donor_at >= 0
        if not closed:
            donor_at, host_at = pair_that_leaves_one(
                line, height, donors, count, heat, min_tokens, allowed, anchor_kind,
                at_home, first, hot, ready,
            )  # fmt: skip
        if donor_at < 0:
            host_at = first_like(height, count - 1)
            donor_at = fullest_that_can(-height[host_at], line, donors, heat)
        donor, host = line[donor_at], line[host_at]
        quota = height[donor_at] if closed else min(-height[host_at], heat[donor])
        if quota < min_tokens:
            break
        placed[made, 0], placed[made, 1], placed[made, 2] = hot[donor], host, quota
        made += 1
        slack += height[donor_at] + height[host_at]
        take_out(line, height, count, host_at, host_at + 1)
        take_out(line, height, count - 1, donor_at, donor_at + 1)
        count -= 2
        donors -= 1
        move(quota, hot[donor], donor, host, at_home, rank_loads, free_slots)
        hot[donor] = hottest(at_home, first, donor)
        heat[donor] = at_home[hot[donor]]
        for rank in (donor, host):
            high = rank_loads[rank] - threshold
            can_host = high <= -min_tokens and free_slots[rank] > 0
            if high > 0 or (can_host and not closed):
                put_in(line, height, count, rank, high)
                count += 1
                donors += high > 0
                slack -= high
    return rank_loads.max(), made
