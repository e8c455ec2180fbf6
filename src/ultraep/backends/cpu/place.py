"""Twin of `reference/place.py`, where the search and the ladder are explained.

The rows of `placed`, and the numbers of experts in it, are those of `members.py`.
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.bound import bound_of_domain
from ultraep.backends.cpu.circles import close_circles
from ultraep.backends.cpu.members import alias, starting_loads, window
from ultraep.backends.reference.circles import MOST_RANKS, VARIANTS
from ultraep.backends.reference.place import GUESSES
from ultraep.config import LADDER, PARTS


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
    """The best attempt at this threshold. Its peak and copies, and the peak of `alias`."""
    limits = (min_tokens, max_replicas)
    ranks = len(first) - 1
    alias_peak, made = alias(loads, first, slots, threshold, *limits, placed)
    peak = alias_peak
    if threshold * ranks - loads.sum() < ranks:
        return peak, made, alias_peak
    fanout, egress, _ = weigh(placed, made, first)
    for member in range(1 + len(VARIANTS) if ranks <= MOST_RANKS else 1):
        if member == 0:
            trial_peak, trial_made = window(loads, first, slots, threshold, *limits, spare)
        else:
            halves, anchor = VARIANTS[member - 1]
            trial_peak, trial_made = close_circles(
                loads, first, slots, threshold, *limits, halves, anchor, spare
            )
        trial_fanout, trial_egress, _ = weigh(spare, trial_made, first)
        trial = (max(trial_peak, threshold), trial_made, trial_fanout, trial_egress)
        best = (max(peak, threshold), made, fanout, egress)
        if trial < best or (trial == best and member == 0):
            peak, made, fanout, egress = trial_peak, trial_made, trial_fanout, trial_egress
            copy_rows(placed, spare, made)
    return peak, made, alias_peak


@njit(cache=True)
def weigh(found, made, first):
    """Most copies of one expert, experts that one rank gives away, copies that one receives."""
    ranks = len(first) - 1
    copies_of, received = np.zeros(first[-1], np.int64), np.zeros(ranks, np.int64)
    for copy in range(made):
        copies_of[found[copy, 0]] += 1
        received[found[copy, 1]] += 1
    fanout, egress, ingress = 0, 0, 0
    for rank in range(ranks):
        given = 0
        for expert in range(first[rank], first[rank + 1]):
            fanout = max(fanout, copies_of[expert])
            given += copies_of[expert] > 0
        egress, ingress = max(egress, given), max(ingress, received[rank])
    return fanout, egress, ingress


@njit(cache=True)
def solve(loads, first, slots, threshold, min_tokens, max_replicas, placed):
    """The best attempt at the threshold, or at the least one above it that `alias` meets.

    Its peak and the number of copies; they stand in the first rows of `placed`.
    """
    trial = np.empty_like(placed)
    peak, made, last_peak = probe(
        loads, first, slots, threshold, min_tokens, max_replicas, placed, trial
    )
    if peak <= threshold:
        return peak, made
    failed = max(threshold, bound_of_domain(loads, first, slots, max_replicas) - 1)
    _, count = alias(loads, first, slots, threshold, min_tokens, max_replicas, trial)
    last = threshold
    middle = max(failed + 1, last + excess_share(loads, first, trial, count, last))
    met, tries = 0, 0
    while peak - failed > 1:
        middle = min(middle, peak - 1)
        trial_peak, count = alias(loads, first, slots, middle, min_tokens, max_replicas, trial)
        tries += 1
        if trial_peak < peak:
            peak, made = trial_peak, count
            copy_rows(placed, trial, made)
        if trial_peak <= middle:
            met += 1
            middle = peak - 1 if met == 1 else (failed + peak) // 2
            continue
        above = trial_peak - middle
        gain = last_peak - last - above
        if gain > 0:
            step = -(-above * (middle - last) // gain)
        else:
            step = excess_share(loads, first, trial, count, middle)
        last, last_peak, failed = middle, trial_peak, middle
        middle = middle + max(1, step) if met == 0 and tries < GUESSES else (failed + peak) // 2
    return peak, made


@njit(cache=True)
def excess_share(loads, first, placed, made, threshold):
    """What is too much, shared among the ranks that are full, rounded up."""
    rank_loads = starting_loads(loads, first)
    for copy in range(made):
        home = np.searchsorted(first, placed[copy, 0], side="right") - 1
        rank_loads[home] -= placed[copy, 2]
        rank_loads[placed[copy, 1]] += placed[copy, 2]
    over, full = 0, 0
    for load in rank_loads:
        if load >= threshold:
            over += load - threshold
            full += 1
    return -(-over // full)


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
def attempt_all(
    solved, loads, first_of_rank, domain, slots, threshold, min_tokens, max_replicas, found
):
    """All domains at one threshold: solved, or attempted once. Peak and number of copies.

    Experts stay renumbered in the rows of `found`; hosts are ranks of all domains.
    """
    placed = np.empty((min(max_replicas, domain * slots), 3), np.int64)
    spare = np.empty_like(placed)
    peak, total = 0, 0
    for begin in range(0, len(first_of_rank) - 1, domain):
        first = first_of_rank[begin : begin + domain + 1]
        of_domain = loads[first[0] : first[-1]]
        if solved:
            own_peak, made = solve(
                of_domain, first - first[0], slots, threshold, min_tokens, len(placed), placed
            )
        else:
            own_peak, made, _ = probe(
                of_domain,
                first - first[0],
                slots,
                threshold,
                min_tokens,
                len(placed),
                placed,
                spare,
            )
        peak = max(peak, own_peak)
        for copy in range(made):
            found[total, 0] = first[0] + placed[copy, 0]
            found[total, 1] = begin + placed[copy, 1]
            found[total, 2] = placed[copy, 2]
            total += 1
    return peak, total


@njit(cache=True)
def quickest(
    loads, first_of_rank, domain, slots, tolerance_parts, min_tokens, max_replicas,
    row, copy, each, layer, found, peak, made,
):  # fmt: skip
    """The quickest of all rungs of the ladder, and no copies at all, in `found`; its copies."""
    fanout, egress, ingress = weigh(found, made, first_of_rank)
    time = row * peak + copy * max(egress, ingress) + each * made + (layer if made else 0)
    at_home = row * starting_loads(loads, first_of_rank).max()
    if at_home <= time:
        time, made, fanout = at_home, 0, 0
    trial = np.empty_like(found)
    for parts in LADDER:
        if parts <= tolerance_parts:
            continue
        threshold = shared_threshold(loads, first_of_rank, domain, parts)
        trial_peak, trial_made = attempt_all(
            False, loads, first_of_rank, domain, slots, threshold, min_tokens, max_replicas, trial
        )
        trial_fanout, egress, ingress = weigh(trial, trial_made, first_of_rank)
        trial_time = row * trial_peak + copy * max(egress, ingress) + each * trial_made
        trial_time += layer if trial_made else 0
        if (trial_time, trial_made, trial_fanout) < (time, made, fanout):
            time, made, fanout = trial_time, trial_made, trial_fanout
            copy_rows(found, trial, made)
    return made


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
    row,
    copy,
    each,
    layer,
):
    """[C, 3] expert, host rank and quota of every copy, ordered by expert, then host."""
    loads = expert_loads[experts_by_rank]
    threshold = shared_threshold(loads, first_of_rank, domain, tolerance_parts)
    found = np.empty(((len(first_of_rank) - 1) * slots, 3), np.int64)
    peak, made = attempt_all(
        True, loads, first_of_rank, domain, slots, threshold, min_tokens, max_replicas, found
    )
    if row > 0:
        made = quickest(
            loads, first_of_rank, domain, slots, tolerance_parts, min_tokens, max_replicas,
            row, copy, each, layer, found, peak, made,
        )  # fmt: skip
    for index in range(made):
        found[index, 0] = experts_by_rank[found[index, 0]]
    sort_rows(found, made)
    return found[:made]
