"""MoonEP: every rank serves exactly the mean and gets its replicas from one other rank.

Source: MoonEP (2026), by the exact load. The rank with the largest excess repeatedly fills the rank
with the largest deficit, even if the donor then has a deficit, which is filled later. Each rank is
filled once, so all its replicas come from one home rank. The donor gives rows of its fullest
experts first, to the host that needs most.

The original has a spare slot for every home expert, and divisible loads. Here slots are ignored,
and the busiest ranks serve one row more if the rows do not divide evenly. With fewer slots the
original reads weights from other ranks, which is left out. Every domain is planned on its own.

Shapes: G ranks of one domain, E experts, C replicas.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.topology import sum_by_rank
from ultraep_tools.baselines.places import by_domain, refuse_limits


@register_policy("moonep", within_limits=False, offline=True)
def moonep(problem: Problem) -> IntArray:
    """MoonEP: exactly the mean on every rank, filled once and from one other rank."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    return by_domain(problem, fill_up)


def fill_up(loads_E: IntArray, homes_E: IntArray, ranks: int) -> IntArray:
    """[C, 3] expert, host and quota of every replica."""
    moved_GG = _moved(sum_by_rank(loads_E, homes_E, ranks))
    placed: list[tuple[int, int, int]] = []
    for donor in np.flatnonzero(moved_GG.any(axis=1)).tolist():
        own = np.flatnonzero(homes_E == donor)
        placed += _cut(own, loads_E[own], moved_GG[donor])
    return np.array(placed, dtype=np.int64).reshape(-1, 3)


def _moved(load_G: IntArray) -> IntArray:
    """[G, G] rows that every rank gives to every other."""
    share, remainder = divmod(int(load_G.sum()), len(load_G))
    excess_G = load_G - share
    excess_G[np.argsort(-load_G, kind="stable")[:remainder]] -= 1
    moved_GG = np.zeros((len(load_G), len(load_G)), dtype=np.int64)
    while excess_G.any():
        donor, host = excess_G.argmax(), excess_G.argmin()
        moved_GG[donor, host] = -excess_G[host]
        excess_G[donor] += excess_G[host]
        excess_G[host] = 0
    return moved_GG


def _cut(expert_E: IntArray, left_E: IntArray, needed_G: IntArray) -> list[tuple[int, int, int]]:
    """Return the replicas of one rank: the fullest expert serves the host that needs most.

    >>> _cut(np.array([6, 7]), np.array([9, 5]), np.array([0, 10, 3]))
    [(6, 1, 9), (7, 2, 3), (7, 1, 1)]
    """
    left_E, needed_G = left_E.copy(), needed_G.copy()
    placed = []
    while needed_G.any():
        index, host = int(left_E.argmax()), int(needed_G.argmax())
        rows = int(min(left_E[index], needed_G[host]))
        placed.append((int(expert_E[index]), host, rows))
        left_E[index] -= rows
        needed_G[host] -= rows
    return placed
