"""Twin of `reference/circles.py`. Arrays as in `members.py`; circles are named by a rank."""

import numpy as np
from numba import njit

from ultraep.backends.cpu.members import hottest, hottest_of_all, starting_loads


@njit(cache=True)
def first_donor(height, is_open, smallest_first):
    """The donor that chooses next, the number of donors, and what all lack together."""
    donor, donors, slack = -1, 0, 0
    for circle in range(len(height)):
        if not is_open[circle]:
            continue
        slack -= height[circle]
        if height[circle] > 0:
            donors += 1
            if donor < 0 or (
                height[circle] < height[donor]
                if smallest_first
                else height[circle] > height[donor]
            ):
                donor = circle
    return donor, donors, slack


@njit(cache=True)
def line_up(height, is_open, donor, line):
    """The other circles, the highest first, then the lower name. How many they are."""
    others = 0
    for circle in range(len(height)):
        if is_open[circle] and circle != donor:
            place = others
            while place > 0 and height[line[place - 1]] < height[circle]:
                line[place] = line[place - 1]
                place -= 1
            line[place] = circle
            others += 1
    return others


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
def draw_circles(height, halves, smallest_first):
    """The circle of every rank. `height` is overwritten."""
    ranks = len(height)
    circle_of_rank, line = np.arange(ranks), np.empty(ranks, np.int64)
    is_open = np.ones(ranks, np.bool_)
    while True:
        donor, donors, slack = first_donor(height, is_open, smallest_first)
        if donor < 0:
            break
        allowed = slack * halves // (2 * donors)
        others = line_up(height, is_open, donor, line)
        host, other = -1, -1
        for place in range(others):
            if height[line[place]] <= -height[donor]:
                host = line[place]
                break
        closed = host >= 0 and -height[donor] - height[host] <= allowed
        if not closed:
            a, b = tightest_pair(height, line, others, -height[donor], allowed)
            if a >= 0:
                host, other, closed = a, b, True
        if host < 0:
            for place in range(others):
                if height[line[place]] < 0 and (host < 0 or height[line[place]] < height[host]):
                    host = line[place]
            if host < 0:
                break
        height[host] += height[donor]
        is_open[donor] = False
        rename(circle_of_rank, donor, host)
        if other >= 0:
            is_open[other] = False
            rename(circle_of_rank, other, host)
        if closed:
            is_open[host] = False
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
        at_home[expert] -= quota
        rank_loads[donor] -= quota
        rank_loads[host] += quota
        free_slots[host] -= 1
        hot[donor] = hottest(at_home, first, donor)
    return rank_loads.max(), made
