"""Twin of `reference/members.py`.

Experts are renumbered rank by rank, so that the home experts of a rank are neighbours; `first`
says where each rank begins. Every attempt writes its copies (expert, host, quota) into the rows
of its `placed` and answers (peak, number of copies). `emptiest_first` are the ranks before it, by
load, then rank.
"""

import numpy as np
from numba import njit


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
    """Those at these places leave a line."""
    for place in range(end, count):
        line[place - end + begin], keys[place - end + begin] = line[place], keys[place]


@njit(cache=True)
def alias(loads, first, slots, threshold, min_tokens, max_replicas, placed):
    """The emptiest rank takes from the fullest, exactly what it lacks."""
    rank_loads, at_home = starting_loads(loads, first), loads.copy()
    ranks = len(rank_loads)
    free_slots = np.full(ranks, slots, np.int64)
    hot = hottest_of_all(at_home, first, rank_loads, threshold)
    made = 0
    while made < max_replicas:
        host, need = -1, min_tokens - 1
        for rank in range(ranks):
            if threshold - rank_loads[rank] > need and free_slots[rank] > 0:
                host, need = rank, threshold - rank_loads[rank]
        if host < 0:
            break
        donor, fits, key = -1, False, 0
        for rank in range(ranks):
            if rank_loads[rank] <= threshold:
                continue
            heat = at_home[hot[rank]]
            if heat >= need:
                if not fits or rank_loads[rank] > key:
                    donor, fits, key = rank, True, rank_loads[rank]
            elif not fits and (
                donor < 0 or heat > key or (heat == key and rank_loads[rank] > rank_loads[donor])
            ):
                donor, key = rank, heat
        if donor < 0:
            break
        expert = hot[donor]
        quota = min(need, at_home[expert])
        if quota < min_tokens:
            break
        placed[made, 0], placed[made, 1], placed[made, 2] = expert, host, quota
        made += 1
        move(quota, expert, donor, host, at_home, rank_loads, free_slots)
        hot[donor] = hottest(at_home, first, donor)
    return rank_loads.max(), made


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
