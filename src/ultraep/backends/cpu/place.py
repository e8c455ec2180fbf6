"""Twin of `reference/place.py`, where the search and the ladder are explained.

The rows of `placed`, and the numbers of experts in it, are those of `members.py`.
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.bound import bound_of_domain
from ultraep.backends.cpu.circles import close_circles
from ultraep.backends.cpu.members import alias, hottest, starting_loads, window
from ultraep.backends.reference.circles import MOST_RANKS, VARIANTS
from ultraep.backends.reference.place import GUESSES
from ultraep.config import LADDER, PARTS

NEVER = (1 << 63) - 1  # longer than any time


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
def probe(loads, first, slots, threshold, min_tokens, max_replicas, copy, each, placed, spare):
    """The best attempt at this threshold. Its peak and copies, and the peak of `alias`."""
    limits = (min_tokens, max_replicas)
    ranks = len(first) - 1
    alias_peak, made = alias(loads, first, slots, threshold, *limits, placed)
    if threshold * ranks - loads.sum() < ranks:
        return alias_peak, made, alias_peak
    peak, best = alias_peak, cost_of(placed, made, alias_peak, threshold, first, copy, each)
    line = np.argsort(starting_loads(loads, first), kind="mergesort")
    for member in range(1 + len(VARIANTS) if ranks <= MOST_RANKS else 1):
        if member == 0:
            trial_peak, count = window(loads, first, slots, threshold, *limits, line, spare)
        else:
            trial_peak, count = close_circles(
                loads, first, slots, threshold, *limits, line, *VARIANTS[member - 1], spare
            )
        cost = cost_of(spare, count, trial_peak, threshold, first, copy, each)
        if cost < best or (cost == best and member == 0):
            peak, made, best = trial_peak, count, cost
            copy_rows(placed, spare, made)
    return peak, made, alias_peak


@njit(cache=True)
def cost_of(found, made, peak, threshold, first, copy, each):
    """What makes one attempt better than another: all of these, in this order."""
    fanout, egress, ingress = weigh(found, made, first)
    price = copy * max(egress, ingress) + each * made
    return max(peak, threshold), price, made, fanout, egress


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
        loads, first, slots, threshold, min_tokens, max_replicas, 0, 0, placed, trial
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
    solved, loads, first_of_rank, domain, slots, threshold, min_tokens, max_replicas,
    copy, each, found,
):  # fmt: skip
    """All domains at one threshold: solved, or attempted once. Peak and number of copies.

    Experts stay renumbered in the rows of `found`; hosts are ranks of all domains.
    """
    placed = np.empty((min(max_replicas, domain * slots), 3), np.int64)
    spare = np.empty_like(placed)
    limits = (min_tokens, len(placed))
    peak, total = 0, 0
    for begin in range(0, len(first_of_rank) - 1, domain):
        first = first_of_rank[begin : begin + domain + 1]
        own, places = loads[first[0] : first[-1]], first - first[0]
        if solved:
            own_peak, made = solve(own, places, slots, threshold, *limits, placed)
        else:
            own_peak, made, _ = probe(
                own, places, slots, threshold, *limits, copy, each, placed, spare
            )
        peak = max(peak, own_peak)
        for index in range(made):
            found[total, 0] = first[0] + placed[index, 0]
            found[total, 1] = begin + placed[index, 1]
            found[total, 2] = placed[index, 2]
            total += 1
    return peak, total


@njit(cache=True)
def experts_to_give(loads, first_of_rank, rank_loads, threshold):
    """Experts that ranks above the threshold must give away: one of them at most, and all."""
    at_home, most, total = loads.copy(), 0, 0
    for rank in range(len(rank_loads)):
        surplus, given = rank_loads[rank] - threshold, 0
        while surplus > 0:
            expert = hottest(at_home, first_of_rank, rank)
            surplus -= at_home[expert]
            at_home[expert] = 0
            given += 1
        most, total = max(most, given), total + given
    return most, total


@njit(cache=True)
def hosts_to_take(rank_loads, domain, threshold):
    """The fewest ranks with room for all that is above the threshold."""
    hosts = 0
    for begin in range(0, len(rank_loads), domain):
        own = np.sort(rank_loads[begin : begin + domain])
        surplus, taken = np.maximum(own - threshold, 0).sum(), 0
        while surplus > 0 and taken < domain:
            surplus -= threshold - own[taken]
            taken += 1
        hosts += taken
    return hosts


@njit(cache=True)
def quickest(
    loads, first_of_rank, domain, slots, tolerance_parts, min_tokens, max_replicas,
    row, copy, each, layer, found, peak, made,
):  # fmt: skip
    """The quickest of all rungs of the ladder, and no copies at all, in `found`; its copies.

    Those rungs are tried first that could be quickest, and none that cannot be.
    """
    fanout, egress, ingress = weigh(found, made, first_of_rank)
    time = row * peak + copy * max(egress, ingress) + each * made + (layer if made else 0)
    rank_loads = starting_loads(loads, first_of_rank)
    if row * rank_loads.max() <= time:
        time, made, fanout = row * rank_loads.max(), 0, 0
    chosen = -1
    thresholds, least = np.empty(len(LADDER), np.int64), np.empty(len(LADDER), np.int64)
    for rung, parts in enumerate(LADDER):
        thresholds[rung] = shared_threshold(loads, first_of_rank, domain, parts)
        most, copies = experts_to_give(loads, first_of_rank, rank_loads, thresholds[rung])
        copies = max(copies, hosts_to_take(rank_loads, domain, thresholds[rung]))
        least[rung] = row * thresholds[rung] + copy * most + each * copies + layer
        if parts <= tolerance_parts or copies == 0:
            least[rung] = NEVER
    trial = np.empty_like(found)
    for rung in np.argsort(least, kind="mergesort"):
        if least[rung] > time:
            break
        threshold = thresholds[rung]
        trial_peak, trial_made = attempt_all(
            False, loads, first_of_rank, domain, slots, threshold, min_tokens, max_replicas,
            copy, each, trial,
        )  # fmt: skip
        trial_fanout, egress, ingress = weigh(trial, trial_made, first_of_rank)
        trial_time = row * threshold + copy * max(egress, ingress) + each * trial_made + layer
        if trial_peak <= threshold and (trial_time, trial_made, trial_fanout, rung) < (
            time, made, fanout, chosen
        ):  # fmt: skip
            time, made, fanout, chosen = trial_time, trial_made, trial_fanout, rung
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
        True, loads, first_of_rank, domain, slots, threshold, min_tokens, max_replicas,
        copy, each, found,
    )  # fmt: skip
    if row > 0:
        made = quickest(
            loads, first_of_rank, domain, slots, tolerance_parts, min_tokens, max_replicas,
            row, copy, each, layer, found, peak, made,
        )  # fmt: skip
    for index in range(made):
        found[index, 0] = experts_by_rank[found[index, 0]]
    sort_rows(found, made)
    return found[:made]
