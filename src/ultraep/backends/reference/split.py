"""How many tokens of every source rank each copy serves, and what every rank serves and holds.

The split is exact: put the tokens of an expert on a line, ordered by source rank, and its quotas on
the same line, home first. Where the interval of a source overlaps the interval of a copy, these
tokens go there. Both sets of intervals cover the line once, so sources and quotas both come out
exactly. With locality, what a host can send to itself is taken out before the rest is laid on the
line.

Shapes: R ranks, E experts, C copies.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray


def split(
    loads_RE: IntArray, home_of_expert: IntArray, placed_C3: IntArray, locality: bool
) -> IntArray:
    """[C, R] tokens of every source rank served by each copy (expert, host, quota).

    Two source ranks with 3 tokens each for expert 0, at home on rank 0; rank 1 serves 2 of them:

    >>> copies = np.array([[0, 1, 2]])
    >>> split(np.array([[3], [3]]), np.array([0]), copies, locality=True)
    array([[0, 2]])
    """
    split_CR = np.zeros((len(placed_C3), len(loads_RE)), dtype=np.int64)
    for expert in sorted(set(placed_C3[:, 0].tolist())):
        rows = np.flatnonzero(placed_C3[:, 0] == expert)
        sources = loads_RE[:, expert].copy()
        hosts = [int(home_of_expert[expert]), *placed_C3[rows, 1].tolist()]
        quotas = [int(sources.sum() - placed_C3[rows, 2].sum()), *placed_C3[rows, 2].tolist()]
        table = np.zeros((len(hosts), len(sources)), dtype=np.int64)
        if locality:
            for copy, host in enumerate(hosts):
                kept = min(int(sources[host]), quotas[copy])
                table[copy, host] = kept
                sources[host] -= kept
                quotas[copy] -= kept
        source_end, quota_end = np.cumsum(sources), np.cumsum(quotas)
        for copy in range(len(hosts)):
            for source in range(len(sources)):
                begin = max(source_end[source] - sources[source], quota_end[copy] - quotas[copy])
                end = min(source_end[source], quota_end[copy])
                table[copy, source] += max(0, end - begin)
        split_CR[rows] = table[1:]
    return split_CR


def tally(
    expert_loads: IntArray, home_of_expert: IntArray, placed_C3: IntArray, ranks: int
) -> tuple[IntArray, IntArray]:
    """[R] tokens served by every rank, and [C] the spare slot of every copy (expert, host, quota).

    The copies that one rank holds are numbered in their order.

    >>> tally(np.array([6, 1]), np.array([0, 1]), np.array([[0, 1, 2]]), 2)
    (array([4, 3]), array([0]))
    """
    rank_loads = np.zeros(ranks, dtype=np.int64)
    for expert, tokens in enumerate(expert_loads):
        rank_loads[home_of_expert[expert]] += tokens
    used = np.zeros(ranks, dtype=np.int64)
    slots = np.zeros(len(placed_C3), dtype=np.int64)
    for copy, (expert, host, quota) in enumerate(placed_C3):
        rank_loads[home_of_expert[expert]] -= quota
        rank_loads[host] += quota
        slots[copy] = used[host]
        used[host] += 1
    return rank_loads, slots
