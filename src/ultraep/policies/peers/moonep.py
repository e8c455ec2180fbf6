"""MoonEP: every rank serves exactly the mean, and gets its copies from one other rank.

Source: MoonEP (2026). On the exact load, again and again, the rank that lacks most is filled up by
the rank that has most above the mean, also where that rank then lacks some itself: it is filled
later. Each rank is filled once, so all its copies come from one home rank, and there are at most
as many as that rank has experts. What a rank gives away is taken from its experts with most tokens
left, for the host with most to get.

The original has a spare slot for every home expert of a rank, and as many tokens as ranks times
their capacity. Here the ranks with most at home serve one token more where the tokens do not
divide evenly, and slots are not looked at: its plans are compared, not run. With fewer slots
the original reads weights from other ranks instead, which is not here. Every domain is balanced for
itself. `tolerance` changes nothing. `min_tokens_per_replica` and `max_replicas` are refused.

Shapes: G ranks of one domain, E experts, C copies.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import by_domain, refuse_limits


@register_policy("moonep", within_limits=False)
def moonep(problem: Problem) -> IntArray:
    """MoonEP: exactly the mean on every rank, filled once and from one other rank."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    return by_domain(problem, fill_up)


def fill_up(loads_E: IntArray, homes_E: IntArray, ranks: int) -> IntArray:
    """[C, 3] expert, host and quota of every copy."""
    wanted_GG = _wanted(loads_E, homes_E, ranks)
    copies: list[tuple[int, int, int]] = []
    for donor in np.flatnonzero(wanted_GG.any(axis=1)).tolist():
        own = np.flatnonzero(homes_E == donor)
        copies += _cut(own, loads_E[own], wanted_GG[donor])
    return np.array(copies, dtype=np.int64).reshape(-1, 3)


def _wanted(loads_E: IntArray, homes_E: IntArray, ranks: int) -> IntArray:
    """[G, G] tokens that every rank gives to every other."""
    above_G = np.zeros(ranks, dtype=np.int64)
    np.add.at(above_G, homes_E, loads_E)
    share, remainder = divmod(int(loads_E.sum()), ranks)
    above_G[np.argsort(-above_G, kind="stable")[:remainder]] -= 1
    above_G -= share
    wanted_GG = np.zeros((ranks, ranks), dtype=np.int64)
    while above_G.any():
        donor, host = above_G.argmax(), above_G.argmin()
        wanted_GG[donor, host] = -above_G[host]
        above_G[donor] += above_G[host]
        above_G[host] = 0
    return wanted_GG


def _cut(expert_E: IntArray, left_E: IntArray, wanted_G: IntArray) -> list[tuple[int, int, int]]:
    """Copies of one rank's experts: the host with most to get from the expert with most left.

    >>> _cut(np.array([6, 7]), np.array([9, 5]), np.array([0, 10, 3]))
    [(6, 1, 9), (7, 2, 3), (7, 1, 1)]
    """
    left_E, wanted_G = left_E.copy(), wanted_G.copy()
    copies = []
    while wanted_G.any():
        place, host = int(left_E.argmax()), int(wanted_G.argmax())
        tokens = int(min(left_E[place], wanted_G[host]))
        copies.append((int(expert_E[place]), host, tokens))
        left_E[place] -= tokens
        wanted_G[host] -= tokens
    return copies
