"""Twin of `reference/circles.py`. Arrays as in `members.py`; circles are named by a rank."""

import numpy as np
from numba import njit

from ultraep.backends.cpu.members import hottest, hottest_of_all, move, starting_loads


@njit(cache=True)
def take_out(line, count, circle):
    """One circle leaves the line."""
    place = 0
    while line[place] != circle:
        place += 1
    for after in range(place + 1, count):
        line[after - 1] = line[after]


@njit(cache=True)
def put_in(line, count, circle, height):
    """One circle joins the line: the highest first, then the lower name."""
    place = count
    while place > 0:
        before = line[place - 1]
        if height[before] > height[circle] or (
            height[before] == height[circle] and before < circle
        ):
            break
        line[place] = before
        place -= 1
    line[place] = circle


@njit(cache=True)
def first_like(line, place, height):
    """The first in the line that is as high as the one at this place."""
    while place > 0 and height[line[place - 1]] == height[line[place]]:
        place -= 1
    return line[place]


@njit(cache=True)
def tightest_pair(height, line, others, most, allowed):
    """Two circles that are at most so high together, as high as there are; -1: none."""
    a, b, least = -1, -1, allowed + 1
    end = others  # those from here on are low enough; the lower the first, the more are
    for place in range(others - 1):
        rest = most - height[line[place]]
        while end > 0 and height[line[end - 1]] <= rest:
            end -= 1
        other = max(end, place + 1)
        if other < others and rest - height[line[other]] < least:
            a, b, least = line[place], line[other], rest - height[line[other]]
    return a, b


@njit(cache=True)
def rename(circle_of_rank, old, new):
    for rank in range(len(circle_of_rank)):
        if circle_of_rank[rank] == old:
            circle_of_rank[rank] = new


@njit(cache=True)
def choose_hosts(height, line, others, surplus, allowed):
    """Whose circle a donor joins, a second one that joins it too, and whether that closes it."""
    tight = -1
    for place in range(others):
        if height[line[place]] <= -surplus:
            tight = line[place]
            break
    if tight >= 0 and -surplus - height[tight] <= allowed:
        return tight, -1, True
    host, second = tightest_pair(height, line, others, -surplus, allowed)
    if host >= 0:
        return host, second, True
    if tight < 0 and others > 0 and height[line[others - 1]] < 0:
        tight = first_like(line, others - 1, height)
    return tight, -1, False


@njit(cache=True)
def draw_circles(height, halves, smallest_first):
    """The circle of every rank. `height` is overwritten."""
    ranks = len(height)
    circle_of_rank, line = np.arange(ranks), np.empty(ranks, np.int64)
    donors, slack, count = 0, 0, 0
    for rank in range(ranks):
        put_in(line, count, rank, height)
        count += 1
        donors += height[rank] > 0
        slack -= height[rank]
    while donors > 0:
        donor = first_like(line, donors - 1, height) if smallest_first else line[0]
        surplus, allowed = height[donor], slack * halves // (2 * donors)
        take_out(line, count, donor)
        count -= 1
        host, second, closed = choose_hosts(height, line, count, surplus, allowed)
        if host < 0:
            break
        donors -= 1 + (height[host] > 0)
        take_out(line, count, host)
        count -= 1
        height[host] += surplus
        rename(circle_of_rank, donor, host)
        if second >= 0:
            take_out(line, count, second)
            count -= 1
            height[host] += height[second]
            rename(circle_of_rank, second, host)
        if closed:
            slack += height[host]
        else:
            put_in(line, count, host, height)
            count += 1
            donors += height[host] > 0
    return circle_of_rank


@njit(cache=True)
def within_circles(
    loads, first, slots, threshold, min_tokens, max_replicas, halves, smallest_first, placed
):
    """As `alias`, but inside the circle of the fullest rank, as long as anyone there has room."""
    rank_loads, at_home = starting_loads(loads, first), loads.copy()
    ranks = len(rank_loads)
    circle_of_rank = draw_circles(rank_loads - threshold, halves, smallest_first)
    free_slots = np.full(ranks, slots, np.int64)
    hot = hottest_of_all(at_home, first, rank_loads, threshold)
    made = 0
    while made < max_replicas:
        fullest = np.argmax(rank_loads)
        if rank_loads[fullest] <= threshold:
            break
        circle = circle_of_rank[fullest]
        host, need, inside = -1, min_tokens - 1, False
        for rank in range(ranks):
            room = threshold - rank_loads[rank]
            if room < min_tokens or free_slots[rank] == 0:
                continue
            own = circle_of_rank[rank] == circle
            if (own and not inside) or (own == inside and room > need):
                host, need, inside = rank, room, own
        if host < 0:
            break
        if not inside:
            rename(circle_of_rank, circle_of_rank[host], circle)
        donor, fits = -1, False
        for rank in range(ranks):
            if rank_loads[rank] <= threshold or circle_of_rank[rank] != circle:
                continue
            heat = at_home[hot[rank]]
            if heat >= need:
                if not fits or rank_loads[rank] > rank_loads[donor]:
                    donor, fits = rank, True
            elif not fits and (
                donor < 0
                or heat > at_home[hot[donor]]
                or (heat == at_home[hot[donor]] and rank_loads[rank] > rank_loads[donor])
            ):
                donor = rank
        expert = hot[donor]
        quota = min(need, at_home[expert])
        if quota < min_tokens:
            break
        placed[made, 0], placed[made, 1], placed[made, 2] = expert, host, quota
        made += 1
        move(quota, expert, donor, host, at_home, rank_loads, free_slots)
        hot[donor] = hottest(at_home, first, donor)
    return rank_loads.max(), made
