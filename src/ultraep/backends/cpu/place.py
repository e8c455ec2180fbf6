"""Twin of `reference/place.py`, where the two members and the search are explained.

Experts are renumbered rank by rank, so that the home experts of a rank are neighbours; `first`
says where each rank begins. Every attempt writes its copies (expert, host, quota) into the rows
of its `placed` and answers (peak, number of copies).
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.bound import bound_of_domain, sort_again
from ultraep.config import PARTS


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
def alias(loads, first, slots, threshold, min_tokens, max_replicas, placed):
    """The emptiest rank takes from the fullest, exactly what it lacks."""
    rank_loads, at_home = starting_loads(loads, first), loads.copy()
    ranks = len(rank_loads)
    free_slots = np.full(ranks, slots, np.int64)
    hot = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        if rank_loads[rank] > threshold:
            hot[rank] = hottest(at_home, first, rank)
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
        at_home[expert] -= quota
        rank_loads[donor] -= quota
        rank_loads[host] += quota
        free_slots[host] -= 1
        hot[donor] = hottest(at_home, first, donor)
    return rank_loads.max(), made


@njit(cache=True)
def window(loads, first, slots, threshold, min_tokens, max_replicas, placed):
    """Every donor gives its surplus to as few hosts as possible, and to the tightest such."""
    rank_loads, at_home = starting_loads(loads, first), loads.copy()
    ranks = len(rank_loads)
    free_slots = np.full(ranks, slots, np.int64)
    emptiest_first = np.arange(ranks)
    hosts = np.empty(ranks, np.int64)
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
        sort_again(emptiest_first, rank_loads)
        num_hosts = 0
        for rank in emptiest_first:
            if threshold - rank_loads[rank] >= min_tokens and free_slots[rank] > 0:
                hosts[num_hosts] = rank
                num_hosts += 1
        begin, end = tightest(threshold - rank_loads[hosts[:num_hosts]], surplus)
        for host in hosts[begin:end]:
            quota = min(threshold - rank_loads[host], max(surplus, min_tokens))
            if made >= max_replicas or at_home[expert] < quota:
                return rank_loads.max(), made
            placed[made, 0], placed[made, 1], placed[made, 2] = expert, host, quota
            made += 1
            surplus -= quota
            at_home[expert] -= quota
            rank_loads[donor] -= quota
            rank_loads[host] += quota
            free_slots[host] -= 1
        if begin == end:
            break
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


@njit(cache=True)
def copy_rows(target, source, count):
    for row in range(count):
        for column in range(3):
            target[row, column] = source[row, column]


@njit(cache=True)
def sort_rows(rows, count):
    """Insertion sort by expert, then host."""
    for index in range(1, count):
        expert, host, quota = rows[index, 0], rows[index, 1], rows[index, 2]
        place = index
        while place > 0 and (
            rows[place - 1, 0] > expert
            or (rows[place - 1, 0] == expert and rows[place - 1, 1] > host)
        ):
            for column in range(3):
                rows[place, column] = rows[place - 1, column]
            place -= 1
        rows[place, 0], rows[place, 1], rows[place, 2] = expert, host, quota


@njit(cache=True)
def probe(loads, first, slots, threshold, min_tokens, max_replicas, placed, spare):
    """The best attempt at this threshold: the lowest peak above it, then the fewest copies."""
    peak, made = alias(loads, first, slots, threshold, min_tokens, max_replicas, placed)
    if threshold * (len(first) - 1) - loads.sum() >= len(first) - 1:
        other_peak, other_made = window(
            loads, first, slots, threshold, min_tokens, max_replicas, spare
        )
        floor, other_floor = max(peak, threshold), max(other_peak, threshold)
        if other_floor < floor or (other_floor == floor and other_made <= made):
            copy_rows(placed, spare, other_made)
            return other_peak, other_made
    return peak, made


@njit(cache=True)
def solve(loads, first, slots, threshold, min_tokens, max_replicas, placed):
    """The best attempt at the threshold, or at the least one above it that can be met.

    The number of copies; they stand in the first rows of `placed`.
    """
    trial, spare = np.empty_like(placed), np.empty_like(placed)
    peak, made = probe(loads, first, slots, threshold, min_tokens, max_replicas, placed, spare)
    if peak <= threshold:
        return made
    failed = max(threshold, bound_of_domain(loads, first, slots, max_replicas) - 1)
    middle = failed + 1
    while peak - failed > 1:
        trial_peak, trial_made = probe(
            loads, first, slots, middle, min_tokens, max_replicas, trial, spare
        )
        if trial_peak > middle:
            failed = middle
        if trial_peak < peak:
            peak, made = trial_peak, trial_made
            copy_rows(placed, trial, made)
        middle = (failed + peak) // 2
    return made


@njit(cache=True)
def shared_threshold(loads, first_of_rank, domain, tolerance_parts):
    """What no rank shall exceed: the heaviest domain's mean, rounded up, and the tolerance."""
    threshold = 0
    for begin in range(0, len(first_of_rank) - 1, domain):
        total = loads[first_of_rank[begin] : first_of_rank[begin + domain]].sum()
        mean = -(-total // domain)
        threshold = max(threshold, mean, total * (PARTS + tolerance_parts) // (domain * PARTS))
    return threshold


@njit(cache=True)
def place(
    expert_loads,
    experts_by_rank,
    first_of_rank,
    domain,
    slots,
    tolerance_parts,
    min_tokens,
    max_replicas,
):
    """[C, 3] expert, host rank and quota of every copy, ordered by expert, then host."""
    ranks = len(first_of_rank) - 1
    loads = expert_loads[experts_by_rank]
    threshold = shared_threshold(loads, first_of_rank, domain, tolerance_parts)
    limit = min(max_replicas, domain * slots)
    found = np.empty((ranks * slots, 3), np.int64)
    placed = np.empty((limit, 3), np.int64)
    total = 0
    for begin in range(0, ranks, domain):
        first = first_of_rank[begin : begin + domain + 1]
        made = solve(
            loads[first[0] : first[-1]],
            first - first[0],
            slots,
            threshold,
            min_tokens,
            limit,
            placed,
        )
        for copy in range(made):
            found[total, 0] = experts_by_rank[first[0] + placed[copy, 0]]
            found[total, 1] = begin + placed[copy, 1]
            found[total, 2] = placed[copy, 2]
            total += 1
    sort_rows(found, total)
    return found[:total]
