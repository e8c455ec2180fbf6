"""Twin of `reference/circles.py`. Arrays as in `members.py`.

Ranks stand in a line, the highest first, then the lower rank: first all donors, the fullest first,
then all hosts, the tightest first. Whoever is done has left it.
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.members import hottest, hottest_of_all, move, starting_loads
from ultraep.backends.reference.circles import EMPTIEST, FULLEST


@njit(cache=True)
def take_out(line, count, rank):
    """One rank leaves the line."""
    place = 0
    while line[place] != rank:
        place += 1
    for after in range(place + 1, count):
        line[after - 1] = line[after]


@njit(cache=True)
def put_in(line, count, rank, height):
    """One rank joins the line."""
    place = count
    while place > 0:
        before = line[place - 1]
        if height[before] > height[rank] or (height[before] == height[rank] and before < rank):
            break
        line[place] = before
        place -= 1
    line[place] = rank


@njit(cache=True)
def first_like(line, place, height):
    """The first in the line that is as high as the one at this place."""
    while place > 0 and height[line[place - 1]] == height[line[place]]:
        place -= 1
    return line[place]


@njit(cache=True)
def tight_pair(height, line, donors, count, heat, min_tokens, allowed):
    """The largest surplus that one host takes, and wastes little; and the tightest such host."""
    at = count
    for place in range(donors):
        donor = line[place]
        surplus = height[donor]
        while at > donors and -height[line[at - 1]] >= surplus:
            at -= 1
        fits = at < count and -height[line[at]] - surplus <= allowed
        if fits and min_tokens <= surplus <= heat[donor]:
            return donor, line[at]
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
    height, line, donors, count, heat, min_tokens, allowed, anchor_kind, at_home, first, hot
):
    """A donor that fills a host, so that what is left of it fits tightly with another rank."""
    hosted = anchor_kind == EMPTIEST
    anchor = line[0]
    if anchor_kind != FULLEST:
        anchor = first_like(line, count - 1 if hosted else donors - 1, height)
    ready, num_ready = np.empty(donors, np.int64), 0
    for place in range(donors):
        if min_tokens <= height[line[place]] <= heat[line[place]]:
            ready[num_ready] = line[place]
            num_ready += 1
    best, partner = allowed + 1, -1
    host_at, donor_at = count, num_ready  # of the tightest others; what is left only ever falls
    for place in range(donors) if hosted else range(donors, count):
        other = line[place]
        donor, host = (other, anchor) if hosted else (anchor, other)
        rest = height[donor] + height[host]
        if rest > 0:
            while host_at > donors and -height[line[host_at - 1]] >= rest:
                host_at -= 1
            at = host_at + (host_at < count and line[host_at] == host)
            if at == count:
                continue
            waste = -height[line[at]] - rest
        else:
            while donor_at > 0 and height[ready[donor_at - 1]] <= -rest:
                donor_at -= 1
            at = donor_at + (donor_at < num_ready and ready[donor_at] == donor)
            if at == num_ready:
                continue
            waste = -height[ready[at]] - rest
        if waste > best or (waste == best and other > partner) or heat[donor] < -height[host]:
            continue
        if rest > 0 and (
            rest < min_tokens
            or rest > hottest_then(at_home, first, donor, hot[donor], -height[host])
        ):
            continue
        best, partner = waste, other
    if partner < 0:
        return -1, -1
    return (partner, anchor) if hosted else (anchor, partner)


@njit(cache=True)
def fullest_that_can(need, line, donors, heat):
    """The fullest donor that can give it all; if none can, the one with the hottest expert."""
    donor = line[0]
    for place in range(donors):
        if heat[line[place]] >= need:
            return line[place]
        if heat[line[place]] > heat[donor]:
            donor = line[place]
    return donor


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
    heat, height = at_home[hot], rank_loads - threshold
    line, donors, count, slack = np.empty(ranks, np.int64), 0, 0, 0
    for rank in emptiest_first[::-1]:
        if height[rank] > 0 or (height[rank] <= -min_tokens and slots > 0):
            put_in(line, count, rank, height)
            count += 1
            donors += height[rank] > 0
            slack -= height[rank]
    made = 0
    while 0 < donors < count and made < max_replicas:
        allowed = max(0, slack) * halves // (2 * donors)
        donor, host = tight_pair(height, line, donors, count, heat, min_tokens, allowed)
        closed = donor >= 0
        if not closed:
            donor, host = pair_that_leaves_one(
                height, line, donors, count, heat, min_tokens, allowed, anchor_kind,
                at_home, first, hot,
            )  # fmt: skip
        if donor < 0:
            host = first_like(line, count - 1, height)
            donor = fullest_that_can(-height[host], line, donors, heat)
        quota = height[donor] if closed else min(-height[host], heat[donor])
        if quota < min_tokens:
            break
        placed[made, 0], placed[made, 1], placed[made, 2] = hot[donor], host, quota
        made += 1
        slack += height[donor] + height[host]
        for rank in (donor, host):
            take_out(line, count, rank)
            count -= 1
        donors -= 1
        move(quota, hot[donor], donor, host, at_home, rank_loads, free_slots)
        hot[donor] = hottest(at_home, first, donor)
        heat[donor] = at_home[hot[donor]]
        for rank in (donor, host):
            height[rank] = rank_loads[rank] - threshold
            can_host = height[rank] <= -min_tokens and free_slots[rank] > 0
            if height[rank] > 0 or (can_host and not closed):
                put_in(line, count, rank, height)
                count += 1
                donors += height[rank] > 0
                slack -= height[rank]
    return rank_loads.max(), made
